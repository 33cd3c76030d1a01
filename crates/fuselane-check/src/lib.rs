//! Every combination of options of every operator, against [`fuselane::reference`].
//!
//! Each operator has one file with the matrix of its options in nested loops, the run of one case,
//! and its [`Bound`]s. A case draws inputs, rounds them to the dtype so that the reference sees the
//! same numbers, runs forward and backward into memory that is poisoned with NaN inside and
//! guarded around it, and compares every element of every output.
//!
//! **What is promised of an element**, and measured here, is
//!
//! ```text
//! |got - truth| <= 1/2 ulp of the output + K ulp of the arithmetic
//! ```
//!
//! The first term is the rounding at the store, in the output's dtype, at the truth. The second
//! is the error of the arithmetic, in f32 (f64 for f64 activations), at the sum of the absolute
//! terms that the result is a sum of: where terms cancel, no arithmetic of that type could do
//! better. K is the number that [`Bound`] states for each output.
//!
//! A run goes over the instruction sets of this CPU ([`run`]), or over any [`Backend`]s
//! ([`run_on`]): whoever can run the operators' calls can be checked.
//!
//! ```
//! use fuselane::DType;
//! use fuselane_check::{Operator, Selection, run};
//!
//! let selection = Selection {
//!     operators: vec![Operator::Cosine],
//!     dtypes: vec![DType::BF16],
//!     ..Selection::default()
//! };
//! let outcomes = run(&selection, &mut |_| {});
//! assert!(outcomes.iter().all(|outcome| outcome.ok()));
//! ```

pub mod act;
mod backend;
mod bounds;
pub mod cosine;
mod encoding;
pub mod normalize;
mod outcome;
pub mod rotate;
pub mod softmax;
mod tensor;

use std::fmt;
use std::str::FromStr;

use fuselane::{DType, Isa};
use rayon::prelude::*;

use backend::Runner;
pub use backend::{Backend, Cpu};
pub use bounds::Bound;
use outcome::Outcomes;
pub use outcome::{Outcome, table};

/// An operator with a matrix of cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operator {
    /// Elementwise activations.
    Act,
    /// Softmax and its logarithm.
    Softmax,
    /// Normalization.
    Normalize,
    /// Rotary encoding.
    Rotate,
    /// Cosine encoding.
    Cosine,
}

impl Operator {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 5] =
        [Self::Act, Self::Softmax, Self::Normalize, Self::Rotate, Self::Cosine];

    /// The name used in the documentation and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Act => "act",
            Self::Softmax => "softmax",
            Self::Normalize => "normalize",
            Self::Rotate => "rotate",
            Self::Cosine => "cosine",
        }
    }

    fn cases(self, effort: Effort) -> Vec<Box<dyn Case>> {
        match self {
            Self::Act => act::cases(effort),
            Self::Softmax => effort.thin(softmax::cases()),
            Self::Normalize => effort.thin(normalize::cases()),
            Self::Rotate => effort.thin(rotate::cases()),
            Self::Cosine => effort.thin(cosine::cases()),
        }
    }
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Operator {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|operator| operator.name() == name);
        named.ok_or_else(|| format!("expected one of {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// How much of the matrix runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Effort {
    /// A part that meets every value of every option, for a check of a machine in seconds.
    #[default]
    Quick,
    /// One of so many cases of each operator, for backends that take long. Cases are the innermost
    /// of nested loops over the options, so a step that shares a factor with the number of values of
    /// an option (those have the factors 2, 3, 5, 7, 11, 13 and 19) meets only some of them: take a
    /// prime above 20, such as 23, 101 or 499. The larger it is, the fewer combinations of values are
    /// met. [`Effort::Quick`] is 23; 1 is [`Effort::Full`], and so is 0. Of `act` all functions
    /// run with any step.
    Every(usize),
    /// All of it.
    Full,
}

impl Effort {
    /// Every how many cases one runs with [`Effort::Quick`]. A prime above the number of values
    /// of any option, so that the cases that run meet all values of all options.
    const STEP: usize = 23;

    /// Every how many cases one runs.
    fn step(self) -> usize {
        match self {
            Self::Quick => Self::STEP,
            Self::Every(step) => step.max(1),
            Self::Full => 1,
        }
    }

    fn thin(self, cases: Vec<Box<dyn Case>>) -> Vec<Box<dyn Case>> {
        cases.into_iter().step_by(self.step()).collect()
    }
}

/// What to run; by default all operators, all dtypes and all instruction sets of this CPU, quickly.
#[derive(Debug, Clone)]
pub struct Selection {
    /// The operators.
    pub operators: Vec<Operator>,
    /// The dtypes of the activations. Those of parameters change from case to case.
    pub dtypes: Vec<DType>,
    /// The instruction sets that [`run`] goes over; those that this CPU lacks are passed over.
    /// [`run_on`] takes backends instead.
    pub isas: Vec<Isa>,
    /// How much of the matrix runs.
    pub effort: Effort,
}

impl Default for Selection {
    fn default() -> Self {
        Self {
            operators: Operator::ALL.to_vec(),
            dtypes: DType::ALL.to_vec(),
            isas: Isa::available().collect(),
            effort: Effort::default(),
        }
    }
}

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The operator at work.
    pub operator: Operator,
    /// Cases that ran, each for one dtype.
    pub done: usize,
    /// Cases in all.
    pub total: usize,
}

