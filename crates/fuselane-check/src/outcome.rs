//! What came out, measured against what was promised.

use std::collections::BTreeMap;
use std::fmt;

use fuselane::reference::ulp;
use fuselane::{DType, Result};

use crate::backend::Runner;
use crate::tensor::Tensor;
use crate::{Bound, Operator};

/// The worst of all elements of one output, for one dtype and backend: the one with the
/// largest error of the arithmetic, relative to its bound.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The operator.
    pub operator: Operator,
    /// `o`, `dx`, ...
    pub output: &'static str,
    /// The dtype of the activations.
    pub dtype: DType,
    /// The name of the backend: of the instruction set, on this CPU.
    pub backend: String,
    /// The options of the case that the worst element is in.
    pub case: String,
    /// Its index.
    pub at: usize,
    /// Its error, in ulp of the output (of the arithmetic at the sum of the absolute terms, where
    /// that is larger).
    pub worst: f64,
    /// What is promised of it, in the same unit.
    pub bound: f64,
    /// The K that it needs, which is negative where it is closer than half an ulp.
    pub needed: f64,
    /// The K that is promised.
    pub k: f64,
    /// Elements compared.
    pub compared: usize,
    /// Elements that are not the correctly rounded truth.
    pub inexact: usize,
    /// Elements beyond their bound.
    pub broken: usize,
    /// What else was wrong with a case: a call that was refused, a write beyond the output.
    pub fault: Option<String>,
}

impl Outcome {
    /// Whether all elements are within their bounds, and nothing else was wrong.
    pub fn ok(&self) -> bool {
        self.broken == 0 && self.fault.is_none()
    }

    /// How much of K the worst element needs: above 1 is broken. (Where K is 0, above 0 is.)
    pub fn used(&self) -> f64 {
        used(self.needed, self.k)
    }
}

/// One line that says how the worst element stands to its bound.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operator, output, dtype, backend, case, at, worst, bound, .. } = self;
        write!(f, "{operator} {output}[{at}] {dtype} {backend}: ")?;
        write!(f, "{worst:.4} ulp, promised {bound:.4} (K = {:.3} of {}), ", self.needed, self.k)?;
        write!(f, "in {case}")?;
        if self.broken > 0 {
            write!(f, "; {} of {} elements are broken", self.broken, self.compared)?;
        }
        self.fault.as_ref().map_or(Ok(()), |fault| write!(f, "; {fault}"))
    }
}

/// Outcomes as a table: a line of column names, then a line for each.
///
/// ```
/// assert!(fuselane_check::table(&[]).starts_with("operator  output"));
/// ```
pub fn table(outcomes: &[Outcome]) -> String {
    let line = |names: [&str; 4], numbers: [String; 6], case: &str| {
        let [operator, output, dtype, backend] = names;
        let [ulp, bound, needed, k, compared, inexact] = numbers;
        format!(
            "{operator:9} {output:26} {dtype:5} {backend:9} {ulp:>9} {bound:>9} {needed:>9} \
             {k:>6} {compared:>11} {inexact:>10}  {case}\n"
        )
    };
    let numbers = ["ulp", "bound", "needed", "K", "compared", "inexact"].map(str::to_owned);
    let mut text = line(["operator", "output", "dtype", "backend"], numbers, "case");
    for outcome in outcomes {
        let Outcome { operator, output, dtype, backend, worst, bound, needed, k, .. } = outcome;
        let [worst, bound] = [worst, bound].map(|ulp| format!("{ulp:.4}"));
        let counts = [outcome.compared, outcome.inexact].map(|count| count.to_string());
        let [compared, inexact] = counts;
        let numbers = [worst, bound, format!("{needed:.3}"), k.to_string(), compared, inexact];
        text += &line([operator.name(), output, dtype.name(), backend], numbers, &outcome.case);
    }
    text
}

/// The outcomes of one operator.
pub(crate) struct Outcomes {
    operator: Operator,
    /// By output, dtype and backend.
    worst: BTreeMap<(&'static str, usize, usize), Outcome>,
}

/// One call: what is known of it when its outputs are compared.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) case: &'a dyn fmt::Display,
    pub(crate) bounds: &'a [Bound],
    pub(crate) dtype: DType,
    pub(crate) runner: Runner<'a>,
}

/// What an output should be.
#[derive(Clone, Copy)]
pub(crate) struct Expected<'a> {
    pub(crate) truth: &'a [f64],
    /// The sum of the absolute terms of each element.
    pub(crate) magnitude: &'a [f64],
}

