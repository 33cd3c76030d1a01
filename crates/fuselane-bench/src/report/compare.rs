//! Two runs, row by row.

use super::data::{COPY, Cell, RunData, digits, is_ours, median, or_dash, ratio, times};

/// A change from here on is worth a mark: below it, machines differ from one hour to the next.
const WORTH_A_MARK: f64 = 1.05;

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// Right before, and now wrong or failed.
    Broken,
    Worse,
    Same,
    Better,
    /// Wrong or failed before, and now right.
    Repaired,
}

impl Verdict {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Broken => "broken",
            Self::Worse => "worse",
            Self::Same => "same",
            Self::Better => "better",
            Self::Repaired => "repaired",
        }
    }

    pub(crate) fn is_regression(self) -> bool {
        self <= Self::Worse
    }
}

/// One of our cells in both runs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Change {
    pub(crate) table: String,
    pub(crate) n: usize,
    pub(crate) provider: String,
    pub(crate) unit: &'static str,
    pub(crate) old: Option<f64>,
    pub(crate) new: Option<f64>,
    /// Old over new: below 1 it became slower (or larger).
    pub(crate) ratio: Option<f64>,
    /// The median of the same ratio over all that is not ours in this row: how much the machine
    /// itself was faster or slower.
    pub(crate) others: Option<f64>,
    pub(crate) verdict: Verdict,
}

impl Change {
    /// Both values, their ratio and that of the others, as tables show them.
    pub(crate) fn cells(&self) -> [String; 4] {
        let value = |value: f64| format!("{} {}", digits(value), self.unit);
        let (old, new) = (self.old.map(value), self.new.map(value));
        [old, new, self.ratio.map(times), self.others.map(times)].map(or_dash)
    }
}

/// The last run against the first.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Comparison {
    /// By verdict, the worst first.
    pub(crate) changes: Vec<Change>,
    /// "TABLE, n, provider" of cells that only one run has.
    pub(crate) only_old: Vec<String>,
    pub(crate) only_new: Vec<String>,
}

impl Comparison {
    pub(crate) fn count(&self, wanted: impl Fn(Verdict) -> bool) -> usize {
        self.changes.iter().filter(|change| wanted(change.verdict)).count()
    }
}

/// A table and a regime by their names.
fn find<'a>(data: &'a RunData, like: &super::data::Table) -> Option<&'a super::data::Table> {
    data.tables.iter().find(|table| table.name == like.name && table.alloc == like.alloc)
}

pub(crate) fn compare(old: &RunData, new: &RunData) -> Comparison {
    let mut changes = Vec::new();
    let mut only_new = only_in(new, old);
    let mut only_old = only_in(old, new);
    for (table, row) in new.rows() {
        let before = find(old, table).and_then(|t| t.rows.iter().find(|r| r.n == row.n));
        let Some(before) = before else { continue };
        let change = |provider: &str| {
            Some(ratio(before.cell(provider).right()?, row.cell(provider).right()?))
        };
        let others = table.providers.iter().map(String::as_str).filter(|name| !is_ours(name));
        let mut others: Vec<f64> = others.chain([COPY]).filter_map(change).collect();
        others.sort_by(f64::total_cmp);
        for provider in table.providers.iter().filter(|name| is_ours(name)) {
            let (was, is) = (before.cell(provider), row.cell(provider));
            if was == Cell::Absent || is == Cell::Absent {
                continue;
            }
            let ratio = change(provider);
            let verdict = match (was.right(), is.right(), ratio) {
                (None, None, _) => Verdict::Same,
                (Some(_), None, _) => Verdict::Broken,
                (None, Some(_), _) => Verdict::Repaired,
                // Nanoseconds of a call that does nothing are noise.
                _ if row.is_idle() => Verdict::Same,
                (.., Some(ratio)) if ratio < 1.0 / WORTH_A_MARK => Verdict::Worse,
                (.., Some(ratio)) if ratio > WORTH_A_MARK => Verdict::Better,
                _ => Verdict::Same,
            };
            changes.push(Change {
                table: table.id(),
                n: row.n,
                provider: provider.clone(),
                unit: table.unit(),
                old: was.right(),
                new: is.right(),
                ratio,
                others: median(&others),
                verdict,
            });
        }
    }
    changes.sort_by(|a, b| {
        let by_ratio = || match (a.ratio, b.ratio) {
            (Some(a), Some(b)) => a.total_cmp(&b),
            (a, b) => b.is_some().cmp(&a.is_some()),
        };
        a.verdict.cmp(&b.verdict).then_with(by_ratio)
    });
    only_old.sort();
    only_new.sort();
    Comparison { changes, only_old, only_new }
}

/// Our cells that `one` has and `other` has not.
fn only_in(one: &RunData, other: &RunData) -> Vec<String> {
    let mut only = Vec::new();
    for (table, row) in one.rows() {
        let there = find(other, table).and_then(|t| t.rows.iter().find(|r| r.n == row.n));
        for provider in table.providers.iter().filter(|name| is_ours(name)) {
            let here = row.cell(provider) != Cell::Absent;
            let missing = there.is_none_or(|row| row.cell(provider) == Cell::Absent);
            if here && missing {
                only.push(format!("{}, n = {}, {provider}", table.id(), row.n));
            }
        }
    }
    only
}
