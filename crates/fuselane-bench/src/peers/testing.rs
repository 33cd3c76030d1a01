//! What tests of providers share: small jobs with their inputs in files, the truth, and how far
//! from it a provider is.

use std::collections::BTreeMap;
use std::fs;

use fuselane::reference::{self, Random, ulp};
use fuselane::{DType, Element, Softmax};
use half::{bf16, f16};
use tempfile::TempDir;

use crate::case::{self, Case, Dtype, Mode, Operator};
use crate::protocol::{Alloc, Input, Job, Sample};
use crate::worker::{Fault, Library};

pub(super) const DTYPES: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

/// Small cases of every operator with its options.
pub(super) fn cases() -> Vec<Case> {
    let acts = "relu sigmoid silu none tanh".split(' ').map(|act| format!("'act', act = '{act}'"));
    let softmaxes = [-1, -2].map(|dim| format!("'softmax', dim = {dim}"));
    let norms = [
        "",
        ", weight = false",
        ", residual = true",
        ", gate = 'pre'",
        ", gate = 'post'",
        ", gate = 'pre', gate_act = 'silu', residual = true",
        ", gate = 'post', gate_act = 'none', weight = false",
    ];
    let norms = norms.map(|options| format!("'normalize'{options}"));
    let encodings = |op: &str, sequence: isize, options: &str| {
        let acts = ["none", "silu", "relu"].map(|act| format!("act = '{act}'"));
        let softmaxes = [-1, sequence].map(|dim| format!("act = 'softmax', dim = {dim}"));
        let all = acts.into_iter().chain(softmaxes);
        all.map(|act| format!("'{op}', {act}{options}")).collect::<Vec<_>>()
    };
    let mut operators: Vec<(String, usize)> = Vec::new();
    operators.extend(acts.chain(softmaxes).map(|operator| (operator, 40)));
    operators.extend(norms.map(|operator| (operator, 9)));
    operators.extend(encodings("rotate", 1, "").into_iter().map(|operator| (operator, 40)));
    for (options, n) in [(", axes = 1", 40), (", axes = 2, extra = 3", 5), (", axes = 3", 3)] {
        let all = encodings("cosine", -2, options).into_iter();
        operators.extend(all.map(|operator| (operator, n)));
    }
    let mut text = "family = 'tests'\nbatch = 2\nheads = 3\ndim = 24\n".to_owned();
    for (operator, n) in operators {
        // More features than the blocks that primitives work on.
        let dim = if operator.starts_with("'norm") { "dim = 300\n" } else { "" };
        text += &format!(
            "[[case]]\ntable = '{{metric}}-{{mode}}-{{dtype}}'\ntitle = \"{operator}\"\n\
             operator = {{ op = {operator} }}\nsizes = [{n}]\n{dim}"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cases.toml");
    fs::write(&path, text).unwrap();
    case::read(&path).unwrap()
}

/// A job with its inputs in files, and what it should give.
pub(super) struct Trial {
    pub(super) job: Job,
    pub(super) truth: BTreeMap<&'static str, Vec<f64>>,
    _folder: TempDir,
}

impl Trial {
    pub(super) fn new(case: &Case, mode: Mode, n: usize, dtype: DType) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut random = Random::new(n as u64);
        let mut values = BTreeMap::new();
        let mut inputs = Vec::new();
        for spec in case.inputs(mode, n, dtype) {
            let path = folder.path().join(spec.name);
            let last = spec.shape.last().copied().unwrap_or(1);
            let numbers: Vec<f64> = match spec.name {
                "theta" => (0..spec.len())
                    .map(|i| 0.1f64.powf((i % last) as f64 / last as f64) / (1 + i / last) as f64)
                    .collect(),
                "weight" => random.uniforms(spec.len(), 0.5, 1.5),
                _ => random.normals(spec.len()),
            };
            let (bytes, rounded) = encode(&numbers, spec.dtype);
            fs::write(&path, bytes).unwrap();
            values.insert(spec.name, rounded);
            let dtype = Dtype(spec.dtype);
            inputs.push(Input { name: spec.name.to_owned(), dtype, shape: spec.shape, path });
        }
        let truth = truth(case, mode, n, dtype, &values);
        let job = Job {
            operator: case.operator,
            mode,
            dtype: Dtype(dtype),
            n,
            threads: rayon::current_num_threads(),
            alloc: Alloc::Warm,
            inputs,
            mapped: false,
        };
        Self { job, truth, _folder: folder }
    }

    /// The largest error of each output after two calls, in units in the last place of the dtype
    /// at the output's value or at its root mean square, whichever is larger.
    pub(super) fn errors(
        &self,
        library: &dyn Library,
    ) -> Result<BTreeMap<&'static str, f64>, Fault> {
        let loaded = library.load(&self.job)?;
        let mut call = loaded.call()?;
        call.run()?;
        call.run()?;
        let mut errors = BTreeMap::new();
        for (&name, truth) in &self.truth {
            let all = Sample { start: 0, length: truth.len(), step: 0, count: 1 };
            let got = call.sample(name, &[all])?;
            assert_eq!(got.len(), truth.len(), "{name}");
            let squares: f64 = truth.iter().map(|value| value * value).sum();
            let scale = (squares / truth.len() as f64).sqrt();
            let error = got.iter().zip(truth).map(|(&got, &truth)| {
                let unit = ulp::ulp(self.job.dtype.0, truth.abs().max(scale));
                (f64::from(got) - truth).abs() / unit
            });
            // A NaN is as wrong as can be.
            let worst = error.fold(0.0, |a: f64, b| if b > a || b.is_nan() { b } else { a });
            errors.insert(name, worst);
        }
        Ok(errors)
    }
}

