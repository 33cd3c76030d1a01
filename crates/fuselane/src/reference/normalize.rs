//! Normalization over the last dimension, with residual, gate, weight and bias fused in.
//!
//! Each row of d features is normalized in groups of e = d / groups:
//!
//! ```text
//! s = x [+ residual]
//! p = s [* g(gate)           gate position pre]
//! q = p [- mean(p)           center]
//! sigma = sqrt(mean(q^2) + eps)
//! r = q / sigma
//! o1 = scale * r [* weight | * (1 + weight)] [+ bias]
//! o = o1 [* g(gate)          gate position post]
//! ```

use super::act;
use crate::ops::normalize::{GatePosition, Normalize, WeightForm};

/// What the normalization reads.
#[derive(Debug, Clone, Copy, Default)]
pub struct Input<'a> {
    /// rows * d activations.
    pub x: &'a [f64],
    /// Added to x first; rows * d.
    pub residual: Option<&'a [f64]>,
    /// Multiplies, after its activation; rows * d.
    pub gate: Option<&'a [f64]>,
    /// One for each of the d features.
    pub weight: Option<&'a [f64]>,
    /// One for each of the d features.
    pub bias: Option<&'a [f64]>,
    /// The number of rows.
    pub rows: usize,
    /// The length of a row.
    pub d: usize,
}

/// What the forward gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// rows * d results.
    pub o: Vec<f64>,
    /// x + residual (x itself where there is no residual); rows * d.
    pub residual_out: Vec<f64>,
    /// 1 / sigma, for each row and group.
    pub rstd: Vec<f64>,
    /// mean(p), for each row and group; 0 without centering.
    pub mean: Vec<f64>,
}

/// What the forward kept for the backward, for each row and group.
#[derive(Debug, Clone, Copy)]
pub struct Statistics<'a> {
    /// [`Output::rstd`]
    pub rstd: &'a [f64],
    /// [`Output::mean`]; not read without centering.
    pub mean: &'a [f64],
}

/// What the backward gives, or the magnitudes of its terms.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// The gradient of x, which is that of the residual too; rows * d.
    pub dx: Vec<f64>,
    /// The gradient of the gate, where there is one; rows * d.
    pub dgate: Option<Vec<f64>>,
    /// The gradient of the weight, where there is one; d.
    pub dweight: Option<Vec<f64>>,
    /// The gradient of the bias, where there is one; d.
    pub dbias: Option<Vec<f64>>,
}

/// The formula at the head of this file.
///
/// ```
/// use fuselane::{Normalize, reference::normalize};
/// let input = normalize::Input { x: &[3.0, 3.0, 4.0, 4.0], rows: 2, d: 2, ..Default::default() };
/// let output = normalize::forward(&Normalize { eps: 0.0, ..Normalize::default() }, &input);
/// assert_eq!(output.o, [1.0; 4]);
/// assert_eq!(output.rstd, [1.0 / 3.0, 0.25]);
/// ```
///
/// # Panics
///
/// Where a length does not match, or the groups do not divide d.
pub fn forward(options: &Normalize, input: &Input) -> Output {
    let mut output =
        Output { o: Vec::new(), residual_out: Vec::new(), rstd: Vec::new(), mean: Vec::new() };
    for group in groups(options, input, None) {
        output.o.extend((0..group.r.len()).map(|i| group.o1[i] * group.post_gate(i)));
        output.residual_out.extend(&group.s);
        output.rstd.push(1.0 / group.sigma);
        output.mean.push(group.mean);
    }
    output
}

