//! `fuselane worker NAME`: one provider in a process of its own, driven by `fuselane bench` over
//! standard input and output (see [`crate::protocol`]). A library is measured through the traits
//! here; the loop, the clock and the reading of memory are the same for all.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::fs;
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use crate::peers;
use crate::process_memory;
use crate::protocol::{Job, Reply, Request, Sample};

/// Run one provider for `fuselane bench`, which starts this itself.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The provider.
    provider: String,
}

/// Why a call was not made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The library does not have it.
    Unsupported(String),
    Failed(String),
}

impl From<fuselane::Error> for Fault {
    fn from(error: fuselane::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Error for Fault {}

impl From<Fault> for Reply {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Unsupported(why) => Self::Unsupported { why },
            Fault::Failed(why) => Self::Failed { why },
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Unsupported(why) | Self::Failed(why)) = self;
        f.write_str(why)
    }
}

/// What is measured.
pub(crate) trait Library {
    /// Names and versions to record: by default what decides how fast our own code is.
    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::from([
            ("fuselane".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("isa".to_owned(), fuselane::isa().name().to_owned()),
        ])
    }

    /// Reads the inputs of a job into the library's own kind of memory.
    fn load(&self, job: &Job) -> Result<Box<dyn Loaded + '_>, Fault>;

    /// Gives memory that is kept for reuse back to the system.
    fn trim(&self) {}

    /// Bytes of memory that it has now: by default those of this process.
    fn memory(&self) -> Result<u64, Fault> {
        Ok(process_memory::resident()?)
    }

    /// Forgets the peak of [`Library::peak`] so far.
    fn reset_peak(&self) -> Result<(), Fault> {
        Ok(process_memory::reset_peak()?)
    }

    /// The most memory that it has had since the last reset.
    fn peak(&self) -> Result<u64, Fault> {
        Ok(process_memory::peak()?)
    }
}

/// A job whose inputs are in memory.
pub(crate) trait Loaded {
    /// Makes the call ready. For a backward, this runs the forward, and the call keeps the
    /// forward's output alive, and what the backward needs. Outputs are made here for
    /// [`crate::protocol::Alloc::Warm`], and at each run for `Fresh`.
    fn call(&self) -> Result<Box<dyn Call + '_>, Fault>;
}

/// A call that can be made again and again.
pub(crate) trait Call {
    /// Makes it.
    fn run(&mut self) -> Result<(), Fault>;

    /// Makes it, and gives its time in nanoseconds: by default that of [`Call::run`].
    fn time(&mut self) -> Result<u64, Fault> {
        let start = Instant::now();
        self.run()?;
        Ok(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Elements of an output of the last run, widened.
    fn sample(&self, output: &str, samples: &[Sample]) -> Result<Vec<f32>, Fault>;
}

type Requests<'a> = &'a mut dyn FnMut() -> Result<Option<Request>, Box<dyn Error>>;

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let library = peers::library(&args.provider)?;
    let mut lines = std::io::stdin().lock().lines();
    let mut next = move || -> Result<Option<Request>, Box<dyn Error>> {
        match lines.next() {
            None => Ok(None),
            Some(line) => Ok(Some(serde_json::from_str(&line?)?)),
        }
    };
    say(&Reply::Hello { versions: library.versions() })?;
    while let Some(request) = next()? {
        match request {
            Request::Prepare { job } => {
                if let Err(fault) = prepared(&*library, &job, &mut next) {
                    say(&fault
                        .downcast::<Fault>()
                        .map_or_else(Err, |fault| Ok((*fault).into()))?)?;
                }
                library.trim();
            }
            Request::Memory { job } => say(&match memory(&*library, &job) {
                Ok(extra_bytes) => Reply::Memory { extra_bytes },
                Err(fault) => fault.into(),
            })?,
            Request::Release => say(&Reply::Released)?,
            Request::Outputs { .. } | Request::Round { .. } => {
                say(&Reply::Failed { why: "nothing is prepared".to_owned() })?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Answers requests about one job until it is released. A [`Fault`] as error comes before any
/// answer.
fn prepared(library: &dyn Library, job: &Job, next: Requests<'_>) -> Result<(), Box<dyn Error>> {
    if job.threads != rayon::current_num_threads() {
        let why = format!("this worker has {} threads", rayon::current_num_threads());
        return Err(Fault::Failed(why).into());
    }
    let loaded = library.load(job)?;
    let mut call = loaded.call()?;
    call.run()?;
    call.run()?;
    say(&Reply::Ready)?;
    while let Some(request) = next()? {
        let reply = match request {
            Request::Release => break,
            Request::Round { calls, settle } => times(&mut *call, calls, settle),
            Request::Outputs { samples, folder } => outputs(&*call, &samples, &folder),
            Request::Prepare { .. } | Request::Memory { .. } => {
                Err(Fault::Failed("the last job is not released".to_owned()))
            }
        };
        say(&reply.unwrap_or_else(Reply::from))?;
    }
    drop(call);
    drop(loaded);
    say(&Reply::Released)
}

fn times(call: &mut dyn Call, calls: usize, settle: bool) -> Result<Reply, Fault> {
    if settle {
        call.run()?;
    }
    let mut ns = Vec::with_capacity(calls);
    for _ in 0..calls {
        ns.push(call.time()?);
    }
    Ok(Reply::Times { ns })
}

/// Writes parts of the outputs of the last run.
fn outputs(
    call: &dyn Call,
    samples: &BTreeMap<String, Vec<Sample>>,
    folder: &Path,
) -> Result<Reply, Fault> {
    for (name, samples) in samples {
        let values = call.sample(name, samples)?;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        fs::write(folder.join(format!("{name}.f32")), bytes)?;
    }
    Ok(Reply::Written)
}

/// See [`Reply::Memory`].
pub(crate) fn memory(library: &dyn Library, job: &Job) -> Result<u64, Fault> {
    let loaded = library.load(job)?;
    loaded.call()?.run()?; // threads, tables, whatever a library sets up at its first call
    let settle = || {
        library.trim();
        process_memory::trim();
    };
    settle();
    let before = library.memory()?;
    let mut call = loaded.call()?;
    settle();
    library.reset_peak()?;
    call.run()?;
    Ok(library.peak()?.saturating_sub(before))
}

fn say(reply: &Reply) -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, reply)?;
    out.write_all(b"\n")?;
    out.flush()?;
    Ok(())
}
