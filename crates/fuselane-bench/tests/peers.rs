//! A sweep beside the real Python peers. Run by `cargo xtask test`, which sets them up first:
//! `cargo test --test peers -- --ignored`. With `FUSELANE_PYTHON_PACKAGE`, also beside our own package.

mod common;

use std::process::Command;

use common::case_file;
use serde_json::Value;

/// Name, title, operator, and what else a case has.
const CASES: [(&str, &str, &str, &str); 5] = [
    ("silu", "silu", r#"op = "act", act = "silu""#, ""),
    ("softmax", "softmax over the sequence", r#"op = "softmax", dim = -2"#, ""),
    ("norm", "norm, gated", r#"op = "normalize", gate = "pre""#, ""),
    ("rotate", "rotate", r#"op = "rotate", act = "silu""#, ""),
    ("cosine", "cosine", r#"op = "cosine", axes = 2, extra = 3"#, "sizes = [3]"),
];

#[test]
#[ignore = "needs `fuselane setup-peers`"]
fn every_family_beside_torch_and_jax() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tiny.toml"), case_file("sizes = [8]", &CASES)).unwrap();
    let mut providers = vec!["fuselane", "torch", "torch_compile", "jax"];
    // The package has to be built first.
    if std::env::var_os("FUSELANE_PYTHON_PACKAGE").is_some() {
        providers.push("fuselane_python");
    }
    let peers = providers[1..].join(",");
    let line = format!("bench tiny-* --cases tiny.toml --peers {peers} --format json --out run");
    let output = Command::new(env!("CARGO_BIN_EXE_fuselane"))
        .current_dir(folder.path())
        .args(line.split(' '))
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let records: Vec<Value> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for provider in providers {
        let of: Vec<&Value> = records.iter().filter(|r| r["provider"] == provider).collect();
        assert_eq!(of.len(), 5 * 4, "{provider}: {stderr}");
        for record in of {
            assert!(record["ok"] == true && record["value"].is_f64(), "{record}");
            assert!(record["metric"] != "speed" || record["error"].is_f64(), "{record}");
        }
    }
}
