//! A run folder's records, grouped into tables, and what follows from them: ratios and summaries.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::case::{Metric, Mode};
use crate::gpu::Gpu;
use crate::protocol::Alloc;
use crate::published::{self, Published};
use crate::record::{Record, Run};

/// The provider of the copy limit, which is not a peer.
pub(crate) const COPY: &str = "copy";
/// Ours, in ratios: with a table that was made beforehand it has a column of its own, but peers make
/// their angles in each call.
const OURS: &str = "fuselane";
/// Ours on a GPU, where it takes the other's place in ratios.
const ON_GPU: &str = "fuselane_gpu";
const WITH_TABLE: &str = "fuselane_table";
/// Ours too, called from Python.
const FROM_PYTHON: &str = "fuselane_python";
/// The order of columns. Providers that are not named here come behind, by name.
const ORDER: [&str; 9] =
    [OURS, ON_GPU, WITH_TABLE, FROM_PYTHON, "unfused", "candle", "torch", "torch_compile", "jax"];
/// A ratio from here on reads as 1.00 or more, and counts as a match.
pub(crate) const MATCH: f64 = 0.995;
const MIB: f64 = (1 << 20) as f64;

/// A run, as the report needs it.
#[derive(Debug, Clone)]
pub(crate) struct RunData {
    pub(crate) folder: PathBuf,
    pub(crate) run: Run,
    /// By family, metric, title, mode and allocator regime.
    pub(crate) tables: Vec<Table>,
}

/// One table: a case, metric, mode and allocator regime over several sizes.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    pub(crate) name: String,
    pub(crate) family: String,
    pub(crate) title: String,
    /// The GPU in words, for a run on one.
    pub(crate) on: Option<String>,
    pub(crate) metric: Metric,
    pub(crate) mode: Mode,
    pub(crate) dtype: String,
    pub(crate) alloc: Alloc,
    /// The run has this table in the other allocator regime too.
    pub(crate) both_regimes: bool,
    /// Ours first; without the copy limit.
    pub(crate) providers: Vec<String>,
    /// By n.
    pub(crate) rows: Vec<Row>,
}

/// One size of a table.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) n: usize,
    cells: BTreeMap<String, Record>,
    pub(crate) published: Option<&'static Published>,
}

/// What a cell shows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Cell<'a> {
    /// Not part of the run.
    Absent,
    Right(&'a Record, f64),
    /// A value whose outputs are wrong: it never wins.
    Wrong(&'a Record, f64),
    Failed(&'a Record),
}

impl<'a> Cell<'a> {
    pub(crate) fn right(self) -> Option<f64> {
        match self {
            Cell::Right(_, value) => Some(value),
            _ => None,
        }
    }

    /// The record's note, if there is a record and it has one.
    pub(crate) fn note(self) -> Option<&'a str> {
        match self {
            Cell::Absent => None,
            Cell::Right(record, _) | Cell::Wrong(record, _) | Cell::Failed(record) => {
                Some(record.note.as_str()).filter(|note| !note.is_empty())
            }
        }
    }
}

pub(crate) fn is_ours(provider: &str) -> bool {
    [OURS, ON_GPU, WITH_TABLE, FROM_PYTHON].contains(&provider)
}

/// A cell without a value, in a word: outputs that were compared and are wrong are not timed.
pub(crate) fn failure(record: &Record) -> &'static str {
    if record.error.is_some() { "wrong" } else { "failed" }
}

/// What a table shows where there may be nothing.
pub(crate) fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "–".to_owned())
}

/// How many times as good `ours` is as `peer`, where less is better. Two zeros are equal.
pub(crate) fn ratio(peer: f64, ours: f64) -> f64 {
    if peer == ours { 1.0 } else { peer / ours }
}

