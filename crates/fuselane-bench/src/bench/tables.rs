//! Tables for the terminal, in the layout of the published ones: a line per size, a column per
//! provider, and ratios to the right.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};

use super::select::Table;
use crate::case::Metric;
use crate::gpu::Gpu;
use crate::protocol::Alloc;
use crate::published::{self, Published};
use crate::record::Record;

const MIB: f64 = (1 << 20) as f64;

const HEADING: Style = Style::new().bold();
const FAINT: Style = Style::new().dimmed();
const AHEAD: Style = AnsiColor::Green.on_default();
const BEHIND: Style = AnsiColor::Red.on_default();

/// A ratio from here on reads as 1.00 or more.
const MATCH: f64 = 0.995;

/// Times that spread more than this between p20 and p80, relative to the median, are marked.
const NOISY: f64 = 0.25;

/// The records of one row.
struct Row<'a>(Vec<&'a Record>);

impl<'a> Row<'a> {
    fn get(&self, provider: &str) -> Option<&'a Record> {
        self.0.iter().find(|record| record.provider == provider).copied()
    }

    /// Ours, if it is right. With a table made beforehand it has a column, but is not compared:
    /// peers make their angles in each call. From Python it has one too, and is no peer.
    fn ours(&self) -> Option<&'a Record> {
        let ours = self.get("fuselane").or_else(|| self.get("fuselane_gpu"));
        ours.filter(|record| record.ok)
    }

    /// The least value of the others whose results are right.
    fn best_peer(&self) -> Option<f64> {
        let ours = ["fuselane", "fuselane_gpu", "fuselane_table", "fuselane_python", "copy"];
        let peers = self.0.iter().filter(|record| !ours.contains(&record.provider.as_str()));
        peers.filter(|record| record.ok).filter_map(|record| record.value).min_by(f64::total_cmp)
    }

    /// The best peer's value over ours: above 1 where we are ahead. None for the identity, which
    /// has nothing to do.
    fn ratio(&self) -> Option<f64> {
        let ours = self.ours()?;
        let work = if ours.metric == Metric::Speed { ours.bytes } else { ours.least_bytes };
        let (ours, peer) = (ours.value?, self.best_peer()?);
        (ours > 0.0 && work != Some(0)).then(|| peer / ours)
    }
}

/// One table, of one allocator regime, on a GPU or on the CPU. `providers` are its columns.
pub(super) fn render(
    table: &Table,
    alloc: Alloc,
    on: Option<&Gpu>,
    records: &[Record],
    providers: &[&str],
) -> String {
    let mut rows: BTreeMap<usize, Row<'_>> = BTreeMap::new();
    for record in records {
        if record.table == table.name && record.alloc == alloc {
            rows.entry(record.n).or_insert_with(|| Row(Vec::new())).0.push(record);
        }
    }
    let columns: Vec<&str> = providers
        .iter()
        .copied()
        .filter(|&name| rows.values().any(|row| row.get(name).is_some()))
        .collect();
    let gpu: BTreeMap<usize, &Published> =
        rows.keys().filter_map(|&n| Some((n, published::find(&table.name, n)?))).collect();

    let mut text = String::new();
    let what = match table.metric {
        Metric::Speed => {
            format!("ms, outputs {}", if alloc == Alloc::Warm { "reused" } else { "fresh" })
        }
        Metric::Memory => "MiB: inputs + peak".to_owned(),
    };
    let _ = writeln!(
        text,
        "{HEADING}{}:{HEADING:#} {} ({}), {what}{}",
        table.name,
        table.case.title,
        table.case.operator.name(),
        on.map_or(String::new(), |gpu| format!(", on {}", gpu.words())),
    );
    let mut heads: Vec<String> = vec!["n".to_owned()];
    heads.extend(columns.iter().map(|&name| name.to_owned()));
    heads.push("best/ours".to_owned());
    match table.metric {
        Metric::Speed => heads.extend(["of copy", "of roof"].map(str::to_owned)),
        Metric::Memory => heads.extend(["extra", "least"].map(str::to_owned)),
    }
    if let Some(first) = gpu.values().next() {
        heads.push(format!("{}: to/tr", first.gpu));
        heads.push("toc/tr".to_owned());
    }
    let widths: Vec<usize> = heads.iter().map(|head| head.len().max(8)).collect();
    let line: Vec<String> =
        heads.iter().zip(&widths).map(|(head, &width)| format!("{head:>width$}")).collect();
    let _ = writeln!(text, "{FAINT}{}{FAINT:#}", line.join("  "));

    let mut noisy = false;
    let mut notes: BTreeMap<(&str, &str), Vec<usize>> = BTreeMap::new();
    for (&n, row) in &rows {
        let mut cells = vec![(n.to_string(), Style::new())];
        for &name in &columns {
            let record = row.get(name);
            if let Some(record) = record.filter(|record| !record.note.is_empty()) {
                notes.entry((name, &record.note)).or_default().push(n);
            }
            cells.push(match record {
                Some(Record { ok: true, value: Some(value), p20, p80, .. }) => {
                    let spread = p20.zip(*p80).map_or(0.0, |(p20, p80)| (p80 - p20) / value);
                    noisy |= spread > NOISY;
                    let mark = if spread > NOISY { "~" } else { "" };
                    (number(*value) + mark, Style::new())
                }
                Some(Record { ok: false, error: Some(_), .. }) => ("wrong".to_owned(), BEHIND),
                Some(_) | None => ("-".to_owned(), FAINT),
            });
        }
        cells.push(match row.ratio() {
            Some(ratio) => (factor(ratio), if ratio >= MATCH { AHEAD } else { BEHIND }),
            None => ("-".to_owned(), FAINT),
        });
        let ours = row.ours();
        let optional = |value: Option<f64>, digits: usize| {
            value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let more = match table.metric {
            Metric::Speed => [
                optional(ours.and_then(|record| record.of_copy_limit), 2),
                optional(ours.and_then(|record| record.of_roofline), 2),
            ],
            Metric::Memory => [
                optional(ours.and_then(|record| record.bytes).map(|bytes| bytes as f64 / MIB), 1),
                optional(ours.and_then(|r| r.least_bytes).map(|bytes| bytes as f64 / MIB), 1),
            ],
        };
        cells.extend(more.map(|cell| (cell, Style::new())));
        if let Some(gpu) = gpu.get(&n) {
            for ratio in [gpu.eager_over_fused(), gpu.compiled_over_fused()] {
                cells.push((ratio.map_or("-".to_owned(), factor), FAINT));
            }
        }
        let line: Vec<String> = cells
            .iter()
            .zip(&widths)
            .map(|((cell, style), &width)| format!("{style}{cell:>width$}{style:#}"))
            .collect();
        let _ = writeln!(text, "{}", line.join("  "));
    }
    if noisy {
        let _ = writeln!(text, "  {FAINT}~ noisy: p20 and p80 are far apart{FAINT:#}");
    }
    for ((provider, note), at) in notes {
        let at: Vec<String> = at.iter().map(usize::to_string).collect();
        let _ = writeln!(text, "  {FAINT}{provider}, n = {}: {note}{FAINT:#}", at.join(", "));
    }
    text
}

/// Four significant digits, more or less.
fn number(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.1}"),
        10.0.. => format!("{value:.2}"),
        1.0.. => format!("{value:.3}"),
        0.001.. => format!("{value:.4}"),
        _ => format!("{value:.1e}"),
    }
}

