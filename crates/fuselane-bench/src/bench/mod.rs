//! `fuselane bench`: the published tables, regenerated on this machine.
//!
//! `select` says which tables, `sweep` measures their rows through workers (`process`) on shared
//! `inputs`, `truth` tells whether results are right, `folder` keeps them, `tables` shows them.

mod folder;
mod inputs;
mod interrupt;
mod process;
mod select;
mod statistics;
mod sweep;
mod tables;
mod truth;

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, SystemTime};

use clap::Parser as _;
use indicatif::{ProgressBar, ProgressStyle};

use crate::case::{self, Dtype, Metric};
use crate::gpu::{self, Gpu, On};
use crate::machine::Machine;
use crate::peers::{self, Peer, Start};
use crate::protocol::Alloc;
use crate::record::{Record, Run};
use crate::report;
use folder::Folder;
use select::{Sizes, Table};
use sweep::{Effort, Stop, Sweep};

/// Measure ours beside others: speed and memory, forward and backward.
///
/// Makes the published tables on this machine, each row with the limit beside it: a copy of as
/// many bytes as the operator has to move. Outputs of all providers are compared with an f64
/// reference before anything is timed. Results go to a folder, with a report to open in a browser.
///
/// Examples:
///   fuselane bench '*relu*' --n 1024,4096
///   fuselane bench --peers torch,torch_compile --full
///   fuselane bench '*softmax*' --device gpu
///   fuselane bench --resume fuselane-runs/2026-01-31T12-00-00Z
#[derive(clap::Args, Default)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// Only tables whose names match, such as '*-speed-fwd-*' or '*relu*'.
    #[arg(value_name = "GLOB")]
    globs: Vec<String>,
    /// These sequence lengths (on a grid, about as many tokens).
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = parse_size)]
    n: Vec<usize>,
    /// A few small sizes of each table: about a minute without Python peers [the default].
    #[arg(long, conflicts_with_all = ["n", "full"])]
    quick: bool,
    /// All sizes of the published tables, up to 32768; rows that do not fit in memory say so.
    #[arg(long, conflicts_with = "n")]
    full: bool,
    /// These dtypes of activations (bf16, f16, f32) in place of each case's own.
    #[arg(long, value_delimiter = ',', value_name = "DTYPE")]
    dtype: Vec<Dtype>,
    /// Where operators run. A GPU needs a build with a runtime: one of the features wgpu, vulkan,
    /// metal, cuda, cuda-cpp and rocm.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: On,
    /// Whom to compare with: torch, torch_compile, jax, candle, unfused; or all, or none. Also
    /// fuselane_python, which is ours called from Python. All of them are on the CPU [default:
    /// unfused; none on a GPU].
    #[arg(long, value_delimiter = ',', value_name = "PEER")]
    peers: Vec<String>,
    /// Outputs in memory that is used again, or in new memory from each library's default
    /// allocator, or both.
    #[arg(long, value_name = "REGIME", default_value = "warm")]
    alloc: AllocArg,
    /// Rows in the order of the memory that they take, rather than table by table. Long runs take far
    /// less time where memory that is freed goes back to the host, as on many machines of the
    /// cloud; tables are printed once their last rows are there.
    #[arg(long)]
    by_size: bool,
    /// Threads of each provider [default: all].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Where results go [default: a new folder in fuselane-runs].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on with an interrupted run, with its own options.
    #[arg(long, value_name = "DIR", conflicts_with_all =
        ["globs", "n", "quick", "full", "dtype", "device", "peers", "alloc", "by_size", "threads", "out", "cases"])]
    resume: Option<PathBuf>,
    /// What to print.
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    format: Format,
    /// Further case files, in the form of those in crates/fuselane-bench/cases.
    #[arg(long, value_name = "FILE")]
    cases: Vec<PathBuf>,
    /// Print the names of the tables and end.
    #[arg(long)]
    list: bool,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum AllocArg {
    #[default]
    Warm,
    Fresh,
    Both,
}

impl AllocArg {
    fn regimes(self) -> &'static [Alloc] {
        match self {
            Self::Warm => &[Alloc::Warm],
            Self::Fresh => &[Alloc::Fresh],
            Self::Both => &[Alloc::Warm, Alloc::Fresh],
        }
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Tables for people.
    #[default]
    Table,
    /// A JSON object per line.
    Json,
    /// Comma-separated values.
    Csv,
}

