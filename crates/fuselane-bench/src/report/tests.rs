//! Reports of made-up runs.

use std::fs;
use std::path::Path;

use super::compare::{Verdict, compare};
use super::data::{RunData, digits, median, times};
use super::*;
use crate::case::{Metric, Mode};
use crate::machine::{Caches, Machine};
use crate::protocol::Alloc;
use crate::record::{Record, Run};

const RELU: &str = "act-speed-fwd-batch12-head12-dim128-act_relu-bf16";

fn facts() -> Run {
    Run {
        started: "2026-01-31T12:00:00Z".to_owned(),
        arguments: vec!["--out=/home/somebody/runs".to_owned()],
        fuselane: "0.1.0".to_owned(),
        commit: Some("abc1234".to_owned()),
        machine: Machine {
            cpu: Some("A <fast> CPU".to_owned()),
            physical_cores: Some(2),
            logical_cpus: Some(4),
            caches: Caches::default(),
            memory_bytes: Some(8 << 30),
            available_memory_bytes: None,
            transparent_huge_pages: None,
        },
        os: "Linux".to_owned(),
        isa: "avx2".to_owned(),
        gpu: None,
        threads: 2,
        versions: [("torch".to_owned(), [("torch".to_owned(), "2.15.0".to_owned())].into())].into(),
    }
}

/// A right result of the relu table.
fn record(provider: &str, n: usize, value: f64) -> Record {
    Record {
        table: RELU.to_owned(),
        n,
        provider: provider.to_owned(),
        value: Some(value),
        ..crate::record::tests::some()
    }
}

/// One of ours.
fn ours(n: usize, value: f64) -> Record {
    record("fuselane", n, value)
}

fn wrong(provider: &str, n: usize, value: f64, note: &str) -> Record {
    Record { ok: false, note: note.to_owned(), ..record(provider, n, value) }
}

fn failed(provider: &str, n: usize, note: &str) -> Record {
    Record { value: None, error: None, ..wrong(provider, n, 0.0, note) }
}

fn save(folder: &Path, records: &[Record]) {
    fs::write(folder.join("run.json"), serde_json::to_string(&facts()).unwrap()).unwrap();
    let lines = records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n");
    fs::write(folder.join("results.jsonl"), lines.collect::<String>()).unwrap();
}

fn load(records: &[Record]) -> RunData {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), records);
    RunData::load(folder.path()).unwrap()
}

/// Writes everything, and returns the page, the tables and the summary.
fn report(records: &[Record]) -> (String, String, String) {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), records);
    let page = write(folder.path()).unwrap();
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(page, folder.path().join("index.html"));
    assert!(folder.path().join("svg").is_dir());
    for entry in fs::read_dir(folder.path()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(!name.ends_with(".tmp"), "{name} was left behind");
    }
    (read("index.html"), read("tables.md"), read("summary.md"))
}

#[test]
fn ratios_are_best_peer_over_ours() {
    let data = load(&[
        record("torch", 256, 3.0),
        record("jax", 256, 2.0),
        record("copy", 256, 0.5),
        ours(256, 1.0),
        record("fuselane_table", 256, 0.5),
        record("fuselane_python", 256, 0.9),
    ]);
    let row = &data.tables[0].rows[0];
    assert_eq!(row.best_peer(), Some(("jax", 2.0)));
    assert_eq!(row.ours(), Some(("fuselane", 1.0)));
    assert_eq!(row.ratio(), Some(2.0));
    assert_eq!(row.ratio_to("torch"), Some(3.0));
    let order = ["fuselane", "fuselane_table", "fuselane_python", "torch", "jax"];
    assert_eq!(data.providers(), order);
}

#[test]
fn a_run_on_a_gpu_says_so() {
    let gpu = crate::gpu::Gpu { software: true, ..crate::gpu::tests::some() };
    let run = Run { gpu: Some(gpu), ..facts() };
    let folder = tempfile::tempdir().unwrap();
    let share = Record { of_copy_limit: Some(0.75), ..record("fuselane_gpu", 256, 2.0) };
    save(folder.path(), &[share, record("copy", 256, 1.5)]);
    fs::write(folder.path().join("run.json"), serde_json::to_string(&run).unwrap()).unwrap();
    write(folder.path()).unwrap();
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    let words = "GPU, a software device: these times are those of a CPU";
    // In the heading of the page and in that of the table.
    assert!(read("index.html").matches(words).count() >= 3, "{}", read("index.html"));
    assert!(read("tables.md").contains(&format!("relu, forward, speed, on A &lt;fast> {words}")));
    assert_eq!(brief(folder.path()).unwrap(), "speed: 75 % of the copy limit (median of 1 rows)\n");
    let data = RunData::load(folder.path()).unwrap();
    assert_eq!(data.tables[0].rows[0].ours(), Some(("fuselane_gpu", 2.0)));
}

