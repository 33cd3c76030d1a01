//! The whole matrix of each operator, on all instruction sets of this CPU.

use fuselane_check::{Effort, Operator, Selection, run, table};

fn check(operator: Operator) {
    let selection =
        Selection { operators: vec![operator], effort: Effort::Full, ..Selection::default() };
    let outcomes = run(&selection, &mut |_| {});
    assert!(!outcomes.is_empty());
    println!("{}", table(&outcomes));
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
