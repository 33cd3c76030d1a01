//! The page: one file without anything from the network.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Write as _;

use serde_json::json;

use super::chart;
use super::colour::{self, AXIS, BACKGROUND, GRID, LIMIT, TEXT};
use super::compare::{Comparison, Verdict};
use super::data::{
    COPY, Cell, MATCH, Row, RunData, Table, digits, failure, is_ours, or_dash, percent, times,
};
use super::facts;
use super::markdown;
use crate::case::{Metric, Mode};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// The limits' place in the filter of providers.
const LIMITS: &str = "limit";

/// Text of others as HTML, also between quotes.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// The page of a run, with the changes since an older one.
pub(crate) fn page(
    data: &RunData,
    comparison: Option<(&RunData, &Comparison)>,
) -> Result<String, Box<dyn Error>> {
    let mut html = String::new();
    let providers = data.providers();
    let _ = write!(
        html,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <link rel=\"icon\" href=\"data:,\">\n\
         <title>fuselane benchmarks, {}</title>\n<style>\n{STYLE}{}</style>\n</head>\n<body>\n",
        escape(&data.run.started),
        colours(&providers)
    );
    head(&mut html, data);
    html.push_str("<main>\n");
    summary(&mut html, data);
    if let Some((old, comparison)) = comparison {
        changes(&mut html, old, data, comparison);
    }
    filters(&mut html, data, &providers);
    heat_map(&mut html, data);
    let mut charts = Vec::new();
    for family in data.distinct(|table| table.family.clone()) {
        let _ = write!(
            html,
            "<section class=\"family\" data-family=\"{0}\"><h2>{0}</h2>\n<div class=\"cards\">\n",
            escape(&family)
        );
        for table in data.tables.iter().filter(|table| table.family == family) {
            charts.push(card(&mut html, table, &providers)?);
        }
        html.push_str("</div></section>\n");
    }
    // No tag may end the script's element early.
    let embedded = serde_json::to_string(&charts)?.replace('<', "\\u003c");
    let _ = write!(
        html,
        "</main>\n<div id=\"tip\" role=\"status\" hidden></div>\n\
         <script type=\"application/json\" id=\"data\">{embedded}</script>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    );
    Ok(html)
}

/// Variables for each provider, how they recolour pictures, and how a filter hides a provider.
fn colours(providers: &[String]) -> String {
    let mut light = String::new();
    let mut dark = String::new();
    let mut rules = String::new();
    let all = providers
        .iter()
        .enumerate()
        .map(|(at, name)| (at.to_string(), colour::of(name, providers)))
        .chain([(LIMITS.to_owned(), LIMIT)]);
    for (key, colour) in all {
        let hex = colour.hex();
        let _ = write!(light, "--p{key}:{hex};");
        let _ = write!(dark, "--p{key}:{};", colour.dark);
        let _ = write!(
            rules,
            ".chart svg [stroke=\"{hex}\"]{{stroke:var(--p{key})}}\n\
             .chart svg [fill=\"{hex}\"]{{fill:var(--p{key})}}\n\
             .no-{key} [data-p=\"{key}\"],.no-{key} .chart svg [stroke=\"{hex}\"],\
             .no-{key} .chart svg [fill=\"{hex}\"]{{display:none}}\n\
             .chip[data-c=\"{key}\"]{{--chip:var(--p{key})}}\n"
        );
    }
    for (colour, name) in [(TEXT, "text"), (AXIS, "axis"), (GRID, "grid"), (BACKGROUND, "card")] {
        let hex = colour::hex(colour);
        let _ = write!(
            rules,
            ".chart svg [stroke=\"{hex}\"]{{stroke:var(--{name})}}\n\
             .chart svg [fill=\"{hex}\"]{{fill:var(--{name})}}\n"
        );
    }
    format!(
        ":root{{{light}}}\n:root[data-theme=dark]{{{dark}}}\n\
         @media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n{rules}"
    )
}

fn head(html: &mut String, data: &RunData) {
    let _ = write!(
        html,
        "<header>\n<div class=\"bar\"><h1>fuselane benchmarks</h1>\n\
         <button type=\"button\" id=\"theme\" aria-label=\"Switch between light and dark\" hidden>\
         <span aria-hidden=\"true\">◐</span> <span id=\"theme-name\">theme</span></button></div>\n\
         <p class=\"lead\">{}</p>\n<details class=\"facts\" open><summary>Machine and versions</summary>\n<dl>",
        escape(&facts::line(&data.run))
    );
    for (name, fact) in facts::list(&data.run) {
        let tag = if name == "command" { "code" } else { "span" };
        let fact = escape(&fact);
        let _ = write!(html, "<div><dt>{name}</dt><dd><{tag}>{fact}</{tag}></dd></div>");
    }
    html.push_str("</dl></details>\n</header>\n");
}

fn summary(html: &mut String, data: &RunData) {
    html.push_str("<section aria-labelledby=\"summary\"><h2 id=\"summary\">Summary</h2>\n");
    let mut any = false;
    html.push_str("<div class=\"sums\">\n");
    for (name, wanted) in markdown::parts(data) {
        let Some(all) = data.summary(&wanted) else { continue };
        any = true;
        let speed = all.of_copy_limit.is_some();
        let _ = write!(
            html,
            "<div class=\"sum\"><h3>{name}</h3>\n\
             <p class=\"big\"><b>{}</b> of {} rows match or beat the best peer</p>\n\
             <p class=\"big\"><b>{}</b> geometric mean, best peer over ours</p>\n\
             <div class=\"wide\"><table><thead><tr><th scope=\"col\">family</th>\
             <th scope=\"col\">rows</th><th scope=\"col\">matched or better</th>\
             <th scope=\"col\">mean</th><th scope=\"col\">range</th>{}</tr></thead><tbody>\n",
            all.won,
            all.rows,
            or_dash(all.mean.map(|mean| format!("{}×", times(mean)))),
            if speed { "<th scope=\"col\">of copy limit</th>" } else { "" },
        );
        for family in data.distinct(|table| table.family.clone()) {
            let part = data.summary(|table| wanted(table) && table.family == family);
            let Some(part) = part else { continue };
            let range = part.range.map(|(least, most)| format!("{}–{}", times(least), times(most)));
            let _ = write!(
                html,
                "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td>",
                escape(&family),
                part.rows,
                part.won,
                or_dash(part.mean.map(times)),
                or_dash(range)
            );
            if speed {
                let _ = write!(html, "<td>{}</td>", or_dash(part.of_copy_limit.map(percent)));
            }
            html.push_str("</tr>\n");
        }
        html.push_str("</tbody></table></div></div>\n");
    }
    html.push_str("</div>\n");
    if !any {
        html.push_str("<p>No row has a peer with a right result to compare with.</p>\n");
    }
    html.push_str(
        "<p class=\"hint\">Ratios are best peer over ours: above 1, fuselane is better. A match is \
         a ratio that rounds to 1.00. Calls that have nothing to do (the identity) are not \
         counted.</p></section>\n",
    );
}

fn changes(html: &mut String, old: &RunData, new: &RunData, comparison: &Comparison) {
    let run = |data: &RunData| {
        let commit = data.run.commit.as_deref().unwrap_or("unknown commit");
        escape(&format!("{} ({commit})", data.run.started))
    };
    let _ = write!(
        html,
        "<section aria-labelledby=\"changes\"><h2 id=\"changes\">Change since the first run</h2>\n\
         <p>From {} to {}: {} rows worse by more than 5 % or broken, {} better, {} compared.</p>\n\
         <p class=\"hint\">Old over new: below 1 it became slower (or larger). \"Others\" is the \
         median of the same ratio over all that is not ours in that row: what the machine itself \
         did.</p>\n\
         <div class=\"wide tall\" tabindex=\"0\" role=\"region\" aria-label=\"Changes\">\
         <table class=\"changes\"><thead><tr><th scope=\"col\">table</th><th scope=\"col\">n</th>\
         <th scope=\"col\">provider</th><th scope=\"col\">old</th><th scope=\"col\">new</th>\
         <th scope=\"col\">old / new</th><th scope=\"col\">others</th><th scope=\"col\">verdict</th>\
         </tr></thead><tbody>\n",
        run(old),
        run(new),
        comparison.count(Verdict::is_regression),
        comparison.count(|verdict| verdict >= Verdict::Better),
        comparison.changes.len()
    );
    for change in &comparison.changes {
        let [old, new, ratio, others] = change.cells();
        let _ = writeln!(
            html,
            "<tr class=\"{verdict}\"><th scope=\"row\"><a href=\"#{table}\">{table}</a></th>\
             <td>{}</td><td>{}</td><td>{old}</td><td>{new}</td><td>{ratio}</td><td>{others}</td>\
             <td>{verdict}</td></tr>",
            change.n,
            escape(&change.provider),
            verdict = change.verdict.name(),
            table = escape(&change.table),
        );
    }
    html.push_str("</tbody></table></div>\n");
    for (name, only) in [("first", &comparison.only_old), ("last", &comparison.only_new)] {
        if !only.is_empty() {
            let _ = writeln!(
                html,
                "<details><summary>{} rows only in the {name} run</summary><ul>",
                only.len()
            );
            for row in only {
                let _ = writeln!(html, "<li>{}</li>", escape(row));
            }
            html.push_str("</ul></details>\n");
        }
    }
    html.push_str("</section>\n");
}

fn filters(html: &mut String, data: &RunData, providers: &[String]) {
    html.push_str(
        "<form id=\"filters\" class=\"filters\" aria-label=\"Filters\" hidden>\n\
         <label class=\"search\">table name <input type=\"search\" id=\"search\" \
         placeholder=\"e.g. softmax\" autocomplete=\"off\" spellcheck=\"false\"></label>\n",
    );
    let mut group = |name: &str, legend: &str, options: &[(String, String, bool)]| {
        let _ = write!(html, "<fieldset data-filter=\"{name}\"><legend>{legend}</legend>");
        for (value, label, chip) in options {
            let chip = if *chip {
                format!("<span class=\"chip\" data-c=\"{}\"></span>", escape(value))
            } else {
                String::new()
            };
            let _ = write!(
                html,
                "<label><input type=\"checkbox\" name=\"{name}\" value=\"{}\" checked>{chip}{}</label>",
                escape(value),
                escape(label)
            );
        }
        html.push_str("</fieldset>\n");
    };
    let plain = |name: String| (name.clone(), name, false);
    let families: Vec<_> =
        data.distinct(|table| table.family.clone()).into_iter().map(plain).collect();
    group("family", "family", &families);
    let modes: Vec<_> = data.distinct(|table| table.mode);
    let modes = Mode::ALL.into_iter().filter(|mode| modes.contains(mode));
    group("mode", "mode", &modes.map(|mode| plain(mode.name().to_owned())).collect::<Vec<_>>());
    let metrics = data.distinct(|table| table.metric);
    let metrics = Metric::ALL.into_iter().filter(|metric| metrics.contains(metric));
    group("metric", "metric", &metrics.map(|m| plain(m.name().to_owned())).collect::<Vec<_>>());
    if !data.regimes().is_empty() {
        let regimes = data.regimes().iter().map(|alloc| plain(alloc.name().to_owned()));
        group("alloc", "outputs", &regimes.collect::<Vec<_>>());
    }
    let mut options: Vec<_> = providers
        .iter()
        .enumerate()
        .map(|(at, name)| (at.to_string(), name.clone(), true))
        .collect();
    options.push((LIMITS.to_owned(), "limits".to_owned(), true));
    group("provider", "provider (hides its line and column; ratios stay)", &options);
    html.push_str(
        "<p class=\"shown\"><output id=\"shown\"></output> \
         <button type=\"reset\">Show all</button></p>\n</form>\n\
         <noscript><p>Filters and the values under the pointer need JavaScript.</p></noscript>\n",
    );
}

/// What the filters look at.
fn attributes(table: &Table) -> String {
    format!(
        "data-family=\"{}\" data-mode=\"{}\" data-metric=\"{}\" data-alloc=\"{}\" data-name=\"{}\"",
        escape(&table.family),
        table.mode.name(),
        table.metric.name(),
        if table.both_regimes { table.alloc.name() } else { "" },
        escape(&format!("{} {}", table.id(), table.caption()).to_lowercase()),
    )
}

fn heat_map(html: &mut String, data: &RunData) {
    html.push_str(
        "<section aria-labelledby=\"heat\"><h2 id=\"heat\">Ours against the best peer</h2>\n\
         <p class=\"hint\">Best peer over ours, a column for each n. \
         <span class=\"key\"><span class=\"cell\" style=\"--loss:100\">¼</span>\
         <span class=\"cell\" style=\"--loss:50\">½</span><span class=\"cell\">1</span>\
         <span class=\"cell\" style=\"--win:50\">2</span>\
         <span class=\"cell\" style=\"--win:100\">4</span></span> \
         ✗: our result failed or is wrong. A row leads to its table.</p>\n",
    );
    html.push_str("<div class=\"heats\">\n");
    for metric in Metric::ALL {
        let groups = heat_groups(data, metric);
        if groups.is_empty() {
            continue;
        }
        let columns = groups.iter().map(|group| group.sizes.len()).max().unwrap_or(0);
        let _ = write!(
            html,
            "<div class=\"wide heat\" data-metric=\"{0}\" tabindex=\"0\" role=\"region\" \
             aria-label=\"Heat map, {0}\">\n<table><caption>{0}</caption>\n",
            metric.name()
        );
        for group in groups {
            // All groups are as wide as the widest, so that cells have one size.
            let rest = "<td></td>".repeat(columns - group.sizes.len());
            let family = escape(&group.tables[0].family);
            let _ = write!(html, "<tbody><tr class=\"family-row\"><th scope=\"col\">{family}</th>");
            for n in &group.sizes {
                let _ = write!(html, "<th scope=\"col\">{n}</th>");
            }
            let _ = writeln!(html, "{rest}</tr>");
            for table in group.tables {
                let regime = if table.both_regimes { table.alloc.name() } else { "" };
                let _ = write!(
                    html,
                    "<tr class=\"heat-row\" {}><th scope=\"row\"><a href=\"#{}\">{} \
                     <small>{} {regime}</small></a></th>",
                    attributes(table),
                    escape(&table.id()),
                    escape(&table.title),
                    table.mode.name(),
                );
                for n in &group.sizes {
                    heat_cell(html, table.rows.iter().find(|row| row.n == *n));
                }
                let _ = writeln!(html, "{rest}</tr>");
            }
            html.push_str("</tbody>\n");
        }
        html.push_str("</table></div>\n");
    }
    html.push_str("</div></section>\n");
}

/// Tables of a family that have sizes in common, under one row of sizes. (A grid's n is the length
/// of its side: among sequences, these would be columns of their own.)
struct HeatGroup<'a> {
    sizes: BTreeSet<usize>,
    tables: Vec<&'a Table>,
}

