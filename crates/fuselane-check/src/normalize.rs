//! `normalize`: centering, groups, every gate, every use of a residual, every form of the weight,
//! bias, and backward from x and residual or from their saved sum.

use std::fmt;

use fuselane::reference::Random;
use fuselane::reference::normalize::{self as reference, Input};
use fuselane::{
    Act, DType, GatePosition, Normalize, NormalizeBackward, NormalizeForward, Residual, Result,
    WeightForm,
};

use crate::backend::Runner;
pub use crate::bounds::NORMALIZE as BOUNDS;
use crate::outcome::{Call, Expected, Outcomes};
use crate::tensor::Tensor;
use crate::{Bound, Case};

/// What becomes of the residual.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Added {
    None,
    Add,
    Into,
    InPlace,
}

#[derive(Debug, Clone, Copy)]
struct Norm {
    options: Normalize,
    gate: bool,
    added: Added,
    weight: bool,
    bias: bool,
    /// Whether the backward reads the saved sum x + residual rather than x and residual. The
    /// elements are then such that the sum is exact, because the statistics are those of the
    /// unrounded one.
    from_sum: bool,
    /// Whether a gradient arrives at the sum.
    grad_sum: bool,
    rows: usize,
    d: usize,
    parameter_dtypes: [DType; 2],
    seed: u64,
}

/// Features in a group, around the widths of lanes (4, 8, 16), and beyond the chunk that sums run
/// in with narrow lanes (128 blocks).
const GROUP: [usize; 13] = [8, 16, 17, 3, 15, 4, 9, 2, 31, 33, 7, 5, 1];
const LONG: [usize; 2] = [1100, 1088];
/// Rows beyond the blocks that dweight and dbias are summed in (16 and 64).
const MANY: usize = 700;

pub(crate) fn cases() -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let gates = Act::ALL.into_iter().flat_map(|act| {
        [GatePosition::Pre, GatePosition::Post].map(|position| (true, act, position))
    });
    let gates: Vec<_> = gates.chain([(false, Act::Sigmoid, GatePosition::Pre)]).collect();
    let weights =
        [(false, WeightForm::Plain), (true, WeightForm::Plain), (true, WeightForm::OnePlus)];
    for center in [false, true] {
        for &(gate, gate_act, gate_position) in &gates {
            for (added, from_sum) in [
                (Added::None, false),
                (Added::Add, false),
                (Added::Into, false),
                (Added::Into, true),
                (Added::InPlace, false),
                (Added::InPlace, true),
            ] {
                for (weight, weight_form) in weights {
                    for bias in [false, true] {
                        for groups in [1, 2, 4] {
                            let i = cases.len();
                            let options = Normalize {
                                center,
                                eps: [1e-6, 1e-5, 0.1][i / 7 % 3],
                                scale: [1.0, 1.0, -0.75][i / 11 % 3],
                                groups,
                                weight_form,
                                gate_position,
                                gate_act,
                            };
                            let e = if i.is_multiple_of(101) {
                                LONG[i / 101 % 2]
                            } else {
                                GROUP[i % GROUP.len()]
                            };
                            let dtypes = [DType::F32, DType::BF16, DType::F64, DType::F16];
                            cases.push(Box::new(Norm {
                                options,
                                gate,
                                added,
                                weight,
                                bias,
                                from_sum,
                                grad_sum: added != Added::None && i % 7 < 4,
                                rows: if i.is_multiple_of(103) { MANY } else { 1 + i / 5 % 4 },
                                d: groups * e,
                                parameter_dtypes: [dtypes[i / 3 % 4], dtypes[i / 5 % 4]],
                                seed: i as u64,
                            }));
                        }
                    }
                }
            }
        }
    }
    cases
}

