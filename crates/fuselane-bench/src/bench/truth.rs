//! Whether a provider's outputs are right: parts of them against the f64 reference.
//!
//! Compared are whole slices from both ends of a tensor and from its middle (a head of a batch
//! entry; rows, for a norm), which the reference computes by itself, and all of dweight.
//!
//! An error is counted in ulp of the output's dtype at the larger of the true value and the root
//! mean square of the output: providers that round between steps are off by some at small values,
//! and still right. What this has to tell apart is another result, not another rounding; how
//! exact fuselane is, `fuselane check` tells.

use std::collections::BTreeMap;
use std::path::Path;

use fuselane::reference::{act, angles, cosine, normalize, rotate, softmax, ulp};
use fuselane::{Act, DType, Softmax};
use rayon::prelude::*;

use super::inputs;
use crate::case::{Case, Mode, Operator};
use crate::protocol::{Input, Sample};

/// Rows of a norm that are compared at each end.
const ROWS: usize = 16;

/// The largest error, in ulp, that is taken for rounding.
pub(super) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 | DType::F16 => 16.0,
        // Sums of many terms in another order, sines by another polynomial.
        DType::F32 | DType::F64 => 256.0,
    }
}

/// True values of parts of each output.
pub(super) struct Truth {
    dtype: DType,
    /// By output: which elements, and their values.
    outputs: BTreeMap<String, (Vec<Sample>, Vec<f64>)>,
}

impl Truth {
    pub(super) fn samples(&self) -> BTreeMap<String, Vec<Sample>> {
        self.outputs.iter().map(|(name, (samples, _))| (name.clone(), samples.clone())).collect()
    }

    /// The largest error in what a worker wrote to `folder`, in ulp; infinite where a result is
    /// NaN or missing.
    pub(super) fn error(&self, folder: &Path) -> Result<f64, String> {
        let mut worst: f64 = 0.0;
        for (name, (_, truth)) in &self.outputs {
            let path = folder.join(format!("{name}.f32"));
            let bytes = std::fs::read(&path).map_err(|error| format!("output {name}: {error}"))?;
            let values = bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
            if values.len() != truth.len() {
                return Err(format!(
                    "output {name} has {} elements, expected {}",
                    values.len(),
                    truth.len()
                ));
            }
            worst = worst.max(largest_error(self.dtype, values, truth));
        }
        Ok(worst)
    }

    /// Computes them.
    pub(super) fn of(
        case: &Case,
        mode: Mode,
        n: usize,
        dtype: DType,
        inputs: &[Input],
    ) -> Result<Self, String> {
        let slices = Slices { case, mode, n, dtype, inputs };
        let outputs = match case.operator {
            Operator::Normalize { .. } => slices.rows(),
            _ => slices.heads(),
        };
        let outputs = outputs.map_err(|error| format!("inputs cannot be read again: {error}"))?;
        Ok(Self { dtype, outputs })
    }
}

fn largest_error(dtype: DType, values: impl Iterator<Item = f32>, truth: &[f64]) -> f64 {
    let squares: f64 = truth.iter().map(|value| value * value).sum();
    let rms = (squares / truth.len().max(1) as f64).sqrt();
    let errors = values.zip(truth).map(|(value, &truth)| {
        let error = (f64::from(value) - truth).abs() / ulp::ulp(dtype, truth.abs().max(rms));
        if error.is_nan() { f64::INFINITY } else { error }
    });
    errors.fold(0.0, f64::max)
}

struct Slices<'a> {
    case: &'a Case,
    mode: Mode,
    n: usize,
    dtype: DType,
    inputs: &'a [Input],
}

type Outputs = BTreeMap<String, (Vec<Sample>, Vec<f64>)>;

