//! The Rust example of README.md, run; and a check that README.md shows just this. (The one in Python is
//! run by the Python package's tests.)

use fuselane::Result;

#[test]
fn normalize() -> Result<()> {
    use fuselane::{Normalize, NormalizeForward, View, ViewMut};
    let (x, weight, mut o) = ([1.0f32, 2.0, 3.0, 4.0], [1.0f32; 4], [0.0f32; 4]);
    let call = NormalizeForward::new(View::new(&x, &[1, 4])?, ViewMut::new(&mut o, &[1, 4])?);
    Normalize::rms_norm()
        .forward_into(NormalizeForward { weight: Some(View::new(&weight, &[4])?), ..call })?;
    // Not in README.md:
    assert!((o[3] - 4.0 / 7.5f32.sqrt()).abs() < 1e-6);
    Ok(())
}

#[test]
fn readme_shows_these() {
    let readme = include_str!("../../../README.md");
    let here: String =
        include_str!("readme.rs").lines().map(|line| line.trim().to_owned() + "\n").collect();
    let blocks: Vec<&str> =
        readme.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(blocks.len(), 1);
    for block in blocks {
        let block: String = block.lines().map(|line| line.trim().to_owned() + "\n").collect();
        assert!(here.contains(&block), "README.md shows what no test runs:\n{block}");
    }
}
