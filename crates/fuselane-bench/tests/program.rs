//! The program as a user calls it.

use std::process::{Command, Output};

use serde_json::Value;

fn fuselane(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fuselane"));
    command.args(arguments).env_remove("FUSELANE_ISA").env_remove("RAYON_NUM_THREADS");
    command
}

fn output(command: &mut Command) -> Output {
    command.output().expect("the program starts")
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("stdout is UTF-8")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("stderr is UTF-8")
}

const QUICK: [&str; 5] = ["info", "--copy-size", "1", "--rounds", "2"];

#[test]
fn info_as_text() {
    let output = output(&mut fuselane(&QUICK));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for part in ["CPU", "L3 cache", "memory", "instruction set", "memcpy", "copy of 1 MiB"] {
        assert!(stdout(&output).contains(part), "{part} is missing in\n{}", stdout(&output));
    }
    assert_eq!(stderr(&output), "");
}

#[test]
fn info_as_json() {
    let output = output(fuselane(&QUICK).arg("--json").env("RAYON_NUM_THREADS", "3"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let info: Value = serde_json::from_str(stdout(&output)).expect("stdout is JSON");
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(info["threads"], 3);
    assert_eq!(info["isa"]["requested"], Value::Null);
    assert_eq!(info["isa"]["warning"], Value::Null);
    let available = info["isa"]["available"].as_array().expect("a list");
    assert!(available.contains(&info["isa"]["in_use"]));
    assert_eq!(info["copy"]["buffer_bytes"], 1 << 20);
    assert_eq!(info["copy"]["rounds"], 2);
    let rates = info["copy"]["rates"].as_array().expect("a list");
    for threads in [1, 3] {
        let rate = rates.iter().find(|r| r["kind"] == "memcpy" && r["threads"] == threads);
        let rate = rate.expect("memcpy was measured");
        assert!(rate["median_gb_s"].as_f64().expect("a number") > 0.0);
        assert!(rate["best_gb_s"].as_f64() >= rate["median_gb_s"].as_f64());
    }
    for fact in ["cpu", "caches", "memory_bytes", "transparent_huge_pages"] {
        assert!(info["machine"].get(fact).is_some(), "{fact} is missing");
    }
}

#[test]
fn isa_is_forced_by_the_environment() {
    let output = output(fuselane(&QUICK).arg("--json").env("FUSELANE_ISA", "portable"));
    let info: Value = serde_json::from_str(stdout(&output)).expect("stdout is JSON");
    assert_eq!(info["isa"]["in_use"], "portable");
    assert_eq!(info["isa"]["requested"], "portable");
    assert_eq!(stderr(&output), "");
}

#[test]
fn unknown_isa_is_a_warning() {
    let output = output(fuselane(&QUICK).arg("--json").env("FUSELANE_ISA", "sse9"));
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("warning: FUSELANE_ISA is \"sse9\""), "{}", stderr(&output));
    let info: Value = serde_json::from_str(stdout(&output)).expect("stdout is JSON");
    assert!(info["isa"]["warning"].is_string());
}

#[test]
fn check_as_text() {
    let output = output(&mut fuselane(&["check", "--operator", "cosine", "--dtype", "f16,bf16"]));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for part in ["operator", "bound", "cosine     f16    portable", "cosine     bf16   portable"] {
        assert!(stdout(&output).contains(part), "{part} is missing in\n{}", stdout(&output));
    }
    assert!(!stdout(&output).contains("rotate"), "{}", stdout(&output));
    assert_eq!(stderr(&output), "");
}

#[test]
fn check_as_json() {
    let arguments = ["check", "--json", "--operator", "softmax", "--isa", "portable"];
    let output = output(&mut fuselane(&arguments));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let rows: Value = serde_json::from_str(stdout(&output)).expect("stdout is JSON");
    let rows = rows.as_array().expect("a list");
    assert_eq!(rows.len(), 3 * 4, "outputs times dtypes");
    for row in rows {
        assert_eq!((&row["ok"], &row["broken"]), (&Value::Bool(true), &Value::from(0)), "{row}");
        assert!(row["error_ulp"].as_f64() <= row["bound_ulp"].as_f64(), "{row}");
        assert!(row["compared"].as_u64() > Some(1000), "{row}");
        assert!(row["case"].as_str().is_some_and(|case| case.contains("softmax dim=")), "{row}");
    }
}

/// A build without the kernels tells how to get one with them.
#[test]
#[cfg(not(feature = "gpu-sources"))]
fn kernels_are_in_another_build() {
    let help = output(&mut fuselane(&["kernels", "--help"]));
    assert_eq!(help.status.code(), Some(0));
    assert!(stdout(&help).contains("--ptx"), "{}", stdout(&help));
    let output = output(&mut fuselane(&["kernels", "--emit", "wgsl"]));
    assert_eq!((output.status.code(), stdout(&output)), (Some(1), ""));
    assert!(stderr(&output).contains("--features gpu-sources,wgpu"), "{}", stderr(&output));
}

#[test]
#[cfg(feature = "gpu-sources")]
fn kernels_are_written() {
    let out = tempfile::tempdir().expect("a folder");
    let folder = out.path().join("new");
    let folder_text = folder.to_str().expect("UTF-8");
    let name = "act_forward-bf16-silu";
    let output = output(&mut fuselane(&["kernels", name, "--out", folder_text]));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains(name), "{}", stdout(&output));
    let text = std::fs::read_to_string(folder.join(format!("{name}.cu"))).expect("a file");
    assert!(text.contains("__global__"), "{text}");
    assert_eq!(std::fs::read_dir(&folder).expect("a folder").count(), 1);
}