#[test]
fn wrong_and_failed_results_never_win() {
    let data = load(&[
        ours(1, 1.0),
        wrong("torch", 1, 0.1, "off by 3"),
        record("jax", 1, 1.5),
        wrong("fuselane", 2, 0.1, ""),
        record("jax", 2, 1.0),
        ours(3, 1.0),
        failed("jax", 3, "no memory"),
    ]);
    let rows = &data.tables[0].rows;
    assert_eq!(rows[0].ratio(), Some(1.5));
    assert_eq!((rows[1].ratio(), rows[2].ratio()), (None, None));
    let summary = data.summary(|_| true).unwrap();
    // Our wrong row is a row that we did not win; without a peer there is nothing to win.
    assert_eq!((summary.rows, summary.won), (2, 1));
    assert_eq!(summary.range, Some((1.5, 1.5)));
}

#[test]
fn a_summary_has_mean_range_and_median() {
    let share = |n, value, share| Record { of_copy_limit: Some(share), ..ours(n, value) };
    let data = load(&[
        share(1, 1.0, 0.5),
        record("torch", 1, 4.0),
        share(2, 1.0, 0.9),
        record("torch", 2, 1.0),
        share(3, 1.0, 0.8),
        record("torch", 3, 0.994),
    ]);
    let summary = data.summary(|_| true).unwrap();
    assert_eq!((summary.rows, summary.won), (3, 2));
    assert!((summary.mean.unwrap() - (4.0f64 * 0.994).cbrt()).abs() < 1e-12);
    assert_eq!(summary.range, Some((0.994, 4.0)));
    assert_eq!(summary.of_copy_limit, Some(0.8));
    assert_eq!(data.summary(|table| table.mode == Mode::Bwd), None);
}

#[test]
fn idle_calls_do_not_count() {
    let idle = |provider, n, value| Record { bytes: Some(0), ..record(provider, n, value) };
    let records = [
        idle("fuselane", 1, 0.0),
        idle("torch", 1, 0.0),
        idle("fuselane", 2, 0.0),
        idle("torch", 2, 1e-4),
        idle("fuselane", 3, 1e-5),
        idle("torch", 3, 0.0),
        ours(4, 1.0),
        record("torch", 4, 2.0),
    ];
    let data = load(&records);
    let ratios: Vec<_> = data.tables[0].rows.iter().map(|row| row.ratio().unwrap()).collect();
    assert_eq!(ratios, [1.0, f64::INFINITY, 0.0, 2.0]);
    let summary = data.summary(|_| true).unwrap();
    assert_eq!((summary.rows, summary.won, summary.mean), (1, 1, Some(2.0)));
    let (page, tables, _) = report(&records);
    assert!(page.contains('∞') && tables.contains('∞'));
    assert!(!page.contains("NaN") && !tables.contains("NaN"));
}

#[test]
fn nothing_but_zeros_or_failures_still_has_a_chart() {
    for records in [
        vec![ours(256, 0.0), record("torch", 256, 0.0)],
        vec![failed("fuselane", 256, "no"), failed("torch", 256, "no")],
        vec![ours(256, f64::NAN)],
    ] {
        let (page, ..) = report(&records);
        assert_eq!(page.matches("<svg").count(), 1);
        assert!(page.contains("no values above 0"));
    }
}

#[test]
fn one_size_or_one_provider_is_enough() {
    for records in [
        vec![ours(256, 1.0), record("torch", 256, 2.0)],
        vec![ours(256, 1.0), ours(512, 2.0)],
        vec![record("torch", 256, 1.0)],
        vec![record("copy", 256, 1.0)],
    ] {
        let (page, _, summary) = report(&records);
        assert_eq!(page.matches("<svg").count(), 1);
        assert!(summary.contains("- threads: 2"));
    }
}