/// One combination of options. Its `Display` names them, as in `rotate act=silu pairing=half`.
trait Case: fmt::Display + Send + Sync {
    /// The dtypes of the parameters and their gradients.
    fn parameter_dtypes(&self) -> Vec<DType>;

    /// Draws the inputs, runs on each backend and records what came out.
    fn run(&self, dtype: DType, runners: &[Runner<'_>], outcomes: &mut Outcomes);
}

/// Runs the selected cases on the selected instruction sets, on the current rayon pool. There is one
/// outcome for each operator, output, dtype and instruction set, in this order; `progress` is called
/// from time to time.
pub fn run(selection: &Selection, progress: &mut dyn FnMut(Progress)) -> Vec<Outcome> {
    let isas = selection.isas.iter().copied().filter(|isa| isa.is_available());
    let cpus: Vec<Cpu> = isas.map(Cpu).collect();
    let backends: Vec<&dyn Backend> = cpus.iter().map(|cpu| cpu as &dyn Backend).collect();
    run_on(selection, &backends, progress)
}

/// [`run`] for any backends, whatever instruction sets are selected. A backend leaves out the cases
/// with a dtype that it does not support; it has no outcome where that leaves none.
pub fn run_on(
    selection: &Selection,
    backends: &[&dyn Backend],
    progress: &mut dyn FnMut(Progress),
) -> Vec<Outcome> {
    let matrices: Vec<(Operator, Vec<Box<dyn Case>>)> =
        selection.operators.iter().map(|&o| (o, o.cases(selection.effort))).collect();
    let total = matrices.iter().map(|(_, cases)| cases.len() * selection.dtypes.len()).sum();
    let (mut done, mut outcomes) = (0, Vec::new());
    for (operator, cases) in &matrices {
        let mut of_operator = Outcomes::new(*operator);
        let jobs: Vec<_> = cases
            .iter()
            .flat_map(|case| selection.dtypes.iter().map(move |d| (case, *d)))
            .collect();
        for chunk in jobs.chunks(256) {
            progress(Progress { operator: *operator, done, total });
            let of_chunk = chunk
                .par_iter()
                .fold(
                    || Outcomes::new(*operator),
                    |mut outcomes, (case, dtype)| {
                        let runners = suited(backends, &***case, *dtype);
                        if !runners.is_empty() {
                            case.run(*dtype, &runners, &mut outcomes);
                        }
                        outcomes
                    },
                )
                .reduce(|| Outcomes::new(*operator), Outcomes::merged);
            of_operator = of_operator.merged(of_chunk);
            done += chunk.len();
        }
        outcomes.extend(of_operator.into_vec());
    }
    outcomes
}

/// The backends that have all dtypes of a case.
fn suited<'a>(backends: &[&'a dyn Backend], case: &dyn Case, dtype: DType) -> Vec<Runner<'a>> {
    let mut dtypes = case.parameter_dtypes();
    dtypes.push(dtype);
    let runners = backends.iter().enumerate();
    runners
        .map(|(index, &backend)| Runner { index, backend })
        .filter(|runner| dtypes.iter().all(|&dtype| runner.backend.supports(dtype)))
        .collect()
}
