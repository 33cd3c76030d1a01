//! The `fuselane` program.
//!
//! Each subcommand is one file with an `Args` for clap and a `run`. To add one: its `mod`, a
//! variant of [`Command`], and a line in [`run`]; if it belongs to what the program does without
//! arguments, a line in [`Command::without_arguments`].
//!
//! Exit codes: 0 all well, 1 failure, 2 wrong command line.

mod bench;
mod case;
mod check;
mod copy;
mod gpu;
mod info;
mod kernels;
mod machine;
mod peers;
mod process_memory;
mod protocol;
mod published;
mod record;
mod report;
mod setup_peers;
mod tensor;
mod worker;

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// How fast and how exact the fused operators are on this machine, beside others.
///
/// Without a subcommand: `bench`, a quick sweep of all tables.
#[derive(Parser)]
#[command(name = "fuselane", version)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    Info(info::Args),
    Check(check::Args),
    Report(report::Args),
    Kernels(kernels::Args),
    SetupPeers(setup_peers::Args),
    #[command(hide = true)]
    Worker(worker::Args),
}

impl Command {
    fn without_arguments() -> Vec<Self> {
        vec![Self::Bench(bench::Args::bare())]
    }
}

fn run(command: &Command) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        Command::Bench(args) => bench::run(args),
        Command::Info(args) => info::run(args),
        Command::Check(args) => check::run(args),
        Command::Report(args) => report::run(args),
        Command::Kernels(args) => kernels::run(args),
        Command::SetupPeers(args) => setup_peers::run(args),
        Command::Worker(args) => worker::run(args),
    }
}

fn main() -> ExitCode {
    let commands = match Cli::parse().command {
        Some(command) => vec![command],
        None => Command::without_arguments(),
    };
    let mut code = ExitCode::SUCCESS;
    for command in &commands {
        match run(command) {
            Ok(ExitCode::SUCCESS) => {}
            Ok(other) => code = other,
            Err(error) => {
                eprintln!("fuselane: {error}");
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}