impl Row {
    pub(crate) fn cell(&self, provider: &str) -> Cell<'_> {
        let Some(record) = self.cells.get(provider) else { return Cell::Absent };
        match record.value {
            Some(value) if value.is_finite() && value >= 0.0 => {
                if record.ok {
                    Cell::Right(record, value)
                } else {
                    Cell::Wrong(record, value)
                }
            }
            _ => Cell::Failed(record),
        }
    }

    fn best(&self, among: impl Fn(&str) -> bool) -> Option<(&str, f64)> {
        let cells = self.cells.keys().filter(|provider| among(provider));
        let right = cells.filter_map(|provider| {
            self.cell(provider).right().map(|value| (provider.as_str(), value))
        });
        right.min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Our provider and its value.
    pub(crate) fn ours(&self) -> Option<(&str, f64)> {
        self.best(|provider| [OURS, ON_GPU].contains(&provider))
    }

    /// The best of the others whose results are right.
    pub(crate) fn best_peer(&self) -> Option<(&str, f64)> {
        self.best(|provider| !is_ours(provider) && provider != COPY)
    }

    /// Best peer over ours: above 1 we are faster (or smaller).
    pub(crate) fn ratio(&self) -> Option<f64> {
        Some(ratio(self.best_peer()?.1, self.ours()?.1))
    }

    /// As `ratio`, against one peer.
    pub(crate) fn ratio_to(&self, provider: &str) -> Option<f64> {
        Some(ratio(self.cell(provider).right()?, self.ours()?.1))
    }

    /// We took part and a peer has a right result, whether or not we have one.
    fn is_compared(&self) -> bool {
        let took_part = [OURS, ON_GPU].iter().any(|&ours| self.cells.contains_key(ours));
        took_part && self.best_peer().is_some()
    }

    /// The copy limit's time over ours.
    pub(crate) fn of_copy_limit(&self) -> Option<f64> {
        let (provider, _) = self.ours()?;
        self.cells[provider].of_copy_limit.filter(|share| share.is_finite())
    }

    /// A call that has nothing to do, such as the identity: its time is that of a call as such.
    pub(crate) fn is_idle(&self) -> bool {
        self.cells.values().any(|record| match record.metric {
            Metric::Speed => record.bytes == Some(0),
            Metric::Memory => record.least_bytes == Some(0),
        })
    }

    /// Memory: the inputs and the least that has to exist beyond them, in MiB.
    pub(crate) fn least(&self) -> Option<f64> {
        self.cells.values().find_map(|record| {
            if record.metric != Metric::Memory {
                return None;
            }
            let beyond = record.bytes? as f64;
            let inputs = record.value? - beyond / MIB;
            Some(inputs + record.least_bytes? as f64 / MIB).filter(|least| least.is_finite())
        })
    }
}

impl Table {
    /// The name, with the regime where there are two, fit for a file name and an id.
    pub(crate) fn id(&self) -> String {
        let mut id: String = self
            .name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' })
            .collect();
        if id.starts_with('.') {
            id.insert(0, '_');
        }
        if self.both_regimes {
            id.push('-');
            id.push_str(self.alloc.name());
        }
        id
    }

    /// The unit of its values.
    pub(crate) fn unit(&self) -> &'static str {
        self.metric.unit()
    }

    pub(crate) fn has(&self, provider: &str) -> bool {
        self.rows.iter().any(|row| row.cell(provider) != Cell::Absent)
    }

    /// The GPU of the published figures, if there are any.
    pub(crate) fn gpu(&self) -> Option<&'static str> {
        self.rows.iter().find_map(|row| row.published).map(|row| row.gpu.as_str())
    }

    /// The caption and the GPU: "relu, forward, speed, on a GPU".
    pub(crate) fn heading(&self) -> String {
        match &self.on {
            Some(on) => format!("{}, on {on}", self.caption()),
            None => self.caption(),
        }
    }

    /// The median share of the copy limit of these tables' rows.
    pub(crate) fn copy_shares(&self) -> impl Iterator<Item = f64> {
        let rows = self.rows.iter().filter(|row| !row.is_idle());
        rows.filter_map(Row::of_copy_limit)
    }

    /// In words, without the family: "relu, forward, speed".
    pub(crate) fn caption(&self) -> String {
        let mode = match self.mode {
            Mode::Fwd => "forward",
            Mode::Bwd => "backward",
        };
        let regime = if self.both_regimes {
            format!(", {} outputs", self.alloc.name())
        } else {
            String::new()
        };
        format!("{}, {mode}, {}{regime}", self.title, self.metric.name())
    }
}