fn parse_size(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=0x1000_0000) => Ok(n),
        _ => Err("expected a number from 1 to 268435456".to_owned()),
    }
}

/// The bare command.
impl Args {
    pub(crate) fn bare() -> Self {
        Self::default()
    }

    /// The peers that are asked for.
    fn peers(&self) -> Result<Vec<String>, String> {
        let asked = |default: &str| match self.peers.is_empty() {
            true => vec![default.to_owned()],
            false => self.peers.clone(),
        };
        match self.device {
            On::Cpu => Ok(asked("unfused")),
            On::Gpu => match asked("none").iter().find(|&peer| peer != "none") {
                None => Ok(Vec::new()),
                Some(peer) => {
                    Err(format!("the peer {peer:?} runs on the CPU: not with --device gpu"))
                }
            },
        }
    }

    /// The GPU that is asked for.
    fn gpu(&self) -> Result<Option<Gpu>, String> {
        match self.device {
            On::Cpu => Ok(None),
            On::Gpu => gpu::find("bench").map(Some),
        }
    }

    fn sizes(&self) -> Sizes {
        match (self.full, self.n.is_empty()) {
            (true, _) => Sizes::Full,
            (false, true) => Sizes::Quick,
            (false, false) => Sizes::Tokens(self.n.clone()),
        }
    }

    fn tables(&self) -> Result<Vec<Table>, String> {
        let mut cases = case::builtin()?;
        for path in &self.cases {
            cases.extend(case::read(path)?);
        }
        select::tables(&cases, &self.globs, &self.sizes(), &self.dtype)
    }
}