fn heat_groups(data: &RunData, metric: Metric) -> Vec<HeatGroup<'_>> {
    let mut groups: Vec<HeatGroup<'_>> = Vec::new();
    for table in data.tables.iter().filter(|table| table.metric == metric) {
        let sizes = || table.rows.iter().map(|row| row.n);
        let known = groups.iter_mut().find(|group| {
            group.tables[0].family == table.family && sizes().any(|n| group.sizes.contains(&n))
        });
        match known {
            Some(group) => {
                group.sizes.extend(sizes());
                group.tables.push(table);
            }
            None => groups.push(HeatGroup { sizes: sizes().collect(), tables: vec![table] }),
        }
    }
    groups
}

fn heat_cell(html: &mut String, row: Option<&Row>) {
    let Some(row) = row else {
        html.push_str("<td></td>");
        return;
    };
    match row.ratio() {
        Some(ratio) => {
            // From one fourth to four times; what is beyond has the same colour.
            let strength = (ratio.log2() / 2.0).clamp(-1.0, 1.0) * 100.0;
            let side = if strength < 0.0 { "loss" } else { "win" };
            let peer = row.best_peer().map_or("", |(name, _)| name);
            let _ = write!(
                html,
                "<td class=\"cell{}\" style=\"--{side}:{:.0}\" title=\"{} over {}\">{}</td>",
                if ratio < MATCH { " lost" } else { "" },
                strength.abs(),
                escape(peer),
                row.ours().map_or("", |(name, _)| name),
                times(ratio)
            );
        }
        None if row.ours().is_none() => {
            html.push_str("<td class=\"cell none\" title=\"no right result of ours\">✗</td>");
        }
        None => {
            html.push_str("<td class=\"cell none\" title=\"no peer has a right result\">–</td>")
        }
    }
}

