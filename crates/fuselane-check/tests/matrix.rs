//! The whole matrix of each operator, on all instruction sets of this CPU.

use fuselane_check::{Effort, Operator, Selection, run};

fn check(operator: Operator) {
    let selection =
        Selection { operators: vec![operator], effort: Effort::Full, ..Selection::default() };
    let outcomes = run(&selection, &mut |_| {});
    assert!(!outcomes.is_empty());
    println!(
        "{:9} {:18} {:5} {:9} {:>9} {:>9} {:>9} {:>6} {:>11} {:>10}  case",
        "operator", "output", "dtype", "isa", "ulp", "bound", "needed", "K", "compared", "inexact"
    );
    for outcome in &outcomes {
        println!(
            "{:9} {:18} {:5} {:9} {:9.4} {:9.4} {:9.3} {:6} {:11} {:10}  {}",
            outcome.operator,
            outcome.output,
            outcome.dtype,
            outcome.backend,
            outcome.worst,
            outcome.bound,
            outcome.needed,
            outcome.k,
            outcome.compared,
            outcome.inexact,
            outcome.case
        );
    }
    let broken: Vec<String> =
        outcomes.iter().filter(|o| !o.ok()).map(ToString::to_string).collect();
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

#[test]
fn act() {
    check(Operator::Act);
}

#[test]
fn softmax() {
    check(Operator::Softmax);
}

#[test]
fn normalize() {
    check(Operator::Normalize);
}

#[test]
fn rotate() {
    check(Operator::Rotate);
}

#[test]
fn cosine() {
    check(Operator::Cosine);
}