/// The gradients, from `grad`, the gradient of o, and `grad_residual_out`, the gradient that
/// arrives at `residual_out`, if any. With w the weight, 1 + weight, or 1, over each group:
///
/// ```text
/// do1 = do [* g(gate)        gate position post]
/// dr = scale * do1 * w
/// dq = (dr - r * mean(r * dr)) / sigma
/// dp = dq [- mean(dq)        center]
/// ds = dp [* g(gate)         gate position pre]
///
/// dx = dresidual = ds + grad_residual_out
/// dgate = dp * s * g'(gate)  (pre)   or   do * o1 * g'(gate)  (post)
/// dweight = sum over rows of do1 * scale * r
/// dbias = sum over rows of do1
/// ```
///
/// # Panics
///
/// As [`forward`], and where a gradient does not have rows * d elements.
pub fn backward(
    options: &Normalize,
    input: &Input,
    grad: &[f64],
    grad_residual_out: Option<&[f64]>,
) -> Gradients {
    gradients(options, input, None, grad, grad_residual_out)
}

/// [`backward`], with the mean and sigma that the forward kept.
///
/// # Panics
///
/// As [`backward`], and where the statistics do not have one number for each row and group.
pub fn backward_from_statistics(
    options: &Normalize,
    input: &Input,
    statistics: &Statistics,
    grad: &[f64],
    grad_residual_out: Option<&[f64]>,
) -> Gradients {
    gradients(options, input, Some(statistics), grad, grad_residual_out)
}

fn gradients(
    options: &Normalize,
    input: &Input,
    statistics: Option<&Statistics>,
    grad: &[f64],
    grad_residual_out: Option<&[f64]>,
) -> Gradients {
    let Input { rows, d, .. } = *input;
    check_length("the gradient", Some(grad), rows * d);
    check_length("the gradient of residual_out", grad_residual_out, rows * d);
    let mut gradients = zero_gradients(input);
    for group in groups(options, input, statistics) {
        let e = group.r.len();
        let grad = &grad[group.start..group.start + e];
        let do1: Vec<f64> = (0..e).map(|i| grad[i] * group.post_gate(i)).collect();
        let dr: Vec<f64> = (0..e).map(|i| options.scale * do1[i] * group.w[i]).collect();
        let mean_r_dr = mean((0..e).map(|i| group.r[i] * dr[i]));
        let dq: Vec<f64> = (0..e).map(|i| (dr[i] - group.r[i] * mean_r_dr) / group.sigma).collect();
        let mean_dq = if options.center { mean(dq.iter().copied()) } else { 0.0 };
        for i in 0..e {
            let at = group.start + i;
            let feature = at % d;
            let dp = dq[i] - mean_dq;
            let ds = dp * group.pre_gate(i);
            gradients.dx[at] = ds + grad_residual_out.map_or(0.0, |grad| grad[at]);
            if let (Some(dgate), Some(gate)) = (&mut gradients.dgate, input.gate) {
                let dg = match options.gate_position {
                    GatePosition::Pre => dp * group.s[i],
                    GatePosition::Post => grad[i] * group.o1[i],
                };
                dgate[at] = act::backward(options.gate_act, gate[at], dg);
            }
            if let Some(dweight) = &mut gradients.dweight {
                dweight[feature] += do1[i] * options.scale * group.r[i];
            }
            if let Some(dbias) = &mut gradients.dbias {
                dbias[feature] += do1[i];
            }
        }
    }
    gradients
}

/// The sum of the absolute terms of o in [`forward`]. What counts as the terms of q is
/// `|p| + mean |p|` if centered, because the mean carries a rounding error of that size; and the
/// terms of 1 + weight are 1 and |weight|.
pub fn forward_magnitude(options: &Normalize, input: &Input) -> Vec<f64> {
    let mut o = Vec::new();
    for group in groups(options, input, None) {
        let o1 = group.o1_magnitude(options);
        o.extend((0..o1.len()).map(|i| o1[i] * group.post_gate(i).abs()));
    }
    o
}