impl Outcomes {
    pub(crate) fn new(operator: Operator) -> Self {
        Self { operator, worst: BTreeMap::new() }
    }

    /// Compares the elements `values` of an output whose memory is `tensor`: its own, or the same
    /// in another order of dimensions.
    pub(crate) fn compare_values(
        &mut self,
        call: Call<'_>,
        output: &'static str,
        tensor: &Tensor,
        values: &[f64],
        expected: Expected<'_>,
    ) {
        let Expected { truth, magnitude } = expected;
        assert!(values.len() == truth.len() && values.len() == magnitude.len(), "{}", call.case);
        if !tensor.is_intact() {
            self.fault(call, output, "memory beyond the output was written to");
        }
        let bound = call.bounds.iter().find(|bound| bound.output == output);
        let k = bound.unwrap_or_else(|| panic!("{output} has no bound")).k(call.dtype);
        let outcome = self.outcome(call, output);
        outcome.compared += values.len();
        for (at, ((&got, &truth), &magnitude)) in
            values.iter().zip(truth).zip(magnitude).enumerate()
        {
            let exact = ulp::round(tensor.dtype(), truth);
            outcome.inexact += usize::from(got != exact && !(got.is_nan() && exact.is_nan()));
            let error = Error::new(tensor.dtype(), call.dtype, got, truth, magnitude);
            let needed = error.needed();
            outcome.broken += usize::from(needed > k);
            if used(needed, k) > outcome.used() {
                outcome.case = call.case.to_string();
                (outcome.at, outcome.needed, outcome.k) = (at, needed, k);
                (outcome.worst, outcome.bound) = error.in_ulp(k);
            }
        }
    }

    /// Compares an output.
    pub(crate) fn compare(
        &mut self,
        call: Call<'_>,
        output: &'static str,
        tensor: &Tensor,
        expected: Expected<'_>,
    ) {
        self.compare_values(call, output, tensor, &tensor.values(), expected);
    }