/// A table with its chart. Returns what the script needs to know about them.
fn card(
    html: &mut String,
    table: &Table,
    providers: &[String],
) -> Result<serde_json::Value, Box<dyn Error>> {
    let chart = chart::draw(table, providers, false)?;
    let lines = chart::lines(table, providers);
    let id = escape(&table.id());
    let key = |name: &str| match providers.iter().position(|known| known == name) {
        Some(at) => at.to_string(),
        None => LIMITS.to_owned(),
    };
    let _ = write!(
        html,
        "<article class=\"card\" id=\"{id}\" tabindex=\"-1\" {}>\n\
         <h3>{}</h3><p class=\"name\">{id}</p>\n<ul class=\"legend\" aria-hidden=\"true\">",
        attributes(table),
        escape(&table.heading()),
    );
    for line in lines.iter().rev() {
        let key = key(&line.key);
        let _ = write!(
            html,
            "<li data-p=\"{key}\"><span class=\"chip{}\" data-c=\"{key}\"></span>{}</li>",
            if line.is_limit { " dashed" } else { "" },
            escape(&line.label)
        );
    }
    let description = escape(&chart::description(table));
    let svg =
        chart.svg.replacen("<svg ", &format!("<svg role=\"img\" aria-label=\"{description}\" "), 1);
    let _ = write!(
        html,
        "</ul>\n<div class=\"chart\" tabindex=\"0\" role=\"group\" \
         aria-label=\"Chart; arrow keys step through n\" data-table=\"{id}\" \
         data-left=\"{}\" data-right=\"{}\" data-top=\"{}\" data-bottom=\"{}\" data-scale=\"log\" \
         data-n-min=\"{}\" data-n-max=\"{}\" data-value-min=\"{}\" data-value-max=\"{}\">\n{svg}</div>\n",
        chart.across.start,
        chart.across.end,
        chart.down.start,
        chart.down.end,
        chart.n.start,
        chart.n.end,
        chart.value.start,
        chart.value.end,
    );
    one_table(html, table, &key);
    html.push_str("</article>\n");
    let series: Vec<_> = lines
        .iter()
        .rev()
        .map(|line| {
            let shown: Vec<_> = table
                .rows
                .iter()
                .zip(&line.values)
                .map(|(row, value)| match (value, row.cell(&line.key)) {
                    (Some(value), _) => format!("{} {}", digits(*value), table.unit()),
                    (None, Cell::Wrong(_, value)) => {
                        format!("{} {}, wrong", digits(value), table.unit())
                    }
                    (None, Cell::Failed(record)) => failure(record).to_owned(),
                    (None, _) => "–".to_owned(),
                })
                .collect();
            json!({
                "key": key(&line.key),
                "label": line.label,
                "values": line.values,
                "shown": shown,
            })
        })
        .collect();
    let sizes: Vec<_> = table.rows.iter().map(|row| row.n).collect();
    let ratios: Vec<_> = table.rows.iter().map(|row| row.ratio().map(times)).collect();
    Ok(json!({ "table": table.id(), "n": sizes, "series": series, "ratio": ratios }))
}

