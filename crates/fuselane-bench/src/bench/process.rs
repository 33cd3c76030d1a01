//! A worker's process: started, asked, watched, and ended.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::interrupt;
use crate::protocol::{Reply, Request};

/// How long a worker may take to come up: importing PyTorch from a cold disk takes its time.
const START: Duration = Duration::from_secs(180);

/// Why a worker gave no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Silence {
    /// The user has asked to stop.
    Interrupted,
    /// It ended or hung, and is no longer there. The text is for the table's note.
    Dead(String),
}

/// A running worker.
pub(super) struct Worker {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    log: PathBuf,
    /// Where in the log its own words begin.
    log_start: usize,
}

impl Worker {
    /// Starts one, and waits until it is up. What it prints to standard error is added to `log`.
    pub(super) fn start(
        name: &str,
        mut command: Command,
        log: &Path,
    ) -> Result<(Self, BTreeMap<String, String>), Silence> {
        let dead = |error: std::io::Error| Silence::Dead(format!("{name} does not start: {error}"));
        let file = File::options().create(true).append(true).open(log).map_err(dead)?;
        let log_start = file.metadata().map_err(dead)?.len() as usize;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        // Ctrl-C is ours to handle: it would reach the whole process group.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(dead)?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        let stdin = child.stdin.take();
        let mut worker =
            Self { name: name.to_owned(), child, stdin, lines, log: log.to_path_buf(), log_start };
        match worker.answer(START)? {
            Reply::Hello { versions } => Ok((worker, versions)),
            other => Err(worker.lost(&format!("began with {other:?}"))),
        }
    }

    /// Sends a request, whose answer has to be waited for before the next.
    pub(super) fn send(&mut self, request: &Request) -> Result<(), Silence> {
        let mut line = serde_json::to_string(request)
            .map_err(|error| Silence::Dead(format!("{}: {error}", self.name)))?;
        line.push('\n');
        match self.stdin.as_mut().map(|stdin| stdin.write_all(line.as_bytes())) {
            Some(Ok(())) => Ok(()),
            _ => Err(self.ended()),
        }
    }

    /// Waits for the answer to the last request.
    pub(super) fn answer(&mut self, limit: Duration) -> Result<Reply, Silence> {
        let end = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => {
                    return serde_json::from_str(&line)
                        .map_err(|error| self.lost(&format!("answered {line:?}: {error}")));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
                Err(RecvTimeoutError::Timeout) if interrupt::asked() => {
                    return Err(Silence::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() > end => {
                    return Err(self.lost(&format!("no answer in {} s", limit.as_secs())));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Whether any of its threads runs or wants to, where the system tells. (Its CPU time would not
    /// do: of running threads of others, it grows with the ticks of the system's clock only.)
    pub(super) fn is_running(&self) -> Option<bool> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).ok()?;
        Some(tasks.flatten().any(|task| {
            let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            // The state is behind the name, in which there may be anything.
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('R'))
        }))
    }

    /// It closed its output: how did it end?
    fn ended(&mut self) -> Silence {
        self.stdin = None;
        let how = match self.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        Silence::Dead(format!("crashed ({how}){}", self.last_words()))
    }

    /// The end of its log, since it was started: the line after a panic's place, or the last one.
    fn last_words(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log =
            String::from_utf8_lossy(log.get(self.log_start..).unwrap_or_default()).into_owned();
        let lines: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let panic = lines.iter().rposition(|line| line.contains("panicked at"));
        let words = panic.and_then(|at| lines.get(at + 1)).or(lines.last());
        words.map_or(String::new(), |words| format!(": {words}"))
    }

    /// It is of no use any more.
    fn lost(&mut self, why: &str) -> Silence {
        self.kill();
        Silence::Dead(why.to_owned())
    }

    fn kill(&mut self) {
        self.stdin = None;
        // With what it has started itself, such as a compiler: they are one process group.
        #[cfg(unix)]
        if let (Ok(None), Ok(group)) = (self.child.try_wait(), i32::try_from(self.child.id())) {
            // SAFETY: takes any number. The group is this child's own: it was started as the
            // leader of one, and has not been waited for, so that its number is not used again.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn start(script: &str) -> Result<(Worker, BTreeMap<String, String>), Silence> {
        let folder = tempfile::tempdir().unwrap();
        Worker::start("peer", shell(script), &folder.path().join("log"))
    }

    impl Worker {
        fn ask(&mut self, request: &Request, limit: Duration) -> Result<Reply, Silence> {
            self.send(request)?;
            self.answer(limit)
        }
    }

    const HELLO: &str = r#"echo '{"is":"hello","versions":{"peer":"1"}}'"#;
    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn answers() {
        let script = format!(r#"{HELLO}; read line; echo '{{"is":"times","ns":[1]}}'; read line"#);
        let (mut worker, versions) = start(&script).unwrap();
        assert_eq!(versions["peer"], "1");
        let reply = worker.ask(&Request::Round { calls: 1, settle: false }, LIMIT);
        assert_eq!(reply, Ok(Reply::Times { ns: vec![1] }));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_busy_worker_is_running_and_an_idle_one_is_not() {
        let (busy, _) = start(&format!("{HELLO}; while :; do :; done")).unwrap();
        let (idle, _) = start(&format!("{HELLO}; read line")).unwrap();
        let end = Instant::now() + LIMIT;
        while idle.is_running() == Some(true) {
            assert!(Instant::now() < end, "a worker that waits is running");
        }
        for _ in 0..50 {
            std::thread::sleep(Duration::from_millis(1));
            assert_eq!((busy.is_running(), idle.is_running()), (Some(true), Some(false)));
        }
    }

    #[test]
    fn a_crash_tells_its_last_words() {
        let script = format!("{HELLO}; read line; echo 'out of luck' >&2; exit 3");
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let (mut worker, _) = Worker::start("peer", shell(&script), &log).unwrap();
        let Err(Silence::Dead(why)) = worker.ask(&Request::Release, LIMIT) else { panic!() };
        assert!(
            why.contains("crashed") && why.contains('3') && why.contains("out of luck"),
            "{why}"
        );
    }

    #[test]
    fn a_hung_worker_is_ended() {
        let (mut worker, _) = start(&format!("{HELLO}; sleep 600")).unwrap();
        let Err(Silence::Dead(why)) = worker.ask(&Request::Release, Duration::from_millis(60))
        else {
            panic!()
        };
        assert!(why.contains("no answer"), "{why}");
        assert!(worker.child.try_wait().unwrap().is_some());
    }

    #[test]
    fn nonsense_and_no_program() {
        let (mut worker, _) =
            start(&format!("{HELLO}; read line; echo nonsense; read line")).unwrap();
        let Err(Silence::Dead(why)) = worker.ask(&Request::Release, LIMIT) else { panic!() };
        assert!(why.contains("nonsense"), "{why}");
        let folder = tempfile::tempdir().unwrap();
        let none =
            Worker::start("peer", Command::new("/no such program"), &folder.path().join("log"));
        let Err(Silence::Dead(why)) = none else { panic!() };
        assert!(why.contains("peer does not start"), "{why}");
    }
}