/// For parsing the options that a run was begun with.
#[derive(clap::Parser)]
struct Stored {
    #[command(flatten)]
    args: Args,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    if args.list {
        let names: Vec<String> =
            args.tables()?.into_iter().map(|table| table.name + "\n").collect();
        std::io::stdout().write_all(names.concat().as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(path) = &args.resume else {
        let plan = Plan::new(args, args.format)?;
        let facts = facts(args)?;
        let path = args.out.clone().unwrap_or_else(|| default_folder(&facts.started));
        return plan.run(Folder::create(&path, facts)?);
    };
    let folder = Folder::resume(path)?;
    let stored = ["fuselane bench".to_owned()].into_iter().chain(folder.run.arguments.clone());
    let stored = Stored::try_parse_from(stored)
        .map_err(|error| format!("the options in {}/run.json: {error}", path.display()))?;
    same_program(&folder.run, &facts(&stored.args)?, path)?;
    let plan = Plan::new(&stored.args, args.format)?;
    plan.run(folder)
}

/// A run has one program, on one machine: results of two cannot be compared in one table.
fn same_program(run: &Run, now: &Run, path: &Path) -> Result<(), String> {
    let gpu = |run: &Run| run.gpu.as_ref().map(|gpu| format!("{}, {}", gpu.name, gpu.runtime));
    let facts = [
        ("commit", run.commit.clone(), now.commit.clone()),
        ("version", Some(run.fuselane.clone()), Some(now.fuselane.clone())),
        ("CPU", run.machine.cpu.clone(), now.machine.cpu.clone()),
        ("instruction set", Some(run.isa.clone()), Some(now.isa.clone())),
        ("GPU", gpu(run), gpu(now)),
    ];
    for (what, then, now) in facts {
        if then != now {
            let text = |value: Option<String>| value.unwrap_or_else(|| "unknown".to_owned());
            return Err(format!(
                "{} was begun with another {what} ({}, now {}): begin a new run",
                path.display(),
                text(then),
                text(now)
            ));
        }
    }
    Ok(())
}

/// A run's folder, by its time.
fn default_folder(started: &str) -> PathBuf {
    // Colons are not for file names everywhere.
    Path::new("fuselane-runs").join(started.replace(':', "-"))
}

/// All that a run is, before its folder is there.
struct Plan {
    tables: Vec<Table>,
    peers: Vec<Box<dyn Peer>>,
    regimes: &'static [Alloc],
    by_size: bool,
    threads: usize,
    effort: Effort,
    format: Format,
    /// On the CPU, and none of the Python peers was asked for.
    rust_only: bool,
}

impl Plan {
    fn new(args: &Args, format: Format) -> Result<Self, String> {
        let threads = threads(args);
        Ok(Self {
            tables: args.tables()?,
            peers: match args.device {
                On::Cpu => peers(&args.peers()?, threads)?,
                On::Gpu => args.peers().map(|_| peers::own_on_gpu())?,
            },
            regimes: args.alloc.regimes(),
            by_size: args.by_size,
            threads,
            effort: if args.full { Effort::FULL } else { Effort::QUICK },
            format,
            rust_only: args.device == On::Cpu
                && args.peers()?.iter().all(|peer| peer == "unfused" || peer == "none"),
        })
    }

    /// The regimes of a table: memory is always measured with each library's own allocator.
    fn regimes(&self, table: &Table) -> &'static [Alloc] {
        match table.metric {
            Metric::Speed => self.regimes,
            Metric::Memory => &[Alloc::Fresh],
        }
    }

    fn run(&self, folder: Folder) -> Result<ExitCode, Box<dyn Error>> {
        interrupt::listen();
        let names: Vec<&str> = self.peers.iter().map(|peer| peer.name()).collect();
        let path = folder.path().to_path_buf();
        if self.format == Format::Table {
            self.say(&self.heading(&folder, &names))?;
        } else if self.format == Format::Csv {
            self.say(&folder::csv(&[], true)?)?;
        }
        warn_of_load();
        let mut sweep = Sweep::new(&self.peers, self.threads, self.effort, folder)?;
        let swept = self.sweep(&mut sweep, &names);
        // What stopped the sweep is told last, whatever else goes wrong on the way.
        let ended = self.finish(&mut sweep.folder);
        match swept {
            Ok(()) => {
                ended?;
                let wrong = |r: &&Record| r.provider.starts_with("fuselane") && !r.ok;
                let wrong = sweep.folder.records.iter().filter(wrong);
                if wrong.filter(|record| record.error.is_some()).count() > 0 {
                    return Err("results of fuselane itself are wrong: see the notes".into());
                }
                if self.rust_only && self.format == Format::Table {
                    eprintln!(
                        "PyTorch beside it: `fuselane setup-peers` once, then `fuselane bench --peers torch,torch_compile`"
                    );
                }
                Ok(ExitCode::SUCCESS)
            }
            Err(Stop::Interrupted) => {
                if let Err(why) = ended {
                    eprintln!("fuselane: {why}");
                }
                eprintln!("interrupted; go on with `fuselane bench --resume {}`", path.display());
                Ok(ExitCode::from(130))
            }
            Err(Stop::Failed(why)) => Err(why.into()),
        }
    }

    /// Writes what is made of the results.
    fn finish(&self, folder: &mut Folder) -> Result<(), String> {
        if folder.records.is_empty() {
            return Ok(());
        }
        folder.sort(&self.tables.iter().map(|table| table.name.as_str()).collect::<Vec<_>>())?;
        folder.write_csv()?;
        let page = report::write(folder.path())?;
        if self.format == Format::Table {
            self.say(&format!("{}\n", report::brief(folder.path())?))?;
        }
        eprintln!("results: {}\nreport:  {}", folder.path().display(), page.display());
        Ok(())
    }

    fn heading(&self, folder: &Folder, names: &[&str]) -> String {
        let run = &folder.run;
        let rows: usize = self.tables.iter().map(|t| t.sizes.len() * self.regimes(t).len()).sum();
        format!(
            "fuselane {} on {}\n{} tables, {rows} rows; providers: {}\n\
             best/ours: the best other provider over ours, above 1 where ours is ahead; of copy: a copy\n\
             of the same bytes over ours; of roof: the same, or ours in cache where that is slower;\n\
             to/tr, toc/tr: eager and compiled PyTorch over the fused kernel, as published for that GPU\n\n",
            run.fuselane,
            match &run.gpu {
                Some(gpu) => format!("{}\nthrough {}", gpu.words(), gpu.runtime),
                None => format!(
                    "{}, {} threads, {}",
                    run.machine.cpu.as_deref().unwrap_or("an unknown CPU"),
                    self.threads,
                    run.isa
                ),
            },
            self.tables.len(),
            names.join(", "),
        )
    }

    /// All rows, in the order in which they are measured.
    fn rows(&self, sweep: &Sweep<'_>) -> Vec<Row<'_>> {
        let mut rows = Vec::new();
        // Upwards in one table and downwards in the next, so that neighbours take about as much memory.
        let mut upwards = false;
        for (at, table) in self.tables.iter().enumerate() {
            for &alloc in self.regimes(table) {
                upwards = !upwards;
                let row = |&n: &usize| Row { at, table, alloc, n };
                match upwards {
                    true => rows.extend(table.sizes.iter().map(row)),
                    false => rows.extend(table.sizes.iter().rev().map(row)),
                }
            }
        }
        if self.by_size {
            // Memory last: its tables leave out whom those of speed have found wrong.
            rows.sort_by_cached_key(|row| (row.table.metric, sweep.memory_of(row.table, row.n)));
        }
        rows
    }

    fn sweep(&self, sweep: &mut Sweep<'_>, names: &[&str]) -> Result<(), Stop> {
        let rows = self.rows(sweep);
        let style = "{wide_bar} {percent:>3} %  {elapsed} + {eta}  {msg}";
        let style = ProgressStyle::with_template(style).map_err(|error| error.to_string())?;
        // Hidden by itself where stderr is not a terminal.
        let bar = ProgressBar::new(rows.iter().map(Row::weight).sum()).with_style(style);
        bar.enable_steady_tick(Duration::from_millis(200));
        for (number, row) in rows.iter().enumerate() {
            let &Row { table, alloc, n, .. } = row;
            bar.set_message(format!("{} n={n}", short(&table.name)));
            let records = sweep.row(table, n, alloc)?;
            bar.inc(row.weight());
            let text = match self.format {
                Format::Table if rows[number + 1..].iter().any(|other| row.is_beside(other)) => {
                    String::new()
                }
                Format::Table => {
                    let folder = &sweep.folder;
                    let on = folder.run.gpu.as_ref();
                    tables::render(table, alloc, on, &folder.records, names) + "\n"
                }
                Format::Json => folder::lines(&records)?,
                Format::Csv => folder::csv(&records, false)?,
            };
            bar.suspend(|| self.say(&text))?;
        }
        bar.finish_and_clear();
        Ok(())
    }

    fn say(&self, text: &str) -> Result<(), String> {
        let mut out = anstream::stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.map_err(|error| format!("standard output: {error}"))
    }
}

/// Times on a busy machine are not worth much.
fn warn_of_load() {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().and_then(|load| load.parse::<f64>().ok());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if let Some(load) = load.filter(|&load| load > 0.5 * cpus as f64) {
        eprintln!(
            "fuselane: the machine is busy (load {load} on {cpus} CPUs): times will be noisy"
        );
    }
}

/// The parts of a table's name that tell it from others.
fn short(name: &str) -> String {
    let parts: Vec<&str> = name.split('-').filter(|part| !part.starts_with("batch")).collect();
    parts.join("-")
}

/// A row of the plan's table at `at`.
struct Row<'a> {
    at: usize,
    table: &'a Table,
    alloc: Alloc,
    n: usize,
}

impl Row<'_> {
    /// How long it takes, roughly, in arbitrary units.
    fn weight(&self) -> u64 {
        let Table { case, mode, dtype, metric, .. } = self.table;
        let moved = case.moved_bytes(*mode, self.n, dtype.0);
        match metric {
            Metric::Speed => 100 + (moved >> 20),
            Metric::Memory => 20 + (moved >> 22),
        }
    }