/// Checks a provider on all small cases. `bound` gives the largest error that an output may have;
/// what the library does not support has to be in `unsupported`.
pub(super) fn check(
    library: &dyn Library,
    applies: impl Fn(&Operator) -> bool,
    bound: impl Fn(DType) -> f64,
    unsupported: impl Fn(&Operator, Mode) -> bool,
) {
    for case in cases().iter().filter(|case| applies(&case.operator)) {
        for mode in Mode::ALL {
            for dtype in DTYPES {
                let trial = Trial::new(case, mode, case.sizes[0], dtype);
                let what = format!("{} {} {dtype}", case.title, mode.name());
                match trial.errors(library) {
                    Err(Fault::Unsupported(why)) => {
                        assert!(unsupported(&case.operator, mode), "{what}: {why}");
                    }
                    Err(Fault::Failed(why)) => panic!("{what}: {why}"),
                    Ok(errors) => {
                        for (name, error) in errors {
                            assert!(error <= bound(dtype), "{what}: {name} is {error} ulp off");
                        }
                    }
                }
            }
        }
    }
}

/// Numbers as the bytes of a file, and what they were rounded to.
fn encode(numbers: &[f64], dtype: DType) -> (Vec<u8>, Vec<f64>) {
    fn with<T: Element, const N: usize>(
        numbers: &[f64],
        bytes: impl Fn(T) -> [u8; N],
    ) -> (Vec<u8>, Vec<f64>) {
        let rounded: Vec<T> = numbers.iter().map(|&number| T::from_f64(number)).collect();
        let widened = rounded.iter().map(|number| number.to_f64()).collect();
        (rounded.into_iter().flat_map(bytes).collect(), widened)
    }
    match dtype {
        DType::F32 => with(numbers, f32::to_le_bytes),
        DType::F16 => with(numbers, f16::to_le_bytes),
        DType::BF16 => with(numbers, bf16::to_le_bytes),
        DType::F64 => with(numbers, f64::to_le_bytes),
    }
}