impl RunData {
    /// Reads a run folder.
    pub(crate) fn load(folder: &Path) -> Result<Self, String> {
        if !folder.is_dir() {
            return Err(format!(
                "{}: no such folder; give a run's folder, which `fuselane bench` prints at its end",
                folder.display()
            ));
        }
        let path = folder.join("run.json");
        let run: Run = serde_json::from_str(&read(&path)?)
            .map_err(|error| format!("{}: not a run's facts: {error}", path.display()))?;
        let path = folder.join("results.jsonl");
        let records = parse(&path, &read(&path)?)?;
        if records.is_empty() {
            return Err(format!(
                "{}: no results yet; let `fuselane bench` measure some first",
                path.display()
            ));
        }
        let mut tables = tables(records);
        let on = run.gpu.as_ref().map(Gpu::words);
        for table in &mut tables {
            table.on.clone_from(&on);
        }
        Ok(Self { folder: folder.to_owned(), run, tables })
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = (&Table, &Row)> {
        self.tables.iter().flat_map(|table| table.rows.iter().map(move |row| (table, row)))
    }

    /// All providers but the copy limit, in the order of columns.
    pub(crate) fn providers(&self) -> Vec<String> {
        ordered(self.tables.iter().flat_map(|table| table.providers.iter().cloned()).collect())
    }

    /// The regimes that some table has both of, or none.
    pub(crate) fn regimes(&self) -> &'static [Alloc] {
        let both = self.tables.iter().any(|table| table.both_regimes);
        if both { &[Alloc::Warm, Alloc::Fresh] } else { &[] }
    }

    /// Distinct values of a table's property, in the tables' order.
    pub(crate) fn distinct<T: PartialEq>(&self, of: impl Fn(&Table) -> T) -> Vec<T> {
        let mut values = Vec::new();
        for value in self.tables.iter().map(of) {
            if !values.contains(&value) {
                values.push(value);
            }
        }
        values
    }

    /// The summary of the tables that `wanted` takes; none if they have no row to compare.
    pub(crate) fn summary(&self, wanted: impl Fn(&Table) -> bool) -> Option<Summary> {
        Summary::of(self.rows().filter(|(table, _)| wanted(table)).map(|(_, row)| row))
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).map_err(|error| {
        let advice = match error.kind() {
            ErrorKind::NotFound => "; is this a run's folder?",
            _ => "",
        };
        format!("{}: {error}{advice}", path.display())
    })
}

/// The records of `results.jsonl`. A crash may have cut off the last line.
fn parse(path: &Path, text: &str) -> Result<Vec<Record>, String> {
    let lines: Vec<_> =
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).collect();
    let mut records = Vec::new();
    for (at, &(number, line)) in lines.iter().enumerate() {
        match serde_json::from_str(line) {
            Ok(record) => records.push(record),
            Err(_) if at + 1 == lines.len() => {}
            Err(error) => {
                let line = number + 1;
                return Err(format!(
                    "{}: line {line} is not a record: {error}; delete that line to go on without it",
                    path.display()
                ));
            }
        }
    }
    Ok(records)
}

fn ordered(mut providers: Vec<String>) -> Vec<String> {
    let place = |name: &str| ORDER.iter().position(|known| *known == name).unwrap_or(ORDER.len());
    providers.sort_by_key(|name| (place(name), name.clone()));
    providers.dedup();
    providers
}