fn one_table(html: &mut String, table: &Table, key: &dyn Fn(&str) -> String) {
    let speed = table.metric == Metric::Speed;
    let (copy, least) = (table.has(COPY), table.rows.iter().any(|row| row.least().is_some()));
    let unit = table.unit();
    let _ = write!(
        html,
        "<div class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"Table, {0}\">\
         <table class=\"values\"><caption class=\"unseen\">{0}, {unit}</caption>\
         <thead><tr><th scope=\"col\">n</th>",
        escape(&table.caption())
    );
    for provider in &table.providers {
        let ours = if is_ours(provider) { " class=\"ours\"" } else { "" };
        // A long name may break behind an underscore.
        let name = escape(provider).replace('_', "_<wbr>");
        let _ = write!(html, "<th scope=\"col\" data-p=\"{}\"{ours}>{name}</th>", key(provider));
    }
    if copy {
        let _ = write!(html, "<th scope=\"col\" data-p=\"{LIMITS}\">copy limit</th>");
    }
    if least {
        let _ = write!(html, "<th scope=\"col\" data-p=\"{LIMITS}\">least possible</th>");
    }
    html.push_str("<th scope=\"col\" class=\"first-ratio\">best peer /&nbsp;ours</th>");
    if speed {
        html.push_str("<th scope=\"col\">of copy limit</th>");
    }
    if let Some(gpu) = table.gpu() {
        for peer in ["eager", "compiled"] {
            let _ = write!(
                html,
                "<th scope=\"col\" class=\"gpu\" title=\"published for a GPU ({gpu})\">{gpu} \
                 {peer} /&nbsp;fused</th>"
            );
        }
    }
    html.push_str("</tr></thead><tbody>\n");
    let mut notes: Vec<String> = Vec::new();
    for row in &table.rows {
        let _ = write!(html, "<tr><th scope=\"row\">{}</th>", row.n);
        for provider in &table.providers {
            value_cell(html, row.cell(provider), provider, &key(provider), &mut notes);
        }
        if copy {
            value_cell(html, row.cell(COPY), COPY, LIMITS, &mut notes);
        }
        if least {
            let least = or_dash(row.least().map(digits));
            let _ = write!(html, "<td data-p=\"{LIMITS}\">{least}</td>");
        }
        let lost = row.ratio().is_some_and(|ratio| ratio < MATCH);
        let _ = write!(
            html,
            "<td class=\"first-ratio{}\">{}</td>",
            if lost { " lost" } else { "" },
            or_dash(row.ratio().map(times))
        );
        if speed {
            let _ = write!(html, "<td>{}</td>", or_dash(row.of_copy_limit().map(percent)));
        }
        if table.gpu().is_some() {
            let published = row.published;
            for ratio in [
                published.and_then(|row| row.eager_over_fused()),
                published.and_then(|row| row.compiled_over_fused()),
            ] {
                let _ = write!(html, "<td class=\"gpu\">{}</td>", or_dash(ratio.map(times)));
            }
        }
        html.push_str("</tr>\n");
    }
    let _ = write!(html, "</tbody></table></div>\n<p class=\"hint\">{unit}, less is better</p>\n");
    if !notes.is_empty() {
        html.push_str("<details class=\"notes\"><summary>Notes</summary><ul>\n");
        for note in notes {
            let _ = writeln!(html, "<li>{}</li>", escape(&note));
        }
        html.push_str("</ul></details>\n");
    }
}

/// A value; its note is a tooltip, and stands in `notes` for those who have no pointer.
fn value_cell(
    html: &mut String,
    cell: Cell<'_>,
    provider: &str,
    key: &str,
    notes: &mut Vec<String>,
) {
    let title = match cell.note() {
        Some(note) => {
            let listed = format!("{provider}: {note}");
            if !notes.contains(&listed) {
                notes.push(listed);
            }
            format!(" title=\"{}\"", escape(note))
        }
        None => String::new(),
    };
    let (class, shown) = match cell {
        Cell::Absent => ("", "–".to_owned()),
        Cell::Right(_, value) if title.is_empty() => ("", digits(value)),
        Cell::Right(_, value) => ("noted", digits(value)),
        Cell::Wrong(_, value) => {
            ("wrong", format!("<s>{}</s><span class=\"unseen\"> wrong</span>", digits(value)))
        }
        Cell::Failed(record) => ("failed", failure(record).to_owned()),
    };
    let ours = if is_ours(provider) { " ours" } else { "" };
    let _ = write!(html, "<td data-p=\"{key}\" class=\"{class}{ours}\"{title}>{shown}</td>");
}
