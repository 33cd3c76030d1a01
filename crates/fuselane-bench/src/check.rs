//! `fuselane check`: how exact the operators are on this machine.

use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use fuselane::{DType, Isa};
use fuselane_check::{Effort, Operator, Outcome, Progress, Selection};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::gpu::{self, Gpu, On};

/// Compare the operators with the f64 reference, on each instruction set or on a GPU.
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
    /// Where operators run. A GPU needs a build with a runtime: one of the features wgpu, vulkan,
    /// metal, cuda, cuda-cpp and rocm.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: On,
    /// Only these instruction sets of the CPU (portable, avx2, avx512, avx512_wide).
    #[arg(long, value_delimiter = ',', value_parser = parse_isa)]
    isa: Vec<Isa>,
    /// How many combinations of options run: quick (a part that meets every value of every
    /// option), full, or a number N for one of N combinations (a prime above 20, such as 101)
    /// [default: quick].
    #[arg(long, value_parser = parse_effort)]
    effort: Option<Effort>,
    /// Run every combination of options, which takes some minutes: --effort full.
    #[arg(long, conflicts_with = "effort")]
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

fn parse_effort(text: &str) -> Result<Effort, String> {
    match (text, text.parse()) {
        ("quick", _) => Ok(Effort::Quick),
        ("full", _) => Ok(Effort::Full),
        (_, Ok(step @ 1..)) => Ok(Effort::Every(step)),
        _ => Err("expected quick, full or a number from 1".to_owned()),
    }
}

/// An outcome, as JSON has it.
#[derive(Debug, Serialize)]
struct Row<'a> {
    operator: &'static str,
    output: &'a str,
    dtype: &'static str,
    /// The instruction set, or the GPU's name.
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
    let selection = selection(args);
    let outcomes = match args.device {
        On::Cpu => check(|progress| fuselane_check::run(&selection, progress))?,
        On::Gpu => on_gpu(args, &selection)?,
    };
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
    if let Some(effort) = args.effort {
        selection.effort = effort;
    }
    if args.full {
        selection.effort = Effort::Full;
    }
    selection
}

/// The matrix on the GPU.
fn on_gpu(args: &Args, selection: &Selection) -> Result<Vec<Outcome>, Box<dyn Error>> {
    if !args.isa.is_empty() {
        return Err("--isa is for the CPU: not with --device gpu".into());
    }
    let gpu = gpu::find("check")?;
    if !args.json {
        let Gpu { name, runtime, software, .. } = &gpu;
        let kind = if *software { ", a software device" } else { "" };
        eprintln!("on {name}{kind}, through {runtime}");
    }
    matrix(selection)
}

#[cfg(feature = "gpu")]
fn matrix(selection: &Selection) -> Result<Vec<Outcome>, Box<dyn Error>> {
    let backend = fuselane_gpu::CheckBackend::new(gpu::open()?);
    check(|progress| fuselane_check::run_on(selection, &[&backend], progress))
}

#[cfg(not(feature = "gpu"))]
fn matrix(_selection: &Selection) -> Result<Vec<Outcome>, Box<dyn Error>> {
    Ok(Vec::new()) // there is no GPU without a runtime
}

/// Runs a matrix under a bar.
fn check(
    run: impl FnOnce(&mut dyn FnMut(Progress)) -> Vec<Outcome>,
) -> Result<Vec<Outcome>, Box<dyn Error>> {
    // Hidden by itself where stderr is not a terminal.
    let bar = ProgressBar::new(0)
        .with_style(ProgressStyle::with_template("checking {msg:<9} {wide_bar} {pos}/{len}")?);
    let outcomes = run(&mut |progress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(progress.operator.name());
    });
    bar.finish_and_clear();
    Ok(outcomes)
}

/// One line for each operator, dtype and backend, with the worst of its outputs.
fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::from("\n");
    let mut backends: Vec<&str> = Vec::new();
    for outcome in outcomes {
        if !backends.contains(&outcome.backend.as_str()) {
            backends.push(&outcome.backend);
        }
    }
    let cpu = backends.iter().all(|name| Isa::ALL.iter().any(|isa| isa.name() == *name));
    let wide = backends.iter().map(|name| name.len() + 2).max().unwrap_or(0).max(10);
    let heads = [
        "operator",
        "dtype",
        if cpu { "isa" } else { "device" },
        "output",
        "error",
        "bound",
        "compared",
        "inexact",
    ];
    let [operator, dtype, isa, output, error, bound, compared, inexact] = heads;
    let _ = writeln!(
        text,
        "{operator:<11}{dtype:<7}{isa:<wide$}{output:<20}{error:>10}{bound:>10}{compared:>12}{inexact:>11}"
    );
    for operator in Operator::ALL {
        for dtype in DType::ALL {
            for &isa in &backends {
                let of = |o: &&Outcome| {
                    (o.operator, o.dtype, o.backend.as_str()) == (operator, dtype, isa)
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
                    "{operator:<11}{dtype:<7}{isa:<wide$}{output:<20}{error:>10.4}{bound:>10.4}\
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
            ..Args::default()
        };
        let some = selection(&args);
        assert_eq!(some.operators, [Operator::Act, Operator::Cosine]);
        assert_eq!((some.dtypes, some.isas), (vec![DType::F16], vec![Isa::Portable]));
        assert_eq!(some.effort, Effort::Full);
    }

    #[test]
    fn a_gpu_has_no_instruction_sets() {
        let args = Args { device: On::Gpu, isa: vec![Isa::Portable], ..Args::default() };
        let error = on_gpu(&args, &Selection::default()).unwrap_err().to_string();
        assert!(error.contains("--isa is for the CPU"), "{error}");
    }

    #[cfg(not(feature = "gpu"))]
    #[test]
    fn a_gpu_needs_a_runtime() {
        let args = Args { device: On::Gpu, ..Args::default() };
        let error = on_gpu(&args, &Selection::default()).unwrap_err().to_string();
        assert!(error.contains("--features wgpu -- check --device gpu"), "{error}");
    }

    #[test]
    fn names() {
        assert_eq!(parse_dtype("bf16"), Ok(DType::BF16));
        assert!(parse_dtype("f8").unwrap_err().contains("bf16"));
        assert_eq!(parse_isa("portable"), Ok(Isa::Portable));
        assert_eq!(parse_effort("full"), Ok(Effort::Full));
        assert_eq!(parse_effort("101"), Ok(Effort::Every(101)));
        for text in ["0", "-1", "some"] {
            assert!(parse_effort(text).unwrap_err().contains("quick, full"), "{text}");
        }
        assert!(parse_isa("sse9").unwrap_err().contains("portable"));
    }
}
