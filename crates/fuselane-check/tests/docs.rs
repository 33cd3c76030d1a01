//! The operators' pages state the bounds that the matrix checks.

use std::fs;

use fuselane_check::{Bound, act, cosine, normalize, rotate, softmax};

#[test]
fn pages_state_the_bounds() {
    let operators: [(&str, &[Bound]); 5] = [
        ("act", &act::BOUNDS),
        ("softmax", &softmax::BOUNDS),
        ("normalize", &normalize::BOUNDS),
        ("rotate", &rotate::BOUNDS),
        ("cosine", &cosine::BOUNDS),
    ];
    for (operator, bounds) in operators {
        let path = format!("{}/../../docs/ops/{operator}.md", env!("CARGO_MANIFEST_DIR"));
        let page = fs::read_to_string(&path).expect("the operator has a page");
        let (_, accuracy) = page.split_once("## Accuracy").expect("the page has the section");
        let rows: Vec<&str> = accuracy.lines().filter(|line| line.starts_with("| `")).collect();
        let expected: Vec<String> = bounds.iter().map(Bound::to_string).collect();
        assert_eq!(rows, expected, "{path}");
    }
}