/// One row on the device that there is. Times of a software device are no GPU's, and the heading of
/// the table says so.
#[test]
#[cfg(feature = "wgpu")]
fn a_row_on_a_gpu() {
    let place = tempfile::tempdir().expect("a folder");
    let case = r#"
        family = "tiny"
        batch = 1
        heads = 2
        dim = 16
        dtype = "f32"
        sizes = [8]

        [[case]]
        table = "tiny-{metric}-{mode}-silu-{dtype}"
        title = "silu"
        operator = { op = "act", act = "silu" }
    "#;
    std::fs::write(place.path().join("tiny.toml"), case).expect("a file");
    let line = "bench tiny-speed-fwd-* --cases tiny.toml --device gpu --out run";
    let mut command = fuselane(&line.split(' ').collect::<Vec<_>>());
    let bench = output(command.current_dir(place.path()));
    assert_eq!(bench.status.code(), Some(0), "{}", stderr(&bench));
    let heading = stdout(&bench).lines().find(|line| line.starts_with("tiny-speed-fwd-silu-f32:"));
    let heading = heading.unwrap_or_else(|| panic!("no table in\n{}", stdout(&bench)));
    assert!(heading.contains(", on "), "{heading}");
    let info = output(&mut fuselane(&QUICK));
    let software = stdout(&info).contains("(a software device)");
    let words = "a software device: these times are those of a CPU";
    assert_eq!(heading.contains(words), software, "{heading}");
}

#[test]
fn help_and_version() {
    let help = output(&mut fuselane(&["--help"]));
    assert_eq!(help.status.code(), Some(0));
    assert!(stdout(&help).contains("info"), "{}", stdout(&help));
    let help = output(&mut fuselane(&["info", "--help"]));
    assert_eq!(help.status.code(), Some(0));
    assert!(stdout(&help).contains("--json"), "{}", stdout(&help));
    let version = output(&mut fuselane(&["--version"]));
    assert_eq!(stdout(&version).trim(), concat!("fuselane ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn wrong_command_lines_are_usage_errors() {
    let cases: [&[&str]; 11] = [
        &["nonsense"],
        &["--nonsense"],
        &["info", "--nonsense"],
        &["info", "--rounds", "0"],
        &["info", "--copy-size", "many"],
        &["check", "--operator", "conv"],
        &["check", "--dtype", "f8"],
        &["check", "--isa", "sse9"],
        &["kernels", "--emit", "fortran"],
        &["kernels", "--ptx", "80"],
        &["kernels", "--emit", "hip", "--ptx", "sm_80"],
    ];
    for arguments in cases {
        let output = output(&mut fuselane(arguments));
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(stdout(&output), "", "{arguments:?}");
        assert!(!stderr(&output).is_empty(), "{arguments:?}");
    }
}
