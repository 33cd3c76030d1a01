//! The tables, the summary and the comparison of runs as Markdown.

use std::fmt::Write as _;

use super::compare::Comparison;
use super::data::{COPY, Cell, RunData, Summary, Table, digits, failure, or_dash, percent, times};
use super::facts;
use crate::case::{Metric, Mode};
use crate::record::Run;

/// Text of others, which may not end a cell or begin markup.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '\n' | '\r' => escaped.push(' '),
            '<' => escaped.push_str("&lt;"),
            '&' => escaped.push_str("&amp;"),
            '|' | '*' | '_' | '`' | '[' | ']' | '\\' | '~' => {
                escaped.push('\\');
                escaped.push(c);
            }
            other => escaped.push(other),
        }
    }
    escaped
}

fn heading(text: &mut String, columns: &[String]) {
    let rule = vec!["---:"; columns.len()].join("|");
    let _ = writeln!(text, "| {} |\n|{rule}|", columns.join(" | "));
}

/// All tables.
pub(crate) fn tables(data: &RunData) -> String {
    let mut text = "# Benchmark tables\n\n".to_owned();
    text.push_str(
        "Speed is the median time of a call in ms, memory the inputs and the peak beyond them in \
         MiB; less is better. \"best peer / ours\" is above 1 where fuselane is better. A struck \
         value belongs to a wrong result and takes part in no ratio.\n\n",
    );
    facts(&mut text, &data.run);
    for family in data.distinct(|table| table.family.clone()) {
        let _ = writeln!(text, "\n## {}", escape(&family));
        for table in data.tables.iter().filter(|table| table.family == family) {
            one_table(&mut text, table);
        }
    }
    text
}

fn one_table(text: &mut String, table: &Table) {
    let _ = writeln!(text, "\n### {}\n\n{}\n", escape(&table.id()), escape(&table.heading()));
    let speed = table.metric == Metric::Speed;
    let (copy, least) = (table.has(COPY), table.rows.iter().any(|row| row.least().is_some()));
    let mut columns = vec!["n".to_owned()];
    columns
        .extend(table.providers.iter().map(|name| format!("{} ({})", escape(name), table.unit())));
    if copy {
        columns.push(format!("copy limit ({})", table.unit()));
    }
    if least {
        columns.push(format!("least possible ({})", table.unit()));
    }
    columns.push("best peer / ours".to_owned());
    if speed {
        columns.push("of copy limit".to_owned());
    }
    if let Some(gpu) = table.gpu() {
        columns.push(format!("{gpu}: eager / fused"));
        columns.push(format!("{gpu}: compiled / fused"));
    }
    heading(text, &columns);
    let mut notes = Vec::new();
    for row in &table.rows {
        let mut cells = vec![row.n.to_string()];
        let providers = table.providers.iter().map(String::as_str);
        for provider in providers.chain(copy.then_some(COPY)) {
            let cell = row.cell(provider);
            let mut shown = match cell {
                Cell::Absent => "–".to_owned(),
                Cell::Right(_, value) => digits(value),
                Cell::Wrong(_, value) => format!("~~{}~~ wrong", digits(value)),
                Cell::Failed(record) => failure(record).to_owned(),
            };
            if let Some(note) = cell.note() {
                let note = format!("{}: {}", escape(provider), escape(note));
                let at = notes.iter().position(|known| *known == note).unwrap_or_else(|| {
                    notes.push(note);
                    notes.len() - 1
                });
                let _ = write!(shown, " ({})", at + 1);
            }
            cells.push(shown);
        }
        if least {
            cells.push(or_dash(row.least().map(digits)));
        }
        cells.push(or_dash(row.ratio().map(times)));
        if speed {
            cells.push(or_dash(row.of_copy_limit().map(percent)));
        }
        if table.gpu().is_some() {
            let published = row.published;
            cells.push(or_dash(published.and_then(|p| p.eager_over_fused()).map(times)));
            cells.push(or_dash(published.and_then(|p| p.compiled_over_fused()).map(times)));
        }
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    if !notes.is_empty() {
        text.push('\n');
        for (at, note) in notes.iter().enumerate() {
            let _ = writeln!(text, "{}. {note}", at + 1);
        }
    }
}

fn facts(text: &mut String, run: &Run) {
    for (name, fact) in facts::list(run) {
        let fact = if name == "command" { format!("`{fact}`") } else { escape(&fact) };
        let _ = writeln!(text, "- {name}: {fact}");
    }
}

/// What the numbers are, and how many rows came out well: in one sentence.
pub(crate) fn sentence(what: &str, summary: &Summary) -> String {
    let mean = summary.mean.map_or(String::new(), |mean| {
        format!("; geometric mean of best peer over ours {}", times(mean))
    });
    format!(
        "{what}: fuselane matches or beats the best peer in {} of {} rows{mean}.",
        summary.won, summary.rows
    )
}

/// A name, and which tables belong to it.
type Part = (String, Box<dyn Fn(&Table) -> bool>);

/// The metrics and regimes, which are summed up apart.
pub(crate) fn parts(data: &RunData) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for metric in Metric::ALL {
        let name = match metric {
            Metric::Speed => "Speed",
            Metric::Memory => "Memory",
        };
        let both = |table: &Table| table.metric == metric && table.both_regimes;
        if data.tables.iter().any(both) {
            for &alloc in data.regimes() {
                let wanted = move |table: &Table| {
                    table.metric == metric && (!table.both_regimes || table.alloc == alloc)
                };
                parts.push((format!("{name}, {} outputs", alloc.name()), Box::new(wanted)));
            }
        } else {
            parts.push((name.to_owned(), Box::new(move |table: &Table| table.metric == metric)));
        }
    }
    parts
}