fn factor(ratio: f64) -> String {
    if ratio < 100.0 { format!("{ratio:.2}x") } else { format!("{ratio:.0}x") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::select::{Sizes, tables};
    use crate::case::builtin;

    fn table() -> Table {
        let globs = ["act-speed-fwd-*relu*".to_owned()];
        tables(&builtin().unwrap(), &globs, &Sizes::Quick, &[]).unwrap().remove(0)
    }

    fn record(provider: &str, n: usize, value: Option<f64>, ok: bool) -> Record {
        let table = table();
        Record {
            table: table.name,
            family: table.case.family,
            title: table.case.title,
            n,
            provider: provider.to_owned(),
            value,
            p20: value,
            p80: value,
            bytes: Some(100),
            of_copy_limit: Some(0.91),
            of_roofline: Some(0.95),
            error: value.map(|_| 0.5),
            ok,
            note: if ok { String::new() } else { "off by 9000 ulp".to_owned() },
            calls: 5,
            ..crate::record::tests::some()
        }
    }

    #[test]
    fn a_wrong_result_never_wins() {
        let records = [
            record("fuselane", 256, Some(2.0), true),
            record("unfused", 256, Some(5.0), true),
            record("torch", 256, Some(0.5), false),
            record("fuselane_python", 256, Some(1.9), true),
            record("copy", 256, Some(0.1), true),
        ];
        let text = render(
            &table(),
            Alloc::Warm,
            None,
            &records,
            &["fuselane", "unfused", "torch", "copy"],
        );
        let text = anstream::adapter::strip_str(&text).to_string();
        let row = text.lines().nth(2).unwrap();
        let cells: Vec<&str> = row.split_whitespace().collect();
        // The published ratios at n = 256 are 0.014025 and 0.300839 over 0.043131.
        assert_eq!(
            cells,
            ["256", "2.000", "5.000", "wrong", "0.1000", "2.50x", "0.91", "0.95", "0.33x", "6.98x"]
        );
        assert!(text.contains("torch, n = 256: off by 9000 ulp"), "{text}");
        assert!(text.contains("H100: to/tr"), "{text}");
    }

    #[test]
    fn a_gpu_is_named() {
        let records =
            [record("fuselane_gpu", 256, Some(2.0), true), record("copy", 256, Some(1.0), true)];
        let gpu = Gpu { software: true, ..crate::gpu::tests::some() };
        let providers = ["fuselane_gpu", "copy"];
        let text = render(&table(), Alloc::Warm, Some(&gpu), &records, &providers);
        let text = anstream::adapter::strip_str(&text).to_string();
        let mut lines = text.lines();
        let on = "on A <fast> GPU, a software device: these times are those of a CPU";
        assert!(lines.next().unwrap().ends_with(on), "{text}");
        let cells: Vec<&str> = lines.nth(1).unwrap().split_whitespace().collect();
        assert_eq!(cells[..6], ["256", "2.000", "1.000", "-", "0.91", "0.95"]);
    }

    #[test]
    fn missing_values_are_dashes() {
        let records = [record("fuselane", 256, Some(2.0), true), record("jax", 256, None, false)];
        let text = render(&table(), Alloc::Warm, None, &records, &["fuselane", "jax"]);
        let text = anstream::adapter::strip_str(&text).to_string();
        let cells: Vec<&str> = text.lines().nth(2).unwrap().split_whitespace().collect();
        assert_eq!(cells[..5], ["256", "2.000", "-", "-", "0.91"]);
        // Records of the other regime belong to another table.
        assert_eq!(
            render(&table(), Alloc::Fresh, None, &records, &["fuselane"]).lines().count(),
            2
        );
    }

    #[test]
    fn numbers() {
        let all = [0.00001234, 0.01234, 1.2345, 12.345, 123.45].map(number);
        assert_eq!(all, ["1.2e-5", "0.0123", "1.234", "12.35", "123.5"]);
    }
}
