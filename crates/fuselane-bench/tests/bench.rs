//! The program as a user runs it: small sweeps, their folders, and what can go wrong.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use common::case_file;
use serde_json::Value;
use tempfile::TempDir;

/// Name, title, operator, and what else a case has.
const CASES: [(&str, &str, &str, &str); 6] = [
    ("silu", "silu", r#"op = "act", act = "silu""#, ""),
    ("none", "nothing", r#"op = "act", act = "none""#, ""),
    ("softmax", "softmax over the sequence", r#"op = "softmax", dim = -2"#, ""),
    ("norm", "norm of a sum, gated", r#"op = "normalize", residual = true, gate = "post""#, ""),
    ("rotate", "rotate", r#"op = "rotate", act = "softmax", dim = 1"#, ""),
    ("cosine", "cosine", r#"op = "cosine", axes = 2, extra = 3"#, "sizes = [3, 5]"),
];

struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let cases = case_file("dtype = \"f32\"\nsizes = [8, 24]", &CASES);
        fs::write(folder.path().join("tiny.toml"), cases).unwrap();
        Self { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fuselane"));
        command.current_dir(self.path()).args(line.split_whitespace());
        // Peers of the machine that runs the tests are not part of them.
        command.env("FUSELANE_CACHE", self.path().join("cache"));
        command.env_remove("FUSELANE_PEERS_PYTHON");
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn records(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_operator_is_measured_and_right() {
    let place = Place::new();
    let output =
        place.run("bench tiny-* --cases tiny.toml --full --out run --format json --alloc both");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let records = records(&text(&output.stdout));
    // 6 cases, 2 sizes, 2 modes; speed in 2 regimes with fuselane, unfused, copy (not for none)
    // and fuselane_table (cosine only); memory once without copy.
    let (cases, points) = (6, 4);
    let speed = 2 * points * (cases * 3 - 1 + 1);
    let memory = points * (cases * 2 + 1);
    assert_eq!(records.len(), speed + memory);
    for record in &records {
        let keys = "table metric mode n dtype provider alloc value p20 p80 unit bytes";
        for key in format!("{keys} of_copy_limit ok note").split(' ') {
            assert!(record.get(key).is_some(), "{key} is not in {record}");
        }
        assert_eq!(record["ok"], true, "{record}");
        let value = record["value"].as_f64().unwrap();
        assert!(value >= 0.0, "{record}");
        if record["metric"] == "speed" {
            let (p20, p80) = (record["p20"].as_f64().unwrap(), record["p80"].as_f64().unwrap());
            assert!(p20 <= value && value <= p80, "{record}");
            if record["provider"] != "copy" {
                assert!(record["error"].as_f64().unwrap() < 256.0, "{record}");
            }
        }
    }
    let run = place.path().join("run");
    let lines = fs::read_to_string(run.join("results.jsonl")).unwrap();
    assert_eq!(lines.lines().count(), records.len());
    let csv = fs::read_to_string(run.join("results.csv")).unwrap();
    assert_eq!(csv.lines().count(), records.len() + 1);
    assert!(run.join("index.html").is_file());
    let facts: Value =
        serde_json::from_str(&fs::read_to_string(run.join("run.json")).unwrap()).unwrap();
    assert!(facts["threads"].as_u64().unwrap() > 0 && facts["versions"]["fuselane"].is_object());
}

#[test]
fn a_run_goes_on_where_it_stopped() {
    let place = Place::new();
    let line = "bench tiny-speed-fwd-* --cases tiny.toml --full --peers none";
    assert!(place.run(&format!("{line} --out whole")).status.success());
    let whole = fs::read_to_string(place.path().join("whole/results.jsonl")).unwrap();

    // As if it had been ended within its eighth line: six make whole rows, the seventh is a part
    // of one, which is measured again as a whole.
    let cut: String = whole.split_inclusive('\n').take(7).collect::<String>() + "{\"table\":";
    let results = place.path().join("whole/results.jsonl");
    fs::write(&results, &cut).unwrap();
    let output = place.run("bench --resume whole --format json");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let again = fs::read_to_string(&results).unwrap();
    let kept: String = whole.split_inclusive('\n').take(6).collect();
    assert!(again.starts_with(&kept), "what was measured stays");
    let keys = |text: &str| -> Vec<String> {
        let key = |r: &Value| format!("{} {} {}", r["table"], r["n"], r["provider"]);
        let mut keys: Vec<String> = records(text).iter().map(key).collect();
        keys.sort();
        keys
    };
    assert_eq!(keys(&again), keys(&whole));
    assert_eq!(records(&text(&output.stdout)).len(), records(&whole).len() - 6);
}

#[test]
fn rows_by_size_are_stored_by_table() {
    let place = Place::new();
    let globs = "tiny-speed-fwd-silu-* tiny-speed-fwd-norm-*";
    let line = format!("bench {globs} --cases tiny.toml --full --peers none --format json");
    let of_ours = |text: &str| -> Vec<(String, u64)> {
        let ours = records(text).into_iter().filter(|record| record["provider"] == "fuselane");
        ours.map(|r| (r["table"].as_str().unwrap()[15..19].to_owned(), r["n"].as_u64().unwrap()))
            .collect()
    };
    let expected = |rows: [(&str, u64); 4]| rows.map(|(table, n)| (table.to_owned(), n));
    let tables = [("silu", 8), ("silu", 24), ("norm", 8), ("norm", 24)];
    for (options, order) in [
        ("--out tables", [tables[0], tables[1], tables[3], tables[2]]),
        ("--out sizes --by-size", [tables[0], tables[2], tables[1], tables[3]]),
    ] {
        let output = place.run(&format!("{line} {options}"));
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(of_ours(&text(&output.stdout)), expected(order), "{options}");
        let stored = place.path().join(options.split(' ').nth(1).unwrap()).join("results.jsonl");
        assert_eq!(of_ours(&fs::read_to_string(stored).unwrap()), expected(tables), "{options}");
    }
}

#[test]
fn clear_words_for_bad_input() {
    let place = Place::new();
    fs::write(place.path().join("bad.toml"), "family = 3").unwrap();
    fs::write(place.path().join("file"), "").unwrap();
    for (line, parts) in [
        ("bench *rleu*", &["*rleu*", "act_relu", "--list"][..]),
        ("bench --cases bad.toml", &["bad.toml", "family"]),
        ("bench --cases none.toml", &["none.toml"]),
        ("bench --peers tensorflow", &["tensorflow", "torch", "unfused"]),
        ("bench --resume nowhere", &["nowhere", "not the folder of a run"]),
        ("bench *silu* --out file/below", &["file/below", "cannot make the folder"]),
        ("bench --n 0", &["--n", "from 1"]),
        ("bench --quick --full", &["cannot be used"]),
        ("bench --dtype f8", &["f8", "bf16, f16 or f32"]),
        ("worker nobody", &["nobody"]),
    ] {
        let output = place.run(line);
        let error = text(&output.stderr);
        assert!(!output.status.success(), "{line}");
        for part in parts {
            assert!(error.contains(part), "{line}: no {part:?} in {error}");
        }
    }
    // Nothing is overwritten.
    assert!(place.run("bench tiny-speed-fwd-none* --cases tiny.toml --out run").status.success());
    let output = place.run("bench tiny-speed-fwd-none* --cases tiny.toml --out run");
    assert!(!output.status.success() && text(&output.stderr).contains("--resume run"));
}

#[test]
fn a_missing_peer_is_said_and_the_sweep_goes_on() {
    let place = Place::new();
    let line = "bench tiny-speed-fwd-silu* --cases tiny.toml --out run --peers unfused,torch --format json";
    let output = place.run(line);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let error = text(&output.stderr);
    assert!(
        error.contains("torch is not set up") && error.contains("fuselane setup-peers"),
        "{error}"
    );
    let records = records(&text(&output.stdout));
    assert!(records.iter().any(|record| record["provider"] == "unfused"));
    assert!(!records.iter().any(|record| record["provider"] == "torch"));
}

/// A Python that answers nonsense, crashes, hangs or gives wrong results: its cells say so, the
/// others are measured.
#[cfg(unix)]
#[test]
fn a_peer_that_fails_is_marked() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let hello = r#"echo '{"is":"hello","versions":{"torch":"0"}}'"#;
    for (script, note) in [
        ("echo broken >&2; exit 7".to_owned(), "broken"),
        (format!("{hello}; read line; echo 'no memory' >&2; kill -9 $$"), "no memory"),
        (
            format!(
                "{hello}; while read line; do echo '{{\"is\":\"failed\",\"why\":\"why not\"}}'; done"
            ),
            "why not",
        ),
        (
            format!(
                "{hello}; while read line; do echo '{{\"is\":\"unsupported\",\"why\":\"no such operator\"}}'; done"
            ),
            "no such operator",
        ),
    ] {
        let python = place.path().join("python");
        fs::write(&python, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        let run = tempfile::tempdir().unwrap();
        let line = format!(
            "bench tiny-*-fwd-silu* --cases tiny.toml --peers torch --format json --out {}",
            run.path().display()
        );
        let output = place.command(&line).env("FUSELANE_PEERS_PYTHON", &python).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let all = records(&text(&output.stdout));
        let torch: Vec<&Value> = all.iter().filter(|r| r["provider"] == "torch").collect();
        assert!(!torch.is_empty());
        for record in torch {
            assert!(record["value"].is_null() && record["ok"] == false, "{record}");
            assert!(record["note"].as_str().unwrap().contains(note), "{record}");
        }
        assert!(all.iter().any(|r| r["provider"] == "fuselane" && r["ok"] == true));
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_keeps_what_it_has() {
    use std::io::{BufRead, BufReader};
    let place = Place::new();
    let line = "bench tiny-* --cases tiny.toml --full --alloc both --out run --format json";
    let mut child = place
        .command(line)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let seen = 1 + lines.map_while(Result::ok).count();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("--resume run"), "{}", text(&output.stderr));
    let kept = fs::read_to_string(place.path().join("run/results.jsonl")).unwrap();
    assert_eq!(records(&kept).len(), seen);
    assert!(place.path().join("run/index.html").is_file());
    let left = Path::new("/dev/shm").join(format!("fuselane-{pid}"));
    assert!(!left.exists(), "inputs are removed");
}

#[test]
fn tables_for_people() {
    let place = Place::new();
    let output = place.run("bench tiny-*-fwd-softmax* --cases tiny.toml --out run");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(!shown.contains('\u{1b}'), "no colours where there is no terminal");
    assert!(
        shown.contains("tiny-speed-fwd-softmax-f32: softmax over the sequence (softmax), ms"),
        "{shown}"
    );
    assert!(shown.contains("tiny-memory-fwd-softmax-f32"), "{shown}");
    let list = text(&place.run("bench --list").stdout);
    assert_eq!(list.lines().count(), 80);
}