/// The sum of the absolute terms of [`backward`], counted in the same way.
pub fn backward_magnitude(
    options: &Normalize,
    input: &Input,
    grad: &[f64],
    grad_residual_out: Option<&[f64]>,
) -> Gradients {
    let mut gradients = zero_gradients(input);
    for group in groups(options, input, None) {
        let e = group.r.len();
        let grad = &grad[group.start..group.start + e];
        let (r, o1) = (group.r_magnitude(options), group.o1_magnitude(options));
        let do1: Vec<f64> = (0..e).map(|i| (grad[i] * group.post_gate(i)).abs()).collect();
        let dr: Vec<f64> =
            (0..e).map(|i| options.scale.abs() * do1[i] * group.w_magnitude[i]).collect();
        let mean_r_dr = mean((0..e).map(|i| r[i] * dr[i]));
        let dq: Vec<f64> = (0..e).map(|i| (dr[i] + r[i] * mean_r_dr) / group.sigma).collect();
        let mean_dq = if options.center { mean(dq.iter().copied()) } else { 0.0 };
        for i in 0..e {
            let at = group.start + i;
            let feature = at % input.d;
            let dp = dq[i] + mean_dq;
            let ds = dp * group.pre_gate(i).abs();
            gradients.dx[at] = ds + grad_residual_out.map_or(0.0, |grad| grad[at].abs());
            if let (Some(dgate), Some(gate)) = (&mut gradients.dgate, input.gate) {
                let dg = match options.gate_position {
                    GatePosition::Pre => dp * group.s[i].abs(),
                    GatePosition::Post => grad[i].abs() * o1[i],
                };
                dgate[at] = dg * act::slope_magnitude(options.gate_act, gate[at]);
            }
            if let Some(dweight) = &mut gradients.dweight {
                dweight[feature] += do1[i] * options.scale.abs() * r[i];
            }
            if let Some(dbias) = &mut gradients.dbias {
                dbias[feature] += do1[i];
            }
        }
    }
    gradients
}

/// One group of one row, with everything the forward computes for it.
struct Group {
    /// Where it starts in x.
    start: usize,
    s: Vec<f64>,
    p: Vec<f64>,
    mean: f64,
    sigma: f64,
    r: Vec<f64>,
    o1: Vec<f64>,
    /// weight, 1 + weight, or 1; and the sum of its absolute terms.
    w: Vec<f64>,
    w_magnitude: Vec<f64>,
    bias: Vec<f64>,
    gate_position: GatePosition,
    /// g(gate), where there is a gate.
    gate: Option<Vec<f64>>,
}

impl Group {
    /// g(gate) where it multiplies before the normalization, otherwise 1.
    fn pre_gate(&self, i: usize) -> f64 {
        match (&self.gate, self.gate_position) {
            (Some(gate), GatePosition::Pre) => gate[i],
            _ => 1.0,
        }
    }

    /// g(gate) where it multiplies after the normalization, otherwise 1.
    fn post_gate(&self, i: usize) -> f64 {
        match (&self.gate, self.gate_position) {
            (Some(gate), GatePosition::Post) => gate[i],
            _ => 1.0,
        }
    }

    fn r_magnitude(&self, options: &Normalize) -> Vec<f64> {
        let of_mean = if options.center { mean(self.p.iter().map(|p| p.abs())) } else { 0.0 };
        self.p.iter().map(|p| (p.abs() + of_mean) / self.sigma).collect()
    }

    fn o1_magnitude(&self, options: &Normalize) -> Vec<f64> {
        let r = self.r_magnitude(options);
        (0..r.len())
            .map(|i| options.scale.abs() * r[i] * self.w_magnitude[i] + self.bias[i].abs())
            .collect()
    }
}