impl Slices<'_> {
    fn read(&self, name: &str, samples: &[Sample]) -> std::io::Result<Option<Vec<f64>>> {
        let input = self.inputs.iter().find(|input| input.name == name);
        input.map(|input| inputs::read(input, samples)).transpose()
    }

    /// The elements of a head of a batch entry, in a tensor with `width` features.
    fn head(&self, batch: usize, head: usize, width: usize) -> Sample {
        let (heads, tokens) = (self.case.heads, self.case.tokens(self.n));
        match self.case.operator {
            Operator::Rotate { .. } => Sample {
                start: (batch * tokens * heads + head) * width,
                length: width,
                step: heads * width,
                count: tokens,
            },
            _ => Sample {
                start: (batch * heads + head) * tokens * width,
                length: tokens * width,
                step: 0,
                count: 1,
            },
        }
    }

    /// The first head of the first batch entry, one in the middle, and the last of the last.
    fn heads(&self) -> std::io::Result<Outputs> {
        let case = self.case;
        let d = case.dim;
        let doubled = matches!(case.operator, Operator::Cosine { .. });
        let width = if doubled { 2 * d } else { d };
        let middle = (case.batch / 2, case.heads / 2);
        let mut ends = vec![(0, 0), middle, (case.batch - 1, case.heads - 1)];
        ends.dedup();
        let (mut samples, mut values) = (Vec::new(), Vec::new());
        for (batch, head) in ends {
            let x = self.read("x", &[self.head(batch, head, d)])?.unwrap_or_default();
            let grad = self.read("grad", &[self.head(batch, head, width)])?;
            let columns = self.inputs.iter().find(|input| input.name == "theta");
            let columns = columns.map_or(0, |theta| theta.shape[1]);
            let row = Sample { start: head * columns, length: columns, step: 0, count: 1 };
            let theta = self.read("theta", &[row])?.unwrap_or_default();
            values.extend(self.encode(&x, grad.as_deref(), &theta));
            samples.push(self.head(batch, head, if self.mode == Mode::Fwd { width } else { d }));
        }
        let name = if self.mode == Mode::Fwd { "o" } else { "dx" };
        Ok(BTreeMap::from([(name.to_owned(), (samples, values))]))
    }

    /// o, or dx if there is a gradient, of one head.
    fn encode(&self, x: &[f64], grad: Option<&[f64]>, theta: &[f64]) -> Vec<f64> {
        let (tokens, d) = (self.case.tokens(self.n), self.case.dim);
        let input = angles::Input {
            x,
            dims: [1, tokens, 1, d],
            theta,
            theta_dims: [1, theta.len()],
            dtype: self.dtype,
        };
        match self.case.operator {
            Operator::Act { act } => self.elementwise(act, x, grad),
            Operator::Softmax { dim } => {
                let dims = if dim == -1 { [tokens, d, 1] } else { [1, tokens, d] };
                let options = Softmax::over(dim);
                match grad {
                    None => softmax::forward(&options, x, dims),
                    Some(grad) => softmax::backward_from_input(&options, x, grad, dims),
                }
            }
            Operator::Rotate { .. } => {
                let options = self.case.operator.rotate();
                match grad {
                    None => rotate::forward(&options, &input),
                    Some(grad) => rotate::backward(&options, &input, grad).dx,
                }
            }
            Operator::Cosine { .. } => {
                let grid = self.case.operator.grid(self.n);
                let options = self.case.operator.cosine(&grid);
                match grad {
                    None => cosine::forward(&options, &input),
                    Some(grad) => cosine::backward(&options, &input, grad).dx,
                }
            }
            Operator::Normalize { .. } => Vec::new(),
        }
    }

    fn elementwise(&self, f: Act, x: &[f64], grad: Option<&[f64]>) -> Vec<f64> {
        match grad {
            None => x.iter().map(|&x| act::forward(f, x)).collect(),
            Some(grad) => x.iter().zip(grad).map(|(&x, &g)| act::backward(f, x, g)).collect(),
        }
    }

    /// Rows at both ends and in the middle of a norm; for dweight, all of them, in parallel.
    fn rows(&self) -> std::io::Result<Outputs> {
        let (rows, d) = (self.case.batch * self.n, self.case.dim);
        let count = ROWS.min(rows);
        let mut starts = vec![0, (rows - count) / 2, rows - count];
        starts.dedup();
        let mut outputs = Outputs::new();
        let mut keep = |name: &str, start: usize, values: Vec<f64>| {
            let sample = Sample { start: start * d, length: count * d, step: 0, count: 1 };
            let (samples, all) = outputs.entry(name.to_owned()).or_default();
            samples.push(sample);
            all.extend(values);
        };
        for start in starts {
            let part = self.normalized(start, count)?;
            match part {
                Part::Forward(o) => keep("o", start, o),
                Part::Backward(gradients) => {
                    keep("dx", start, gradients.dx);
                    if let Some(dgate) = gradients.dgate {
                        keep("dgate", start, dgate);
                    }
                }
            }
        }
        let weight = self.inputs.iter().any(|input| input.name == "weight");
        if self.mode == Mode::Bwd && weight {
            let starts: Vec<usize> = (0..rows).step_by(64).collect();
            let parts = starts.par_iter().map(|&start| -> std::io::Result<Vec<f64>> {
                match self.normalized(start, 64.min(rows - start))? {
                    Part::Backward(gradients) => Ok(gradients.dweight.unwrap_or_default()),
                    Part::Forward(_) => Ok(Vec::new()),
                }
            });
            let sum = parts.try_reduce(
                || vec![0.0; d],
                |mut sum, part| {
                    sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                    Ok(sum)
                },
            )?;
            let all = Sample { start: 0, length: d, step: 0, count: 1 };
            outputs.insert("dweight".to_owned(), (vec![all], sum));
        }
        Ok(outputs)
    }

    fn normalized(&self, start: usize, rows: usize) -> std::io::Result<Part> {
        let d = self.case.dim;
        let part = [Sample { start: start * d, length: rows * d, step: 0, count: 1 }];
        let x = self.read("x", &part)?.unwrap_or_default();
        let (residual, gate) = (self.read("residual", &part)?, self.read("gate", &part)?);
        let whole = [Sample { start: 0, length: d, step: 0, count: 1 }];
        let weight = self.read("weight", &whole)?;
        let input = normalize::Input {
            x: &x,
            residual: residual.as_deref(),
            gate: gate.as_deref(),
            weight: weight.as_deref(),
            bias: None,
            rows,
            d,
        };
        let options = self.case.operator.normalize();
        Ok(match self.read("grad", &part)? {
            None => Part::Forward(normalize::forward(&options, &input).o),
            Some(grad) => Part::Backward(normalize::backward(&options, &input, &grad, None)),
        })
    }
}

/// A result of the reference for some rows of a norm.
enum Part {
    Forward(Vec<f64>),
    Backward(normalize::Gradients),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_count_in_ulp_of_the_larger() {
        // The root mean square is about 1, at which an ulp of bf16 is 2^-7.
        let truth = [1.0, -1.0, 1.0, 1e-6];
        let error =
            |last: f32| largest_error(DType::BF16, [1.0, -1.0, 1.0, last].into_iter(), &truth);
        assert!(error(1e-6) < 1e-3);
        assert!((1.0..3.0).contains(&error(2f32.powi(-7))), "{}", error(2f32.powi(-7)));
        assert!(error(1.0) > tolerance(DType::BF16));
        assert_eq!(error(f32::NAN), f64::INFINITY);
    }
}