#[test]
fn notes_are_escaped() {
    let note = "<script>alert(\"1\")</script> & 'more' | ~";
    let (page, tables, _) =
        report(&[ours(256, 1.0), wrong("torch", 256, 2.0, note), failed("jax", 256, note)]);
    assert!(!page.contains("<script>alert"));
    let escaped = "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt; &amp; &#39;more&#39; | ~";
    assert!(page.contains(&format!("title=\"{escaped}\"")));
    assert!(page.contains("<s>2.000</s>") && page.contains(">failed</td>"));
    assert!(page.contains("A &lt;fast&gt; CPU"));
    // As a sweep writes it: what is wrong is not timed.
    let (untimed, ..) = report(&[Record { value: None, ..wrong("torch", 256, 0.0, note) }]);
    assert!(untimed.contains(">wrong</td>"));
    assert!(tables.contains("~~2.000~~ wrong (1)") && tables.contains("failed (2)"));
    assert!(tables.contains("1. torch: &lt;script>alert(\"1\")&lt;/script> &amp; 'more' \\| \\~"));
}

#[test]
fn published_ratios_stand_beside_ours() {
    let (page, tables, _) = report(&[ours(256, 1.0), record("torch", 256, 2.0)]);
    assert!(page.contains("H100 eager /&nbsp;fused"));
    assert!(tables.contains("H100: compiled / fused"));
    assert!(tables.contains("| 256 | 1.000 | 2.000 | 2.00 | – | 0.33 | 6.98 |"), "{tables}");
}

#[test]
fn memory_has_the_least_possible() {
    let memory = |provider, value, bytes| Record {
        metric: Metric::Memory,
        unit: "MiB".to_owned(),
        bytes: Some(bytes),
        least_bytes: Some(1 << 20),
        ..record(provider, 256, value)
    };
    let data = load(&[memory("fuselane", 11.5, 3 << 19), memory("torch", 14.0, 4 << 20)]);
    assert_eq!(data.tables[0].rows[0].least(), Some(11.0));
    assert!(!data.tables[0].rows[0].is_idle());
}

#[test]
fn regimes_are_tables_of_their_own() {
    let fresh = |record: Record| Record { alloc: Alloc::Fresh, ..record };
    let data = load(&[
        ours(256, 1.0),
        fresh(ours(256, 2.0)),
        Record { table: "other".to_owned(), ..fresh(ours(256, 3.0)) },
    ]);
    let ids: Vec<_> = data.tables.iter().map(|table| table.id()).collect();
    assert_eq!(ids, [format!("{RELU}-warm"), format!("{RELU}-fresh"), "other".to_owned()]);
}

#[test]
fn a_cell_that_was_measured_again_counts_once() {
    let data = load(&[ours(256, 1.0), ours(256, 2.0)]);
    assert_eq!(data.tables[0].rows[0].ours(), Some(("fuselane", 2.0)));
}

#[test]
fn only_the_last_line_may_be_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &[ours(256, 1.0), record("torch", 256, 2.0)]);
    let path = folder.path().join("results.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, &text[..text.len() - 20]).unwrap();
    assert_eq!(RunData::load(folder.path()).unwrap().providers(), ["fuselane"]);
    fs::write(&path, format!("{}\n{text}", &text[..40])).unwrap();
    let error = RunData::load(folder.path()).unwrap_err();
    assert!(error.contains("results.jsonl: line 1 is not a record"), "{error}");
}

#[test]
fn errors_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let error = RunData::load(&folder.path().join("absent")).unwrap_err();
    assert!(error.contains("absent: no such folder; give a run's folder"), "{error}");
    let error = RunData::load(folder.path()).unwrap_err();
    assert!(error.contains("run.json") && error.contains("is this a run's folder?"), "{error}");
    save(folder.path(), &[]);
    let error = RunData::load(folder.path()).unwrap_err();
    assert!(error.contains("no results yet"), "{error}");
    save(folder.path(), &[ours(256, 1.0)]);
    fs::write(folder.path().join("svg"), "in the way").unwrap();
    let error = write(folder.path()).unwrap_err();
    assert!(error.contains("cannot make the folder") && error.contains("--out"), "{error}");
}

