//! The project's own commands. `cargo xtask --help` lists them.
//!
//! It depends on nothing but std, so that it builds in a second.

mod arguments;
mod folders;
mod gpu;
mod install;
mod python;
mod step;
mod steps;

use std::process::ExitCode;

use arguments::{Command, USAGE};

fn main() -> ExitCode {
    let command = match arguments::parse(std::env::args().skip(1)) {
        Ok(command) => command,
        Err(message) => {
            eprintln!("xtask: {message}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let steps = match command {
        Command::Help => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Command::Test { large } => steps::test(large),
        Command::TestGpu { run, compile } => steps::test_gpu(run, compile),
        Command::Wheel => Ok(steps::wheel()),
        Command::Ci => steps::ci(),
        Command::Install(tools) if install::install(&tools) => return ExitCode::SUCCESS,
        Command::Install(_) => return ExitCode::FAILURE,
    };
    match steps {
        Ok(steps) if step::run(&steps) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
