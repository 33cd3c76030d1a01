//! The option matrix of each operator on the GPU that there is, against the reference, within the
//! bounds of the CPU's kernels, down to the last denormal number. (Devices that flush those to zero
//! would break the bounds there; lavapipe does not.)
//!
//! `act` runs whole. Of the others one of so many cases runs, a prime number, so that all values of
//! all options are met: most with the tuning that the launch layer chooses, fewer in each other way.
//! A software device spends its time on compiling kernels, each of which serves few cases. The
//! environment variable `FUSELANE_EVERY` sets the number for all: 1 is the whole matrix.
#![cfg(all(feature = "check", feature = "runtime"))]

mod support;

use fuselane::DType;
use fuselane_check::{Backend, Effort, Operator, Selection, run_on};
use fuselane_gpu::CheckBackend;

/// Runs one of `every` cases with the tunings of these names.
fn check(operator: Operator, every: usize, tunings: impl Fn(&str) -> bool) {
    let every = std::env::var("FUSELANE_EVERY").ok().and_then(|n| n.parse().ok()).unwrap_or(every);
    let gpus: Vec<CheckBackend> = support::devices()
        .filter(|(name, _)| tunings(name))
        .map(|(name, device)| CheckBackend::named(device, name))
        .collect();
    let backends: Vec<&dyn Backend> = gpus.iter().map(|gpu| gpu as &dyn Backend).collect();
    let selection = Selection {
        operators: vec![operator],
        dtypes: vec![DType::F32, DType::F16, DType::BF16],
        effort: Effort::Every(every),
        ..Selection::default()
    };
    let outcomes = run_on(&selection, &backends, &mut |_| {});
    assert!(!outcomes.is_empty());
    println!(
        "{:9} {:26} {:5} {:9} {:>9} {:>9} {:>9} {:>6} {:>9}  case",
        "operator", "output", "dtype", "tuning", "ulp", "bound", "needed", "K", "compared"
    );
    for outcome in &outcomes {
        println!(
            "{:9} {:26} {:5} {:9} {:9.4} {:9.4} {:9.3} {:6} {:9}  {}",
            outcome.operator,
            outcome.output,
            outcome.dtype,
            outcome.backend,
            outcome.worst,
            outcome.bound,
            outcome.needed,
            outcome.k,
            outcome.compared,
            outcome.case
        );
    }
    let broken: Vec<String> =
        outcomes.iter().filter(|o| !o.ok()).map(ToString::to_string).collect();
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

fn by_default(name: &str) -> bool {
    name == "default"
}

fn tuned(name: &str) -> bool {
    name != "default"
}

/// Every number of the 16-bit dtypes.
#[test]
fn act() {
    check(Operator::Act, 1, |name| name == "default" || name == "vector 1");
}

#[test]
fn softmax() {
    check(Operator::Softmax, 29, by_default);
}

#[test]
fn softmax_tuned() {
    check(Operator::Softmax, 101, tuned);
}

#[test]
fn normalize() {
    check(Operator::Normalize, 211, by_default);
}

#[test]
fn normalize_tuned() {
    check(Operator::Normalize, 997, tuned);
}

#[test]
fn rotate() {
    check(Operator::Rotate, 401, by_default);
}

#[test]
fn rotate_tuned() {
    check(Operator::Rotate, 1009, tuned);
}

#[test]
fn cosine() {
    check(Operator::Cosine, 41, by_default);
}

#[test]
fn cosine_tuned() {
    check(Operator::Cosine, 101, tuned);
}