#[test]
fn a_comparison_puts_the_worst_first() {
    let old = load(&[
        ours(1, 1.0),
        record("torch", 1, 1.0),
        ours(2, 1.0),
        ours(3, 1.0),
        failed("fuselane", 4, "no"),
        ours(5, 1.0),
        ours(8, 1.0),
    ]);
    let new = load(&[
        ours(1, 2.0),
        record("torch", 1, 1.25),
        ours(2, 1.01),
        ours(3, 0.5),
        ours(4, 1.0),
        wrong("fuselane", 5, 0.1, "wrong"),
        ours(9, 1.0),
    ]);
    let found = compare(&old, &new);
    let verdicts: Vec<_> = found.changes.iter().map(|c| (c.n, c.verdict)).collect();
    assert_eq!(
        verdicts,
        [
            (5, Verdict::Broken),
            (1, Verdict::Worse),
            (2, Verdict::Same),
            (3, Verdict::Better),
            (4, Verdict::Repaired)
        ]
    );
    assert_eq!(found.changes[1].ratio, Some(0.5));
    assert_eq!(found.changes[1].others, Some(0.8));
    assert_eq!(found.only_old, [format!("{RELU}, n = 8, fuselane")]);
    assert_eq!(found.only_new, [format!("{RELU}, n = 9, fuselane")]);

    let out = tempfile::tempdir().unwrap();
    let page = write_report(&[old, new], out.path()).unwrap();
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("Change since the first run") && page.contains("<tr class=\"worse\">"));
    let text = fs::read_to_string(out.path().join("comparison.md")).unwrap();
    assert!(text.contains("2 of 5 rows are worse"), "{text}");
    assert!(text.contains("| 1.000 ms | 2.000 ms | 0.50 | 0.80 | **worse** |"), "{text}");
}

#[test]
fn the_readme_keeps_what_is_around_the_block() {
    let data = load(&[ours(256, 1.0), record("torch", 256, 2.0)]);
    let folder = tempfile::tempdir().unwrap();
    let (readme, pictures) = (folder.path().join("README.md"), folder.path().join("pictures"));
    let text = format!("# Title\n\n{BEGIN}\nold\n{END}\n\nend\n");
    write_readme(&readme, &text, &data, &pictures).unwrap();
    let text = fs::read_to_string(&readme).unwrap();
    assert!(text.starts_with(&format!("# Title\n\n{BEGIN}\n")), "{text}");
    assert!(text.ends_with(&format!("\n{END}\n\nend\n")) && !text.contains("old\n"), "{text}");
    assert!(text.contains("| act | fwd | 1 | 1 | 2.00 | 2.00 | 2.00 |"), "{text}");
    assert!(!text.contains("/home/"), "a folder of the machine is in\n{text}");
    assert!(text.contains("`fuselane bench --out=runs`"), "{text}");
    assert!(pictures.join("summary.svg").is_file());
    // Once more, it is the same.
    write_readme(&readme, &text, &data, &pictures).unwrap();
    assert_eq!(fs::read_to_string(&readme).unwrap(), text);
    let error = replace_block("# Title\n", "").unwrap_err();
    assert!(error.contains(BEGIN) && error.contains("add these two lines"), "{error}");
}

#[test]
fn pictures_mark_losses_and_leave_out_idle_calls() {
    let data = load(&[ours(256, 2.0), record("torch", 256, 1.0)]);
    let svg = picture::draw(&data).unwrap().unwrap();
    assert!(svg.contains("0.50×") && svg.contains(&colour::hex(colour::LOSS)));
    let idle = |provider| Record { bytes: Some(0), ..record(provider, 256, 1e-5) };
    assert_eq!(picture::draw(&load(&[idle("fuselane"), idle("torch")])).unwrap(), None);
}

#[test]
fn each_colour_has_one_meaning() {
    let known = [
        "fuselane",
        "fuselane_gpu",
        "fuselane_table",
        "fuselane_python",
        "unfused",
        "candle",
        "torch",
    ];
    let providers = [&known[..], &["torch_compile", "jax", "new"]].concat();
    let providers: Vec<String> = providers.into_iter().map(str::to_owned).collect();
    let mut colours: Vec<_> =
        providers.iter().map(|name| colour::of(name, &providers).hex()).collect();
    colours.push(colour::LIMIT.hex());
    let fixed = [colour::BACKGROUND, colour::TEXT, colour::AXIS, colour::GRID, colour::LOSS];
    colours.extend(fixed.map(colour::hex));
    let count = colours.len();
    colours.sort();
    colours.dedup();
    assert_eq!(colours.len(), count);
}

#[test]
fn numbers_are_short() {
    let shown = [0.0, 0.00012345, 0.5, 1.0, 12.345, 123.45, 12345.6, 2e-9].map(digits);
    assert_eq!(shown, ["0", "0.0001234", "0.5000", "1.000", "12.35", "123.5", "12346", "2.000e-9"]);
    assert_eq!([0.996, 12.34, 123.4].map(times), ["1.00", "12.3", "123"]);
    assert_eq!(
        (median(&[]), median(&[1.0, 2.0]), median(&[1.0, 2.0, 9.0])),
        (None, Some(1.5), Some(2.0))
    );
}
