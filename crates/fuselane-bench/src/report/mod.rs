//! `fuselane report`: what a run found, as a page, as pictures and as Markdown.

mod chart;
mod colour;
mod compare;
mod data;
mod facts;
pub(crate) mod file;
mod html;
mod markdown;
mod picture;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::case::Metric;
use data::RunData;

/// What the summary in the README stands between.
const BEGIN: &str = "<!-- bench:begin -->";
const END: &str = "<!-- bench:end -->";

/// Make a page, pictures and tables of a run of the benchmarks.
///
/// Writes index.html, tables.md, summary.md and the folder svg. With several runs, the report is
/// that of the last one, with a comparison of the last against the first (comparison.md).
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folders of runs.
    #[arg(required = true, value_name = "DIR")]
    runs: Vec<PathBuf>,
    /// Where to write; the last run's folder if not given.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Also put the summary into ./README.md, and its picture into docs/benchmarks.
    #[arg(long)]
    readme: bool,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let runs = args.runs.iter().map(|folder| RunData::load(folder));
    let runs: Vec<RunData> = runs.collect::<Result<_, _>>()?;
    let last = &runs[runs.len() - 1];
    let out = args.out.as_deref().unwrap_or(&last.folder);
    // A README without markers is found before anything is written.
    let readme = Path::new("README.md");
    let readme_text = if args.readme { Some(read_readme(readme)?) } else { None };
    let page = write_report(&runs, out)?;
    if let Some(text) = readme_text {
        let pictures = Path::new("docs/benchmarks");
        write_readme(readme, &text, last, pictures)?;
    }
    // A reader that closes the pipe has seen enough.
    let _ = writeln!(anstream::stdout(), "{}", page.display());
    Ok(ExitCode::SUCCESS)
}

/// Writes the report of a run into its folder, and returns the page's path.
pub(crate) fn write(folder: &Path) -> Result<PathBuf, String> {
    write_report(&[RunData::load(folder)?], folder)
}

/// How the run whose folder this is came out, in a few lines.
pub(crate) fn brief(folder: &Path) -> Result<String, String> {
    let data = RunData::load(folder)?;
    let mut text = String::new();
    for metric in Metric::ALL {
        let Some(summary) = data.summary(|table| table.metric == metric) else {
            text += &without_peers(&data, metric);
            continue;
        };
        let mean = summary.mean.map_or("-".to_owned(), data::times);
        text += &format!(
            "{}: ours matches or beats the best peer in {} of {} rows; geometric mean {mean}x",
            metric.name(),
            summary.won,
            summary.rows,
        );
        if let Some(share) = summary.of_copy_limit {
            text += &format!("; {} of the copy limit (median)", data::percent(share));
        }
        text.push('\n');
    }
    Ok(text)
}

/// What there is to say of rows that have no peer: a share of the copy limit.
fn without_peers(data: &RunData, metric: Metric) -> String {
    let tables = data.tables.iter().filter(|table| table.metric == metric);
    let mut shares: Vec<f64> = tables.flat_map(|table| table.copy_shares()).collect();
    shares.sort_by(f64::total_cmp);
    data::median(&shares).map_or(String::new(), |share| {
        let (metric, rows) = (metric.name(), shares.len());
        format!("{metric}: {} of the copy limit (median of {rows} rows)\n", data::percent(share))
    })
}

/// The report of the last run, compared with the first if there are several.
fn write_report(runs: &[RunData], out: &Path) -> Result<PathBuf, String> {
    let (first, last) = (&runs[0], &runs[runs.len() - 1]);
    let comparison = (runs.len() > 1).then(|| (first, compare::compare(first, last)));
    let drawn = |what: String| move |error| format!("cannot draw {what}: {error}");

    let svg = out.join("svg");
    file::folder(&svg)?;
    let providers = last.providers();
    for table in &last.tables {
        let chart = chart::draw(table, &providers, true).map_err(drawn(table.id()))?;
        file::write(&svg.join(format!("{}.svg", table.id())), &chart.svg)?;
    }
    if let Some(picture) = picture::draw(last).map_err(drawn("the summary".to_owned()))? {
        file::write(&svg.join("summary.svg"), &picture)?;
    }
    file::write(&out.join("tables.md"), &markdown::tables(last))?;
    let summary = format!("# Benchmark summary\n\n{}", markdown::summary(last));
    file::write(&out.join("summary.md"), &summary)?;
    if let Some((first, comparison)) = &comparison {
        let text = markdown::comparison(first, last, comparison);
        file::write(&out.join("comparison.md"), &text)?;
    }
    let page = html::page(last, comparison.as_ref().map(|(old, changes)| (*old, changes)))
        .map_err(drawn("the page's charts".to_owned()))?;
    // Last: who sees the page has all of it.
    let path = out.join("index.html");
    file::write(&path, &page)?;
    Ok(path)
}

fn read_readme(path: &Path) -> Result<String, String> {
    let text = fs::read_to_string(path).map_err(|error| {
        format!("{}: {error}; call this in the folder of the README", path.display())
    })?;
    replace_block(&text, "").map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(text)
}

fn write_readme(path: &Path, text: &str, data: &RunData, pictures: &Path) -> Result<(), String> {
    let picture =
        picture::draw(data).map_err(|error| format!("cannot draw the summary: {error}"))?;
    if let Some(picture) = picture {
        file::folder(pictures)?;
        file::write(&pictures.join("summary.svg"), &picture)?;
    }
    file::write(path, &replace_block(text, &markdown::summary(data))?)
}

/// The text with what is between the markers replaced.
fn replace_block(text: &str, block: &str) -> Result<String, String> {
    let missing = || format!("no block between {BEGIN} and {END}; add these two lines");
    let begin = text.find(BEGIN).ok_or_else(missing)? + BEGIN.len();
    let end = begin + text[begin..].find(END).ok_or_else(missing)?;
    Ok(format!("{}\n{}\n{}", &text[..begin], block.trim_end(), &text[end..]))
}