/// The forward, group by group, in the order of memory; from the statistics, where there are some.
fn groups(options: &Normalize, input: &Input, statistics: Option<&Statistics>) -> Vec<Group> {
    let Input { rows, d, .. } = *input;
    check_length("x", Some(input.x), rows * d);
    check_length("residual", input.residual, rows * d);
    check_length("gate", input.gate, rows * d);
    check_length("weight", input.weight, d);
    check_length("bias", input.bias, d);
    assert!(options.groups > 0 && d.is_multiple_of(options.groups), "groups do not divide d");
    let e = d / options.groups;
    let count = rows * options.groups;
    check_length("rstd", statistics.map(|kept| kept.rstd), count);
    if options.center {
        check_length("the mean", statistics.map(|kept| kept.mean), count);
    }
    let group = |row: usize, group: usize| {
        let start = row * d + group * e;
        let features = group * e..(group + 1) * e;
        let elements = start..start + e;
        let s: Vec<f64> = elements
            .clone()
            .map(|at| input.x[at] + input.residual.map_or(0.0, |r| r[at]))
            .collect();
        let gate: Option<Vec<f64>> = input.gate.map(|gate| {
            elements.clone().map(|at| act::forward(options.gate_act, gate[at])).collect()
        });
        let p: Vec<f64> = match (&gate, options.gate_position) {
            (Some(gate), GatePosition::Pre) => (0..e).map(|i| s[i] * gate[i]).collect(),
            _ => s.clone(),
        };
        // The mean is taken twice: what its rounding leaves over is small beside p, but not
        // beside q, where all of p is nearly the same.
        let (mut mean_p, mut q) = (0.0, p.clone());
        if options.center {
            mean_p = match statistics {
                Some(kept) => kept.mean[row * options.groups + group],
                None => mean(p.iter().copied()),
            };
            let rest = mean(p.iter().map(|p| p - mean_p));
            q = p.iter().map(|p| p - mean_p - rest).collect();
            mean_p += rest;
        }
        let sigma = match statistics {
            Some(kept) => 1.0 / kept.rstd[row * options.groups + group],
            None => (mean(q.iter().map(|q| q * q)) + options.eps).sqrt(),
        };
        let r: Vec<f64> = q.iter().map(|q| q / sigma).collect();
        let weight = |form: fn(f64) -> f64| -> Vec<f64> {
            features.clone().map(|j| input.weight.map_or(1.0, |weight| form(weight[j]))).collect()
        };
        let (w, w_magnitude) = match options.weight_form {
            WeightForm::Plain => (weight(|w| w), weight(f64::abs)),
            WeightForm::OnePlus => (weight(|w| 1.0 + w), weight(|w| 1.0 + w.abs())),
        };
        let bias: Vec<f64> =
            features.clone().map(|j| input.bias.map_or(0.0, |bias| bias[j])).collect();
        let o1 = (0..e).map(|i| options.scale * r[i] * w[i] + bias[i]).collect();
        Group {
            start,
            s,
            p,
            mean: mean_p,
            sigma,
            r,
            o1,
            w,
            w_magnitude,
            bias,
            gate_position: options.gate_position,
            gate,
        }
    };
    (0..count).map(|i| group(i / options.groups, i % options.groups)).collect()
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    // With what each addition loses, so that the sum is as exact as its terms.
    let (mut sum, mut lost) = (0.0, 0.0);
    for value in values {
        let next: f64 = sum + value;
        lost += if f64::abs(sum) >= value.abs() { sum - next + value } else { value - next + sum };
        sum = next;
    }
    // An infinite sum has lost nothing, though the difference of infinities says NaN.
    (if sum.is_finite() { sum + lost } else { sum }) / count
}

fn zero_gradients(input: &Input) -> Gradients {
    let Input { rows, d, .. } = *input;
    Gradients {
        dx: vec![0.0; rows * d],
        dgate: input.gate.map(|_| vec![0.0; rows * d]),
        dweight: input.weight.map(|_| vec![0.0; d]),
        dbias: input.bias.map(|_| vec![0.0; d]),
    }
}

fn check_length(name: &str, values: Option<&[f64]>, expected: usize) {
    if let Some(values) = values {
        assert_eq!(values.len(), expected, "elements of {name}");
    }
}

#[cfg(test)]
mod tests {
    use super::super::Random;
    use super::super::checks::{assert_close, check_gradient, check_magnitude, dot, smooth_values};
    use super::*;
    use crate::ops::act::Act;