/// The summary: per family and mode.
pub(crate) fn summary(data: &RunData) -> String {
    let mut text = String::new();
    for (name, wanted) in parts(data) {
        let Some(all) = data.summary(&wanted) else { continue };
        let _ = writeln!(text, "**{}**\n", sentence(&name, &all));
        let speed = all.of_copy_limit.is_some();
        let mut columns: Vec<String> =
            ["family", "mode", "rows", "matched or better", "mean", "least", "most"]
                .map(str::to_owned)
                .to_vec();
        if speed {
            columns.push("of copy limit (median)".to_owned());
        }
        let mut rule = vec!["---:"; columns.len()];
        rule[..2].fill("---");
        let _ = writeln!(text, "| {} |\n|{}|", columns.join(" | "), rule.join("|"));
        for family in data.distinct(|table| table.family.clone()) {
            for mode in Mode::ALL {
                let Some(part) = data
                    .summary(|table| wanted(table) && table.family == family && table.mode == mode)
                else {
                    continue;
                };
                let mut cells = vec![
                    escape(&family),
                    mode.name().to_owned(),
                    part.rows.to_string(),
                    part.won.to_string(),
                    or_dash(part.mean.map(times)),
                    or_dash(part.range.map(|range| times(range.0))),
                    or_dash(part.range.map(|range| times(range.1))),
                ];
                if speed {
                    cells.push(or_dash(part.of_copy_limit.map(percent)));
                }
                let _ = writeln!(text, "| {} |", cells.join(" | "));
            }
        }
        text.push('\n');
    }
    if text.is_empty() {
        text.push_str("No row has a peer with a right result to compare with.\n\n");
    }
    text.push_str(
        "Ratios are best peer over ours, above 1 where fuselane is better; the mean is geometric. \
         A match is a ratio that rounds to 1.00. Calls that have nothing to do (the identity) \
         are not counted.\n\n",
    );
    facts(&mut text, &data.run);
    let _ = writeln!(
        text,
        "- regenerate: `{}`, then `fuselane report RUN --readme` with the folder that it names",
        facts::command(&data.run)
    );
    text
}

/// The last run against the first.
pub(crate) fn comparison(old: &RunData, new: &RunData, comparison: &Comparison) -> String {
    let mut text = "# Comparison of two runs\n\n".to_owned();
    for (name, data) in [("old", old), ("new", new)] {
        let commit = data.run.commit.as_deref().unwrap_or("unknown commit");
        let _ = writeln!(
            text,
            "- {name}: {}, {}, {}",
            escape(&data.run.started),
            escape(commit),
            escape(&facts::line(&data.run))
        );
    }
    let _ = writeln!(
        text,
        "\n{} of {} rows are worse by more than 5 % or broken. The ratio is old over new: below \
         1 it became slower (or larger). \"others\" is the median of the same ratio over all that \
         is not ours in that row: what the machine itself did.\n",
        comparison.count(|verdict| verdict.is_regression()),
        comparison.changes.len()
    );
    let columns = ["table", "n", "provider", "old", "new", "old / new", "others", "verdict"];
    let _ = writeln!(text, "| {} |\n|---|---:|---|---:|---:|---:|---:|---|", columns.join(" | "));
    for change in &comparison.changes {
        let [old, new, ratio, others] = change.cells();
        let verdict = change.verdict.name();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {old} | {new} | {ratio} | {others} | {} |",
            escape(&change.table),
            change.n,
            escape(&change.provider),
            if change.verdict.is_regression() { format!("**{verdict}**") } else { verdict.into() },
        );
    }
    for (name, only) in [("old", &comparison.only_old), ("new", &comparison.only_new)] {
        if !only.is_empty() {
            let _ = writeln!(text, "\nOnly in the {name} run:\n");
            for row in only {
                let _ = writeln!(text, "- {}", escape(row));
            }
        }
    }
    text
}