/// What the reference says.
fn truth(
    case: &Case,
    mode: Mode,
    n: usize,
    dtype: DType,
    values: &BTreeMap<&'static str, Vec<f64>>,
) -> BTreeMap<&'static str, Vec<f64>> {
    let shape = case.shape(n);
    let x = &values["x"];
    let get = |name: &str| values.get(name).map(Vec::as_slice);
    let grad = get("grad").unwrap_or_default();
    let forward = mode == Mode::Fwd;
    let one = |values| BTreeMap::from([(if forward { "o" } else { "dx" }, values)]);
    match case.operator {
        Operator::Act { act } if forward => {
            one(x.iter().map(|&x| reference::act::forward(act, x)).collect())
        }
        Operator::Act { act } => one((x.iter().zip(grad))
            .map(|(&x, &grad)| reference::act::backward(act, x, grad))
            .collect()),
        Operator::Softmax { dim } => {
            let rows = shape[0] * shape[1];
            let dims = match dim {
                -1 => [rows * shape[2], shape[3], 1],
                _ => [rows, shape[2], shape[3]],
            };
            let options = Softmax::default();
            one(match mode {
                Mode::Fwd => reference::softmax::forward(&options, x, dims),
                Mode::Bwd => reference::softmax::backward_from_input(&options, x, grad, dims),
            })
        }
        Operator::Normalize { .. } => {
            let options = case.operator.normalize();
            let input = reference::normalize::Input {
                x,
                residual: get("residual"),
                gate: get("gate"),
                weight: get("weight"),
                bias: None,
                rows: shape[0] * shape[1],
                d: shape[2],
            };
            if forward {
                return one(reference::normalize::forward(&options, &input).o);
            }
            let gradients = reference::normalize::backward(&options, &input, grad, None);
            let mut outputs = one(gradients.dx);
            outputs.extend(gradients.dgate.map(|dgate| ("dgate", dgate)));
            outputs.extend(gradients.dweight.map(|dweight| ("dweight", dweight)));
            outputs
        }
        Operator::Rotate { .. } => {
            let options = case.operator.rotate();
            let [b, n, h, d] = [shape[0], shape[1], shape[2], shape[3]];
            let input = angle_input(x, [b, n, h, d], values, dtype);
            one(match mode {
                Mode::Fwd => reference::rotate::forward(&options, &input),
                Mode::Bwd => reference::rotate::backward(&options, &input, grad).dx,
            })
        }
        Operator::Cosine { .. } => {
            let grid = case.operator.grid(n);
            let options = case.operator.cosine(&grid);
            let [b, h, tokens, d] = [shape[0], shape[1], shape[2], shape[3]];
            // The reference has tokens before heads.
            let x = swapped(x, [b, h, tokens]);
            let grad = swapped(grad, [b, h, tokens]);
            let input = angle_input(&x, [b, tokens, h, d], values, dtype);
            let o = match mode {
                Mode::Fwd => reference::cosine::forward(&options, &input),
                Mode::Bwd => reference::cosine::backward(&options, &input, &grad).dx,
            };
            one(swapped(&o, [b, tokens, h]))
        }
    }
}

fn angle_input<'a>(
    x: &'a [f64],
    dims: [usize; 4],
    values: &'a BTreeMap<&'static str, Vec<f64>>,
    dtype: DType,
) -> reference::angles::Input<'a> {
    let theta = &values["theta"];
    let heads = dims[2];
    reference::angles::Input { x, dims, theta, theta_dims: [heads, theta.len() / heads], dtype }
}

/// The second and third dimension of (a, b, c, whatever is left) swapped.
fn swapped(values: &[f64], [a, b, c]: [usize; 3]) -> Vec<f64> {
    let inner = values.len() / (a * b * c);
    let mut out = Vec::with_capacity(values.len());
    for i in 0..a {
        for k in 0..c {
            for j in 0..b {
                let start = ((i * b + j) * c + k) * inner;
                out.extend_from_slice(&values[start..start + inner]);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::Peer;
    use super::super::fuselane::Fuselane;
    use super::*;

    #[test]
    fn fuselane_is_right() {
        // Gradients of a softmax are differences of larger terms, which f32 shows. Those of a
        // sigmoid start from its rounded output, which 16 bits show.
        let bound = |dtype| if dtype == DType::F32 { 16.0 } else { 4.0 };
        for table in [false, true] {
            let library = Fuselane { table };
            check(&library, |operator| library.applies(operator), bound, |_, _| false);
        }
    }
}
