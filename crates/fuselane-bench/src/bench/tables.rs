//! Tables for the terminal, in the layout of the published ones: a line per size, a column per
//! provider, and ratios to the right.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};

use super::select::Table;
use super::statistics::geometric_mean;
use crate::case::Metric;
use crate::protocol::Alloc;
use crate::published::{self, Published};
use crate::record::Record;

const MIB: f64 = (1 << 20) as f64;

const HEADING: Style = Style::new().bold();
const FAINT: Style = Style::new().dimmed();
const AHEAD: Style = AnsiColor::Green.on_default();
const BEHIND: Style = AnsiColor::Red.on_default();

/// Whether a provider is one of ours, a yardstick, or somebody to compare with.
pub(crate) fn is_ours(provider: &str) -> bool {
    matches!(provider, "fuselane" | "fuselane_table")
}

fn is_peer(provider: &str) -> bool {
    !is_ours(provider) && provider != "copy"
}

/// The records of one row.
struct Row<'a>(Vec<&'a Record>);

impl<'a> Row<'a> {
    fn get(&self, provider: &str) -> Option<&'a Record> {
        self.0.iter().find(|record| record.provider == provider).copied()
    }

    /// The right result with the least value among some providers.
    fn best(&self, among: fn(&str) -> bool) -> Option<&'a Record> {
        let right = self.0.iter().filter(|record| record.ok && among(&record.provider));
        let valued = right.filter(|record| record.value.is_some());
        valued
            .min_by(|a, b| a.value.unwrap_or(f64::MAX).total_cmp(&b.value.unwrap_or(f64::MAX)))
            .copied()
    }

    /// The best peer's value over ours: above 1 where we are ahead.
    fn ratio(&self) -> Option<f64> {
        let (ours, peer) = (self.best(is_ours)?.value?, self.best(is_peer)?.value?);
        (ours > 0.0).then(|| peer / ours)
    }
}

/// One table, of one allocator regime. `providers` are its columns.
pub(super) fn render(
    table: &Table,
    alloc: Alloc,
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
        "{HEADING}{}:{HEADING:#} {} ({}), {what}",
        table.name,
        table.case.title,
        table.case.operator.name(),
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

    let mut notes: BTreeMap<(&str, &str), Vec<usize>> = BTreeMap::new();
    for (&n, row) in &rows {
        let mut cells = vec![(n.to_string(), Style::new())];
        for &name in &columns {
            let record = row.get(name);
            if let Some(record) = record.filter(|record| !record.note.is_empty()) {
                notes.entry((name, &record.note)).or_default().push(n);
            }
            cells.push(match record {
                Some(Record { ok: true, value: Some(value), .. }) => (number(*value), Style::new()),
                Some(Record { ok: false, error: Some(_), .. }) => ("wrong".to_owned(), BEHIND),
                Some(_) | None => ("-".to_owned(), FAINT),
            });
        }
        cells.push(match row.ratio() {
            Some(ratio) => (factor(ratio), if ratio >= 1.0 { AHEAD } else { BEHIND }),
            None => ("-".to_owned(), FAINT),
        });
        let ours = row.best(is_ours);
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
        _ => format!("{value:.4}"),
    }
}

fn factor(ratio: f64) -> String {
    if ratio < 100.0 { format!("{ratio:.2}x") } else { format!("{ratio:.0}x") }
}

/// How ours does over all rows, in a few lines.
pub(super) fn summary(records: &[Record]) -> String {
    let mut rows: BTreeMap<(Metric, &str, &str, usize, Alloc), Row<'_>> = BTreeMap::new();
    for record in records {
        let key = (record.metric, &*record.family, &*record.table, record.n, record.alloc);
        rows.entry(key).or_insert_with(|| Row(Vec::new())).0.push(record);
    }
    let mut text = String::new();
    for metric in Metric::ALL {
        let of: Vec<&Row<'_>> =
            rows.iter().filter(|(key, _)| key.0 == metric).map(|(_, row)| row).collect();
        // The identity takes no time and no memory: a ratio of two nothings says nothing.
        let work = |row: &&&Row<'_>| row.0.iter().any(|record| record.bytes.unwrap_or(0) > 0);
        let ratios: Vec<f64> = of.iter().filter(work).filter_map(|row| row.ratio()).collect();
        if let Some(mean) = geometric_mean(&ratios) {
            let ahead = ratios.iter().filter(|&&ratio| ratio >= 1.0).count();
            let _ = writeln!(
                text,
                "{}: ahead of the best peer, or level, in {ahead} of {} rows; geometric mean {}",
                metric.name(),
                ratios.len(),
                factor(mean),
            );
        }
        let mut limits: Vec<f64> =
            of.iter().filter_map(|row| row.best(is_ours)?.of_copy_limit).collect();
        limits.sort_unstable_by(f64::total_cmp);
        if let (Some(least), Some(most)) = (limits.first(), limits.last()) {
            let middle = limits[limits.len() / 2];
            let _ = writeln!(
                text,
                "{}: of the copy limit {least:.2} to {most:.2}, median {middle:.2}",
                metric.name(),
            );
        }
    }
    let wrong = records.iter().filter(|record| !record.ok && record.error.is_some()).count();
    if wrong > 0 {
        let _ = writeln!(text, "{BEHIND}{wrong} results are wrong{BEHIND:#}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::select::{Sizes, tables};
    use crate::case::{Mode, builtin};

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
            operator: "act".to_owned(),
            metric: Metric::Speed,
            mode: Mode::Fwd,
            n,
            dtype: "bf16".to_owned(),
            provider: provider.to_owned(),
            alloc: Alloc::Warm,
            value,
            p20: value,
            p80: value,
            unit: "ms".to_owned(),
            bytes: Some(100),
            least_bytes: None,
            of_copy_limit: Some(0.91),
            of_roofline: Some(0.95),
            error: value.map(|_| 0.5),
            ok,
            note: if ok { String::new() } else { "off by 9000 ulp".to_owned() },
            calls: 5,
        }
    }

    #[test]
    fn a_wrong_result_never_wins() {
        let records = [
            record("fuselane", 256, Some(2.0), true),
            record("unfused", 256, Some(5.0), true),
            record("torch", 256, Some(0.5), false),
            record("copy", 256, Some(0.1), true),
        ];
        let text =
            render(&table(), Alloc::Warm, &records, &["fuselane", "unfused", "torch", "copy"]);
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
        let summary = summary(&records);
        assert!(summary.contains("1 of 1 rows; geometric mean 2.50x"), "{summary}");
        assert!(summary.contains("1 results are wrong"), "{summary}");
    }

    #[test]
    fn missing_values_are_dashes() {
        let records = [record("fuselane", 256, Some(2.0), true), record("jax", 256, None, false)];
        let text = render(&table(), Alloc::Warm, &records, &["fuselane", "jax"]);
        let text = anstream::adapter::strip_str(&text).to_string();
        let cells: Vec<&str> = text.lines().nth(2).unwrap().split_whitespace().collect();
        assert_eq!(cells[..5], ["256", "2.000", "-", "-", "0.91"]);
        // Records of the other regime belong to another table.
        assert_eq!(render(&table(), Alloc::Fresh, &records, &["fuselane"]).lines().count(), 2);
    }

    #[test]
    fn numbers() {
        let all = [0.01234, 1.2345, 12.345, 123.45].map(number);
        assert_eq!(all, ["0.0123", "1.234", "12.35", "123.5"]);
    }
}
