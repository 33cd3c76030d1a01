//! `fuselane check`: how exact the operators are on this machine.

use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use fuselane::{DType, Isa};
use fuselane_check::{Effort, Operator, Outcome, Selection};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Compare the operators with the f64 reference, on each instruction set.
///
/// An error is in ulp: units of the last place of the output, or of the arithmetic (f32; f64 for
/// f64) at the sum of the absolute terms of a result, where that is larger. The table shows, of all
/// elements, the one that comes closest to its bound. Exits with 1 if one is beyond it.
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Only these operators (act, softmax, normalize, rotate, cosine).
    #[arg(long, value_delimiter = ',')]
    operator: Vec<Operator>,
    /// Only these dtypes of activations (f32, f16, bf16, f64).
    #[arg(long, value_delimiter = ',', value_parser = parse_dtype)]
    dtype: Vec<DType>,
    /// Only these instruction sets (portable, avx2).
    #[arg(long, value_delimiter = ',', value_parser = parse_isa)]
    isa: Vec<Isa>,
    /// Run every combination of options, which takes some minutes, rather than a part of them.
    #[arg(long)]
    full: bool,
    /// Print JSON, with a row for each output of each operator.
    #[arg(long)]
    json: bool,
}

fn parse_dtype(name: &str) -> Result<DType, String> {
    let named = DType::ALL.into_iter().find(|dtype| dtype.name() == name);
    named.ok_or_else(|| format!("expected one of {}", DType::ALL.map(DType::name).join(", ")))
}

fn parse_isa(name: &str) -> Result<Isa, String> {
    let isa: Isa = name.parse().map_err(|error: fuselane::Error| error.to_string())?;
    if !isa.is_available() {
        return Err(format!("this CPU lacks {isa}"));
    }
    Ok(isa)
}

/// An outcome, as JSON has it.
#[derive(Debug, Serialize)]
struct Row<'a> {
    operator: &'static str,
    output: &'a str,
    dtype: &'static str,
    isa: &'a str,
    ok: bool,
    /// The error of the worst element and its bound.
    error_ulp: f64,
    bound_ulp: f64,
    /// The K that it needs and the K that is promised.
    needed_k: f64,
    promised_k: f64,
    at: usize,
    case: &'a str,
    compared: usize,
    inexact: usize,
    broken: usize,
    fault: Option<&'a str>,
}

impl<'a> From<&'a Outcome> for Row<'a> {
    fn from(outcome: &'a Outcome) -> Self {
        Self {
            operator: outcome.operator.name(),
            output: outcome.output,
            dtype: outcome.dtype.name(),
            isa: &outcome.backend,
            ok: outcome.ok(),
            error_ulp: outcome.worst,
            bound_ulp: outcome.bound,
            needed_k: outcome.needed,
            promised_k: outcome.k,
            at: outcome.at,
            case: &outcome.case,
            compared: outcome.compared,
            inexact: outcome.inexact,
            broken: outcome.broken,
            fault: outcome.fault.as_deref(),
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let outcomes = check(&selection(args))?;
    let text = match args.json {
        true => {
            let rows: Vec<Row<'_>> = outcomes.iter().map(Row::from).collect();
            serde_json::to_string_pretty(&rows)? + "\n"
        }
        false => table(&outcomes),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    let mut code = ExitCode::SUCCESS;
    for outcome in outcomes.iter().filter(|outcome| !outcome.ok()) {
        eprintln!("fuselane: beyond its bound: {outcome}");
        code = ExitCode::FAILURE;
    }
    Ok(code)
}

/// All of what the command line does not restrict.
fn selection(args: &Args) -> Selection {
    let mut selection = Selection::default();
    if !args.operator.is_empty() {
        selection.operators.retain(|operator| args.operator.contains(operator));
    }
    if !args.dtype.is_empty() {
        selection.dtypes.retain(|dtype| args.dtype.contains(dtype));
    }
    if !args.isa.is_empty() {
        selection.isas.retain(|isa| args.isa.contains(isa));
    }
    if args.full {
        selection.effort = Effort::Full;
    }
    selection
}

fn check(selection: &Selection) -> Result<Vec<Outcome>, Box<dyn Error>> {
    // Hidden by itself where stderr is not a terminal.
    let bar = ProgressBar::new(0)
        .with_style(ProgressStyle::with_template("checking {msg:<9} {wide_bar} {pos}/{len}")?);
    let outcomes = fuselane_check::run(selection, &mut |progress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(progress.operator.name());
    });
    bar.finish_and_clear();
    Ok(outcomes)
}

/// One line for each operator, dtype and instruction set, with the worst of its outputs.
fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::from("\n");
    let heads = ["operator", "dtype", "isa", "output", "error", "bound", "compared", "inexact"];
    let [operator, dtype, isa, output, error, bound, compared, inexact] = heads;
    let _ = writeln!(
        text,
        "{operator:<11}{dtype:<7}{isa:<10}{output:<20}{error:>10}{bound:>10}{compared:>12}{inexact:>11}"
    );
    for operator in Operator::ALL {
        for dtype in DType::ALL {
            for isa in Isa::ALL {
                let of = |o: &&Outcome| {
                    (o.operator, o.dtype, o.backend.as_str()) == (operator, dtype, isa.name())
                };
                let of: Vec<&Outcome> = outcomes.iter().filter(of).collect();
                let by_use = |a: &&&Outcome, b: &&&Outcome| a.used().total_cmp(&b.used());
                let Some(worst) = of.iter().max_by(by_use) else { continue };
                let compared: usize = of.iter().map(|outcome| outcome.compared).sum();
                let inexact: usize = of.iter().map(|outcome| outcome.inexact).sum();
                let broken = if of.iter().all(|outcome| outcome.ok()) { "" } else { "  broken" };
                let Outcome { output, worst: error, bound, .. } = worst;
                let _ = writeln!(
                    text,
                    "{operator:<11}{dtype:<7}{isa:<10}{output:<20}{error:>10.4}{bound:>10.4}\
                     {compared:>12}{inexact:>11}{broken}"
                );
            }
        }
    }
    text.push_str("(error and bound in ulp, of the element that comes closest to its bound)\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_restrict() {
        let all = selection(&Args::default());
        assert_eq!((all.operators.len(), all.dtypes.len()), (Operator::ALL.len(), 4));
        assert_eq!(all.effort, Effort::Quick);
        let args = Args {
            operator: vec![Operator::Cosine, Operator::Act],
            dtype: vec![DType::F16],
            isa: vec![Isa::Portable],
            full: true,
            json: false,
        };
        let some = selection(&args);
        assert_eq!(some.operators, [Operator::Act, Operator::Cosine]);
        assert_eq!((some.dtypes, some.isas), (vec![DType::F16], vec![Isa::Portable]));
        assert_eq!(some.effort, Effort::Full);
    }

    #[test]
    fn names() {
        assert_eq!(parse_dtype("bf16"), Ok(DType::BF16));
        assert!(parse_dtype("f8").unwrap_err().contains("bf16"));
        assert_eq!(parse_isa("portable"), Ok(Isa::Portable));
        assert!(parse_isa("sse9").unwrap_err().contains("portable"));
    }
}