    /// Runs a case on each backend. An error is a fault of `output`.
    pub(crate) fn run(
        &mut self,
        (case, bounds, dtype): (&dyn fmt::Display, &[Bound], DType),
        output: &'static str,
        runners: &[Runner<'_>],
        mut run: impl FnMut(&mut Self, Call<'_>) -> Result<()>,
    ) {
        for &runner in runners {
            let call = Call { case, bounds, dtype, runner };
            if let Err(error) = run(self, call) {
                self.fault(call, output, &error.to_string());
            }
        }
    }

    /// Records that a call did something that no element shows.
    pub(crate) fn fault(&mut self, call: Call<'_>, output: &'static str, what: &str) {
        let fault = format!("{what} ({})", call.case);
        self.outcome(call, output).fault.get_or_insert(fault);
    }

    fn outcome(&mut self, call: Call<'_>, output: &'static str) -> &mut Outcome {
        let key = (output, call.dtype as usize, call.runner.index);
        self.worst.entry(key).or_insert_with(|| Outcome {
            operator: self.operator,
            output,
            dtype: call.dtype,
            backend: call.runner.backend.name().into(),
            case: call.case.to_string(),
            at: 0,
            worst: 0.0,
            bound: 0.5,
            needed: f64::NEG_INFINITY,
            k: 0.0,
            compared: 0,
            inexact: 0,
            broken: 0,
            fault: None,
        })
    }

    pub(crate) fn merged(mut self, other: Self) -> Self {
        for (key, theirs) in other.worst {
            let Some(ours) = self.worst.get_mut(&key) else {
                self.worst.insert(key, theirs);
                continue;
            };
            let mut sum = if theirs.used() > ours.used() { theirs.clone() } else { ours.clone() };
            sum.compared = ours.compared + theirs.compared;
            sum.inexact = ours.inexact + theirs.inexact;
            sum.broken = ours.broken + theirs.broken;
            sum.fault = ours.fault.take().or(theirs.fault);
            *ours = sum;
        }
        self
    }

    /// In the order of outputs, dtypes and backends.
    pub(crate) fn into_vec(self) -> Vec<Outcome> {
        self.worst.into_values().collect()
    }
}

fn used(needed: f64, k: f64) -> f64 {
    if k > 0.0 { needed / k } else { needed }
}

/// The error of one element.
struct Error {
    /// |got - truth|.
    distance: f64,
    /// The ulp of the output at the truth.
    output: f64,
    /// The ulp of the arithmetic at the magnitude.
    arithmetic: f64,
}

impl Error {
    fn new(output: DType, activations: DType, got: f64, truth: f64, magnitude: f64) -> Self {
        // A truth or a magnitude that is not a number has no ulp; what comes is right or wrong.
        let or_one = |ulp: f64| if ulp.is_nan() { 1.0 } else { ulp };
        let unit = or_one(ulp::ulp(output, truth));
        let distance = match got.is_finite() && truth.is_finite() {
            true => (got - truth).abs(),
            false => ulp::error(output, got, truth) * unit,
        };
        Self { distance, output: unit, arithmetic: or_one(ulp::ulp(activations.real(), magnitude)) }
    }

    /// The least K that would allow it.
    fn needed(&self) -> f64 {
        (self.distance - 0.5 * self.output) / self.arithmetic
    }

    /// The error and the bound for a K, in ulp of the output or of the arithmetic, whichever is
    /// larger.
    fn in_ulp(&self, k: f64) -> (f64, f64) {
        let unit = self.output.max(self.arithmetic);
        (self.distance / unit, (0.5 * self.output + k * self.arithmetic) / unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cpu;
    use fuselane::Isa;

    const BOUNDS: [Bound; 1] = [Bound { output: "o", f32: 2.0, f16: 2.0, bf16: 2.0, f64: 2.0 }];

    fn outcome(dtype: DType, got: f64, truth: f64, magnitude: f64) -> Outcome {
        let runner = Runner { index: 0, backend: &Cpu(Isa::Portable) };
        let call = Call { case: &"test", bounds: &BOUNDS, dtype, runner };
        let tensor = Tensor::rounded(dtype, &[got], &[1]);
        let mut outcomes = Outcomes::new(Operator::Act);
        outcomes.compare(call, "o", &tensor, Expected { truth: &[truth], magnitude: &[magnitude] });
        outcomes.into_vec().remove(0)
    }

    #[test]
    fn bounds_have_two_terms() {
        let f32_ulp = f64::from(f32::EPSILON);
        assert!(outcome(DType::F32, 1.0, 1.0 + 2.5 * f32_ulp, 1.0).ok());
        assert!(!outcome(DType::F32, 1.0, 1.0 + 2.6 * f32_ulp, 1.0).ok());
        assert!(outcome(DType::F32, 1.0, 1.0 + 4.5 * f32_ulp, 2.0).ok());
        assert!(!outcome(DType::F32, 1.0, 1.0 + 4.6 * f32_ulp, 2.0).ok());
        // In bf16 the same arithmetic has to give all but the correctly rounded value.
        let bf16_ulp = 1.0 / 128.0;
        assert!(outcome(DType::BF16, 1.0, 1.0 + 0.5 * bf16_ulp + 2.0 * f32_ulp, 1.0).ok());
        assert!(!outcome(DType::BF16, 1.0, 1.0 + 0.5 * bf16_ulp + 2.1 * f32_ulp, 1.0).ok());
    }

    #[test]
    fn special_values() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        assert!(outcome(DType::F16, nan, nan, nan).ok());
        assert!(!outcome(DType::F16, nan, 1.0, 1.0).ok());
        assert!(!outcome(DType::F16, 1.0, nan, nan).ok());
        assert!(outcome(DType::F16, -inf, -inf, inf).ok());
        assert!(!outcome(DType::F16, 60000.0, inf, inf).ok());
        assert!(!outcome(DType::F32, nan, inf, nan).ok());
        // Where terms of size 1 cancel to 0, what the arithmetic leaves of them is no fault.
        assert!(outcome(DType::F64, 1e-16, 0.0, 1.0).ok());
        assert!(!outcome(DType::F64, 1e-15, 0.0, 1.0).ok());
    }

    #[test]
    fn outcomes_keep_the_worst() {
        let near = outcome(DType::F32, 1.0, 1.0 + f64::from(f32::EPSILON), 1.0);
        assert_eq!((near.compared, near.inexact, near.broken), (1, 1, 0));
        assert_eq!((near.worst, near.bound), (1.0, 2.5));
        let outcomes = |of: Outcome| Outcomes {
            operator: Operator::Act,
            worst: [(("o", 0, 0), of)].into_iter().collect(),
        };
        let far = outcome(DType::F32, 1.0, 2.0, 2.0);
        let both = outcomes(near.clone()).merged(outcomes(far)).into_vec().remove(0);
        assert_eq!((both.compared, both.inexact, both.broken), (2, 2, 1));
        assert!(!both.ok() && both.needed > 1000.0);
        assert!(both.to_string().contains("1 of 2 elements"), "{both}");
    }
}