impl fmt::Display for Norm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Normalize { center, groups, gate_position, gate_act, weight_form, .. } = self.options;
        let Self { rows, d, parameter_dtypes: [weight_dtype, bias_dtype], .. } = self;
        write!(f, "normalize {rows}x{d} groups={groups}")?;
        if center {
            write!(f, " center")?;
        }
        if self.gate {
            write!(f, " gate={gate_position:?}:{gate_act}")?;
        }
        if self.added != Added::None {
            let from = if self.from_sum { ", backward from the sum" } else { "" };
            write!(f, " residual={:?}{from}", self.added)?;
        }
        if self.grad_sum {
            write!(f, " grad_residual_out")?;
        }
        if self.weight {
            write!(f, " weight={weight_form:?} {weight_dtype}")?;
        }
        if self.bias {
            write!(f, " bias={bias_dtype}")?;
        }
        write!(f, " eps={} scale={}", self.options.eps, self.options.scale)
    }
}

/// The operands of a case.
struct Operands {
    x: Tensor,
    residual: Option<Tensor>,
    gate: Option<Tensor>,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    grad: Tensor,
    grad_sum: Option<Tensor>,
}

impl Norm {
    fn draw(&self, dtype: DType) -> Operands {
        let mut random = Random::new(self.seed);
        let shape = [self.rows, self.d];
        // Sixteenths up to 4 have sums that are exact in every dtype.
        let fit = |value: f64| match self.from_sum {
            true => (value * 16.0).round().clamp(-64.0, 64.0) / 16.0,
            false => value,
        };
        // A mean of its own for every third case, so that centering has something to do.
        let shift = if self.seed.is_multiple_of(3) { 1.5 } else { 0.0 };
        let mut activations = |given: bool, shift: f64| {
            let values: Vec<f64> =
                random.normals(self.rows * self.d).iter().map(|v| fit(v + shift)).collect();
            given.then(|| Tensor::rounded(dtype, &values, &shape))
        };
        let x = activations(true, shift).expect("given");
        let residual = activations(self.added != Added::None, 0.0);
        let gate = activations(self.gate, 0.0);
        let grad = activations(true, 0.0).expect("given");
        let grad_sum = activations(self.grad_sum, 0.0);
        let mut parameter = |given: bool, dtype: DType| {
            let values = random.normals(self.d);
            given.then(|| Tensor::rounded(dtype, &values, &[self.d]))
        };
        let weight = parameter(self.weight, self.parameter_dtypes[0]);
        let bias = parameter(self.bias, self.parameter_dtypes[1]);
        Operands { x, residual, gate, weight, bias, grad, grad_sum }
    }