fn tables(records: Vec<Record>) -> Vec<Table> {
    let mut families: Vec<String> = Vec::new();
    let mut titles: Vec<String> = Vec::new();
    let mut groups: BTreeMap<(String, Alloc), Vec<Record>> = BTreeMap::new();
    for record in records {
        for (names, name) in [(&mut families, &record.family), (&mut titles, &record.title)] {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        groups.entry((record.table.clone(), record.alloc)).or_default().push(record);
    }
    let regimes: Vec<_> = groups.keys().cloned().collect();
    let mut tables: Vec<Table> = groups
        .into_values()
        .map(|records| {
            let mut table = table(records);
            let same = regimes.iter().filter(|(name, _)| *name == table.name);
            table.both_regimes = same.count() > 1;
            table
        })
        .collect();
    tables.sort_by_cached_key(|table| {
        let place = |names: &[String], name: &String| names.iter().position(|known| known == name);
        (
            place(&families, &table.family),
            table.metric,
            place(&titles, &table.title),
            table.dtype.clone(),
            table.mode,
            table.alloc,
            table.name.clone(),
        )
    });
    tables
}

/// The table of these records, of which there is one at least.
fn table(records: Vec<Record>) -> Table {
    let first = records[0].clone();
    let mut rows: BTreeMap<usize, BTreeMap<String, Record>> = BTreeMap::new();
    for record in records {
        // A run that was resumed may have measured a cell again: the later one counts.
        rows.entry(record.n).or_default().insert(record.provider.clone(), record);
    }
    let providers = rows.values().flat_map(|cells| cells.keys().cloned());
    Table {
        providers: ordered(providers.filter(|name| name != COPY).collect()),
        rows: rows
            .into_iter()
            .map(|(n, cells)| Row { n, cells, published: published::find(&first.table, n) })
            .collect(),
        name: first.table,
        family: first.family,
        title: first.title,
        metric: first.metric,
        mode: first.mode,
        dtype: first.dtype,
        alloc: first.alloc,
        both_regimes: false,
        on: None,
    }
}

/// How some rows came out against the best peer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Summary {
    /// Rows where a peer has a right result, without idle calls.
    pub(crate) rows: usize,
    /// Of these, where we match or beat the best peer.
    pub(crate) won: usize,
    /// The geometric mean of best peer over ours, and its range.
    pub(crate) mean: Option<f64>,
    pub(crate) range: Option<(f64, f64)>,
    /// The median share of the copy limit.
    pub(crate) of_copy_limit: Option<f64>,
}

impl Summary {
    fn of<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<Self> {
        let rows: Vec<_> = rows.filter(|row| row.is_compared() && !row.is_idle()).collect();
        let won = rows.iter().filter(|row| row.ratio().is_some_and(|ratio| ratio >= MATCH));
        let ratios = rows.iter().filter_map(|row| row.ratio());
        let mut ratios: Vec<f64> = ratios.filter(|r| r.is_finite() && *r > 0.0).collect();
        ratios.sort_by(f64::total_cmp);
        let mut shares: Vec<f64> = rows.iter().filter_map(|row| row.of_copy_limit()).collect();
        shares.sort_by(f64::total_cmp);
        (!rows.is_empty()).then(|| Self {
            rows: rows.len(),
            won: won.count(),
            mean: geometric_mean(&ratios),
            range: ratios.first().copied().zip(ratios.last().copied()),
            of_copy_limit: median(&shares),
        })
    }
}

/// Of positive numbers; none of none.
pub(crate) fn geometric_mean(values: &[f64]) -> Option<f64> {
    let sum: f64 = values.iter().map(|value| value.ln()).sum();
    (!values.is_empty()).then(|| (sum / values.len() as f64).exp())
}

/// Of sorted numbers; none of none.
pub(crate) fn median(sorted: &[f64]) -> Option<f64> {
    let upper = *sorted.get(sorted.len() / 2)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[sorted.len() / 2 - 1] + upper) / 2.0 })
}

/// A value with four digits that count.
pub(crate) fn digits(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    if !(1e-6..1e9).contains(&value.abs()) {
        return format!("{value:.3e}");
    }
    let before = value.abs().log10().floor() as i32;
    format!("{value:.*}", (3 - before).max(0) as usize)
}

/// A ratio with two decimals, or fewer where it is large.
pub(crate) fn times(ratio: f64) -> String {
    match ratio {
        r if r.is_infinite() => "∞".to_owned(),
        r if r >= 100.0 => format!("{r:.0}"),
        r if r >= 10.0 => format!("{r:.1}"),
        r => format!("{r:.2}"),
    }
}

pub(crate) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}