    /// Whether both are printed in one table.
    fn is_beside(&self, other: &Self) -> bool {
        (self.at, self.alloc) == (other.at, other.alloc)
    }
}

fn threads(args: &Args) -> usize {
    args.threads.map_or_else(rayon::current_num_threads, usize::from)
}

/// Ours and the others that are asked for, in the order of the columns. One that is not to be had
/// is said on standard error and left out.
fn peers(asked: &[String], threads: usize) -> Result<Vec<Box<dyn Peer>>, String> {
    let others = peers::others();
    let names: Vec<&str> = others.iter().map(|peer| peer.name()).collect();
    for name in asked {
        if !matches!(name.as_str(), "all" | "none") && !names.contains(&name.as_str()) {
            return Err(format!(
                "unknown peer {name:?}, expected {}, all or none",
                names.join(", ")
            ));
        }
    }
    let all = asked.iter().any(|name| name == "all");
    let mut found = peers::own();
    for peer in others {
        if !all && !asked.iter().any(|name| name == peer.name()) {
            continue;
        }
        match peer.command(Start { threads, alloc: Alloc::Warm }) {
            Ok(_) => found.push(peer),
            Err(why) => eprintln!("fuselane: {why}"),
        }
    }
    // The limit stands last.
    found.sort_by_key(|peer| peer.name() == "copy");
    Ok(found)
}