    /// Every gradient of one call against the differences of its forward. Bits of `with` say which
    /// of residual, gate, weight, bias and the gradient of residual_out there are.
    fn check(options: &Normalize, rows: usize, d: usize, with: usize, random: &mut Random) {
        let what = format!("{options:?} {rows} x {d}, with {with:05b}");
        let x = smooth_values(random, rows * d);
        let residual = random.normals(rows * d);
        let gate = smooth_values(random, rows * d);
        let (weight, bias) = (random.normals(d), random.normals(d));
        let (grad, grad_residual_out) = (random.normals(rows * d), random.normals(rows * d));
        let given = |bit: usize, values| if with >> bit & 1 == 1 { Some(values) } else { None };
        let input = Input {
            x: &x,
            residual: given(0, &residual[..]),
            gate: given(1, &gate[..]),
            weight: given(2, &weight[..]),
            bias: given(3, &bias[..]),
            rows,
            d,
        };
        let grad_residual_out = given(4, &grad_residual_out[..]);
        let loss = |input: &Input| {
            let output = forward(options, input);
            dot(&grad, &output.o)
                + grad_residual_out.map_or(0.0, |grad| dot(grad, &output.residual_out))
        };
        let magnitude = backward_magnitude(options, &input, &grad, grad_residual_out);
        let Gradients { dx, dgate, dweight, dbias } =
            backward(options, &input, &grad, grad_residual_out);
        let o = forward(options, &input).o;
        check_magnitude(&what, &o, &forward_magnitude(options, &input));

        check_gradient(&format!("dx, {what}"), &x, &dx, |x| loss(&Input { x, ..input }));
        check_magnitude(&what, &dx, &magnitude.dx);
        if input.residual.is_some() {
            check_gradient(&format!("dresidual, {what}"), &residual, &dx, |residual| {
                loss(&Input { residual: Some(residual), ..input })
            });
        }
        assert_eq!(dgate.is_some(), input.gate.is_some());
        if let Some(dgate) = dgate {
            check_gradient(&format!("dgate, {what}"), &gate, &dgate, |gate| {
                loss(&Input { gate: Some(gate), ..input })
            });
            check_magnitude(&what, &dgate, &magnitude.dgate.unwrap());
        }
        assert_eq!(dweight.is_some(), input.weight.is_some());
        if let Some(dweight) = dweight {
            check_gradient(&format!("dweight, {what}"), &weight, &dweight, |weight| {
                loss(&Input { weight: Some(weight), ..input })
            });
            check_magnitude(&what, &dweight, &magnitude.dweight.unwrap());
        }
        assert_eq!(dbias.is_some(), input.bias.is_some());
        if let Some(dbias) = dbias {
            check_gradient(&format!("dbias, {what}"), &bias, &dbias, |bias| {
                loss(&Input { bias: Some(bias), ..input })
            });
            check_magnitude(&what, &dbias, &magnitude.dbias.unwrap());
        }
    }