    fn call(
        &self,
        operands: &Operands,
        truth: &Truth,
        call: Call<'_>,
        outcomes: &mut Outcomes,
    ) -> Result<()> {
        let Operands { x, residual, gate, weight, bias, grad, grad_sum } = operands;
        let (options, shape, dtype) = (&self.options, [self.rows, self.d], x.dtype());
        let backend = call.runner.backend;
        let statistics = [self.rows, options.groups];
        let mut o = Tensor::unwritten(dtype, &shape);
        let mut rstd = Tensor::unwritten(dtype.real(), &statistics);
        let mut mean = options.center.then(|| Tensor::unwritten(dtype.real(), &statistics));
        // The memory of the sum: unwritten, or the residual's own.
        let mut sum = match self.added {
            Added::InPlace => residual.clone(),
            Added::Into => Some(Tensor::unwritten(dtype, &shape)),
            Added::None | Added::Add => None,
        };
        let forward = NormalizeForward {
            x: x.view(),
            weight: weight.as_ref().map(Tensor::view),
            bias: bias.as_ref().map(Tensor::view),
            gate: gate.as_ref().map(Tensor::view),
            residual: match (self.added, residual, &mut sum) {
                (Added::Add, Some(residual), _) => Residual::Add(residual.view()),
                (Added::Into, Some(residual), Some(sum)) => {
                    Residual::AddInto(residual.view(), sum.view_mut())
                }
                (Added::InPlace, _, Some(sum)) => Residual::AddInPlace(sum.view_mut()),
                _ => Residual::None,
            },
            o: o.view_mut(),
            rstd: Some(rstd.view_mut()),
            mean: mean.as_mut().map(Tensor::view_mut),
        };
        backend.normalize_forward(options, forward)?;
        truth.compare(outcomes, call, "o", Some(&o));
        truth.compare(outcomes, call, "rstd", Some(&rstd));
        truth.compare(outcomes, call, "mean", mean.as_ref());
        truth.compare(outcomes, call, "residual_out", sum.as_ref());

        let mut dx = Tensor::unwritten(dtype, &shape);
        let mut dresidual = residual.as_ref().map(|_| Tensor::unwritten(dtype, &shape));
        let mut dgate = gate.as_ref().map(|_| Tensor::unwritten(dtype, &shape));
        let like = |parameter: &Tensor| Tensor::unwritten(parameter.dtype(), &[self.d]);
        let mut dweight = weight.as_ref().map(like);
        let mut dbias = bias.as_ref().map(like);
        let saved = sum.as_ref().filter(|_| self.from_sum);
        let backward = NormalizeBackward {
            grad: grad.view(),
            x: saved.unwrap_or(x).view(),
            residual: residual.as_ref().filter(|_| saved.is_none()).map(Tensor::view),
            gate: gate.as_ref().map(Tensor::view),
            weight: weight.as_ref().map(Tensor::view),
            bias: bias.as_ref().map(Tensor::view),
            rstd: rstd.view(),
            mean: mean.as_ref().map(Tensor::view),
            grad_residual_out: grad_sum.as_ref().map(Tensor::view),
            dx: Some(dx.view_mut()),
            dresidual: dresidual.as_mut().map(Tensor::view_mut),
            dgate: dgate.as_mut().map(Tensor::view_mut),
            dweight: dweight.as_mut().map(Tensor::view_mut),
            dbias: dbias.as_mut().map(Tensor::view_mut),
        };
        backend.normalize_backward(options, backward)?;
        truth.compare(outcomes, call, "dx", Some(&dx));
        truth.compare(outcomes, call, "dresidual", dresidual.as_ref());
        truth.compare(outcomes, call, "dgate", dgate.as_ref());
        truth.compare(outcomes, call, "dweight", dweight.as_ref());
        truth.compare(outcomes, call, "dbias", dbias.as_ref());
        Ok(())
    }
}

impl Case for Norm {
    fn parameter_dtypes(&self) -> Vec<DType> {
        let given = self.parameter_dtypes.into_iter().zip([self.weight, self.bias]);
        given.filter_map(|(dtype, given)| given.then_some(dtype)).collect()
    }