/// What is known before anything is measured.
fn facts(args: &Args) -> Result<Run, String> {
    let arguments = std::env::args().skip_while(|argument| argument != "bench").skip(1);
    Ok(Run {
        started: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        arguments: without_out(arguments),
        fuselane: env!("CARGO_PKG_VERSION").to_owned(),
        commit: commit(),
        machine: Machine::read(),
        os: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        isa: fuselane::isa().name().to_owned(),
        gpu: args.gpu()?,
        threads: threads(args),
        versions: BTreeMap::new(),
    })
}

/// The options that say what is measured: not where it goes, nor how it is shown.
fn without_out(arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut kept = Vec::new();
    let mut arguments = arguments.peekable();
    while let Some(argument) = arguments.next() {
        let option = ["--out", "--format"]
            .iter()
            .find(|&&option| argument == option || argument.starts_with(&format!("{option}=")));
        if argument == "--cases" {
            // A run may be resumed from another folder.
            kept.push(argument);
            kept.extend(arguments.next().map(absolute));
            continue;
        }
        match option {
            None => match argument.strip_prefix("--cases=") {
                Some(path) => kept.push(format!("--cases={}", absolute(path.to_owned()))),
                None => kept.push(argument),
            },
            Some(&option) if argument == option => drop(arguments.next()),
            Some(_) => {}
        }
    }
    kept
}

fn absolute(path: String) -> String {
    std::path::absolute(&path).map_or(path, |path| path.display().to_string())
}

/// The commit of the sources that this was built from, if they are still there.
fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let folder = env!("CARGO_MANIFEST_DIR");
        let output = Command::new("git").arg("-C").arg(folder).args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        output.status.success().then_some(text)
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() { commit } else { commit + "-dirty" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_is_stored() {
        let line = "*relu* --out x --n 5 --format=json --format json --peers torch --out=y";
        let kept = without_out(line.split(' ').map(str::to_owned));
        assert_eq!(kept, ["*relu*", "--n", "5", "--peers", "torch"]);
        let stored = Stored::try_parse_from(["fuselane bench".to_owned()].into_iter().chain(kept));
        let args = stored.unwrap().args;
        assert_eq!(
            (args.n, args.peers, args.globs),
            (vec![5], vec!["torch".to_owned()], vec!["*relu*".to_owned()])
        );
    }

    #[test]
    fn sizes_and_peers() {
        assert_eq!(parse_size("1024"), Ok(1024));
        for text in ["0", "-1", "x", "99999999999"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        let error = peers(&["tensorflow".to_owned()], 1).err().unwrap();
        assert!(error.contains("tensorflow") && error.contains("unfused"), "{error}");
        let names: Vec<&str> =
            peers(&["none".to_owned()], 1).unwrap().iter().map(|peer| peer.name()).collect();
        assert_eq!(names, ["fuselane", "fuselane_table", "copy"]);
    }

    #[test]
    fn peers_stay_on_the_cpu() {
        let args = |line: &str| {
            Stored::try_parse_from(["fuselane bench"].into_iter().chain(line.split(' ')))
                .map(|stored| stored.args)
        };
        assert_eq!(Args::bare().peers(), Ok(vec!["unfused".to_owned()]));
        assert_eq!(args("--device gpu").unwrap().peers(), Ok(Vec::new()));
        assert_eq!(args("--device gpu --peers none").unwrap().peers(), Ok(Vec::new()));
        let error = args("--device gpu --peers none,torch").unwrap().peers().unwrap_err();
        assert!(error.contains("\"torch\" runs on the CPU"), "{error}");
        assert!(args("--device tpu").err().unwrap().to_string().contains("gpu"));
    }

    #[cfg(not(feature = "gpu"))]
    #[test]
    fn a_gpu_needs_a_runtime() {
        let args = Args { device: On::Gpu, ..Args::default() };
        let error = facts(&args).unwrap_err();
        assert!(error.contains("--features wgpu -- bench --device gpu"), "{error}");
    }

    #[test]
    fn names_of_folders() {
        let folder = default_folder("2026-01-31T12:00:00Z");
        assert_eq!(folder, Path::new("fuselane-runs/2026-01-31T12-00-00Z"));
        assert_eq!(
            short("act-speed-fwd-batch12-head12-dim128-act_relu-bf16"),
            "act-speed-fwd-head12-dim128-act_relu-bf16"
        );
    }
}