    #[test]
    fn gradients_of_all_options() {
        let mut random = Random::new(10);
        for center in [false, true] {
            for groups in [1, 2] {
                for weight_form in [WeightForm::Plain, WeightForm::OnePlus] {
                    for gate_position in [GatePosition::Pre, GatePosition::Post] {
                        for with in 0..32 {
                            let options = Normalize {
                                center,
                                eps: 0.3,
                                scale: if with % 3 == 0 { 1.0 } else { -0.7 },
                                groups,
                                weight_form,
                                gate_position,
                                gate_act: Act::Sigmoid,
                            };
                            check(&options, 3, 6, with, &mut random);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn gradients_of_all_gates() {
        let mut random = Random::new(11);
        for gate_act in Act::ALL {
            for gate_position in [GatePosition::Pre, GatePosition::Post] {
                for center in [false, true] {
                    let options = Normalize {
                        center,
                        eps: 0.5,
                        gate_position,
                        gate_act,
                        ..Normalize::default()
                    };
                    check(&options, 2, 5, 0b11111, &mut random);
                    check(&options, 2, 5, 0b00010, &mut random);
                }
            }
        }
    }

    #[test]
    fn empty_and_small_shapes() {
        let mut random = Random::new(12);
        for (rows, d) in [(0, 4), (3, 0), (1, 1)] {
            let options = Normalize { eps: 0.1, ..Normalize::default() };
            check(&options, rows, d, 0b11111, &mut random);
        }
    }

    #[test]
    fn known_answers() {
        // q = (-1, 1), sigma = sqrt(1 + 3) = 2, r = (-1/2, 1/2).
        let options = Normalize { center: true, eps: 3.0, scale: 4.0, ..Normalize::default() };
        let input = Input { x: &[2.0, 4.0], rows: 1, d: 2, ..Input::default() };
        let output = forward(&options, &input);
        assert_eq!(output.o, [-2.0, 2.0]);
        assert_eq!((output.mean, output.rstd), (vec![3.0], vec![0.5]));
        // With weight and bias, and the same x as the sum with a residual.
        let input = Input {
            x: &[1.0, 1.0],
            residual: Some(&[1.0, 3.0]),
            weight: Some(&[10.0, 20.0]),
            bias: Some(&[1.0, 2.0]),
            ..input
        };
        let output = forward(&options, &input);
        assert_eq!((output.o, output.residual_out), (vec![-19.0, 42.0], vec![2.0, 4.0]));
        let one_plus = Normalize { weight_form: WeightForm::OnePlus, ..options };
        assert_eq!(forward(&one_plus, &input).o, [-21.0, 44.0]);
        // Gates: relu of (2, -1) is (2, 0).
        let gated = Input { gate: Some(&[2.0, -1.0]), ..input };
        let post = Normalize { gate_position: GatePosition::Post, gate_act: Act::Relu, ..options };
        assert_eq!(forward(&post, &gated).o, [-38.0, 0.0]);
        // Before: p = (4, 0), mean 2, q = (2, -2), sigma = sqrt(4 + 5) = 3.
        let pre = Normalize {
            eps: 5.0,
            scale: 3.0,
            gate_position: GatePosition::Pre,
            gate_act: Act::Relu,
            ..options
        };
        let output = forward(&pre, &gated);
        assert_close("pre", &output.o, &[21.0, -38.0]);
        assert_eq!((output.mean, output.residual_out), (vec![2.0], vec![2.0, 4.0]));
        // Two groups of one feature: every one becomes 1 in absolute value.
        let two = Normalize { groups: 2, eps: 0.0, ..Normalize::default() };
        let output = forward(&two, &Input { x: &[-4.0, 8.0], rows: 1, d: 2, ..Input::default() });
        assert_eq!((output.o, output.rstd), (vec![-1.0, 1.0], vec![0.25, 0.125]));
    }

    #[test]
    fn known_gradients() {
        // r = (3, 1) / sigma with sigma = sqrt(5 + 11) = 4. With do = (4, 0): mean(r do) = 3/2,
        // dx = (4 - 3/4 * 3/2, 0 - 1/4 * 3/2) / 4.
        let options = Normalize { eps: 11.0, ..Normalize::default() };
        let input = Input { x: &[3.0, 1.0], rows: 1, d: 2, ..Input::default() };
        let gradients = backward(&options, &input, &[4.0, 0.0], Some(&[100.0, 200.0]));
        assert_close("dx", &gradients.dx, &[100.0 + 2.875 / 4.0, 200.0 - 0.375 / 4.0]);
        let input = Input { weight: Some(&[1.0, 1.0]), bias: Some(&[0.0, 0.0]), ..input };
        let gradients = backward(&options, &input, &[4.0, 5.0], None);
        assert_close("dweight", &gradients.dweight.unwrap(), &[3.0, 1.25]);
        assert_close("dbias", &gradients.dbias.unwrap(), &[4.0, 5.0]);
    }

    #[test]
    fn a_large_mean_does_not_hide_the_variance() {
        let x: Vec<f64> = (0..8).map(|i| 1e9 + f64::from(i % 2)).collect();
        let options = Normalize { center: true, eps: 0.0, ..Normalize::default() };
        let output = forward(&options, &Input { x: &x, rows: 1, d: 8, ..Input::default() });
        assert_eq!(output.rstd, [2.0]);
        assert_eq!(output.o, [-1.0, 1.0].repeat(4));
    }
}