    fn run(&self, dtype: DType, runners: &[Runner<'_>], outcomes: &mut Outcomes) {
        let operands = self.draw(dtype);
        let truth = Truth::new(self, &operands);
        outcomes.run((self, &BOUNDS, dtype), "o", runners, |outcomes, call| {
            self.call(&operands, &truth, call, outcomes)
        });
    }
}

/// What each output should be, with its magnitudes.
struct Truth {
    outputs: Vec<(&'static str, [Vec<f64>; 2])>,
    /// Whether there is a gate that has a short form.
    short_gate: bool,
}

impl Truth {
    fn new(case: &Norm, operands: &Operands) -> Self {
        let values = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::values);
        let (x, residual, gate) =
            (operands.x.values(), values(&operands.residual), values(&operands.gate));
        let (weight, bias) = (values(&operands.weight), values(&operands.bias));
        let (grad, grad_sum) = (operands.grad.values(), values(&operands.grad_sum));
        let input = Input {
            x: &x,
            residual: residual.as_deref(),
            gate: gate.as_deref(),
            weight: weight.as_deref(),
            bias: bias.as_deref(),
            rows: case.rows,
            d: case.d,
        };
        let output = reference::forward(&case.options, &input);
        let o = reference::forward_magnitude(&case.options, &input);
        let [truth, magnitude] = [reference::backward, reference::backward_magnitude]
            .map(|backward| backward(&case.options, &input, &grad, grad_sum.as_deref()));
        let absolute = |values: &[f64]| values.iter().map(|v| v.abs()).collect::<Vec<f64>>();
        let [rstd, mean] = statistics_magnitude(case, &input, &output.rstd);
        let sum = absolute(&output.residual_out);
        let mut all = vec![
            ("o", [output.o, o]),
            ("rstd", [output.rstd, rstd]),
            ("mean", [output.mean, mean]),
            ("residual_out", [output.residual_out, sum]),
            ("dresidual", [truth.dx.clone(), magnitude.dx.clone()]),
            ("dx", [truth.dx, magnitude.dx]),
        ];
        for (name, truth, magnitude) in [
            ("dgate", truth.dgate, magnitude.dgate),
            ("dweight", truth.dweight, magnitude.dweight),
            ("dbias", truth.dbias, magnitude.dbias),
        ] {
            all.extend(truth.zip(magnitude).map(|(truth, magnitude)| (name, [truth, magnitude])));
        }
        let short_gate = case.gate && matches!(case.options.gate_act, Act::Sigmoid | Act::Silu);
        Self { outputs: all, short_gate }
    }

    /// Compares an output, if it was asked for.
    fn compare(
        &self,
        outcomes: &mut Outcomes,
        call: Call<'_>,
        name: &'static str,
        got: Option<&Tensor>,
    ) {
        let Some(got) = got else { return };
        let (_, [truth, magnitude]) =
            self.outputs.iter().find(|(of, _)| *of == name).expect("all outputs have a truth");
        let of_gate = |bound: &&Bound| {
            bound.output.strip_prefix(name).is_some_and(|rest| rest.starts_with(" of "))
        };
        let gated = BOUNDS.iter().find(of_gate).filter(|_| self.short_gate);
        let name = gated.map_or(name, |bound| bound.output);
        outcomes.compare(call, name, got, Expected { truth, magnitude });
    }
}

/// The sums of the absolute terms of rstd and mean, for each row and group:
///
/// ```text
/// mean   mean |p|
/// rstd   rstd (1 + mean(|r| m / sigma)),   m = |p|, and + mean |p| if centered
/// ```
///
/// since an error of p and of its mean reaches rstd by way of mean(q^2).
fn statistics_magnitude(case: &Norm, input: &Input<'_>, rstd: &[f64]) -> [Vec<f64>; 2] {
    let Normalize { center, groups, gate_position, gate_act, .. } = case.options;
    let e = case.d / groups;
    let p = |i: usize| {
        let sum = input.x[i] + input.residual.map_or(0.0, |residual| residual[i]);
        let pre = input.gate.filter(|_| gate_position == GatePosition::Pre);
        sum * pre.map_or(1.0, |gate| fuselane::reference::act::forward(gate_act, gate[i]))
    };
    let mean = |values: &[f64]| values.iter().sum::<f64>() / e as f64;
    let of_group = |(group, rstd): (usize, &f64)| {
        let p: Vec<f64> = (group * e..(group + 1) * e).map(p).collect();
        let absolute: Vec<f64> = p.iter().map(|p| p.abs()).collect();
        let (center, of_mean) = if center { (mean(&p), mean(&absolute)) } else { (0.0, 0.0) };
        let terms: Vec<f64> =
            p.iter().map(|p| ((p - center) * rstd).abs() * (p.abs() + of_mean) * rstd).collect();
        (rstd * (1.0 + mean(&terms)), mean(&absolute))
    };
    let (rstd, mean) = rstd.iter().enumerate().map(of_group).unzip();
    [rstd, mean]
}
