//! A sweep beside the real Python peers. Run by `cargo xtask test`, which sets them up first:
//! `cargo test --test peers -- --ignored`. With `FUSELANE_PYTHON_PACKAGE`, also beside our own package.

use std::process::Command;

use serde_json::Value;

const CASES: &str = r#"
family = "tiny"
batch = 2
heads = 2
dim = 16
sizes = [8]

[[case]]
table = "tiny-{metric}-{mode}-silu-{dtype}"
title = "silu"
operator = { op = "act", act = "silu" }

[[case]]
table = "tiny-{metric}-{mode}-softmax-{dtype}"
title = "softmax over the sequence"
operator = { op = "softmax", dim = -2 }

[[case]]
table = "tiny-{metric}-{mode}-norm-{dtype}"
title = "norm, gated"
operator = { op = "normalize", gate = "pre" }

[[case]]
table = "tiny-{metric}-{mode}-rotate-{dtype}"
title = "rotate"
operator = { op = "rotate", act = "silu" }

[[case]]
table = "tiny-{metric}-{mode}-cosine-{dtype}"
title = "cosine"
operator = { op = "cosine", axes = 2, extra = 3 }
sizes = [3]
"#;

#[test]
#[ignore = "needs `fuselane setup-peers`"]
fn every_family_beside_torch_and_jax() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tiny.toml"), CASES).unwrap();
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
