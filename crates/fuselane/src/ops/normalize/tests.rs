use super::*;
use crate::{DType, Element, Isa, Real, with_isa};
use half::{bf16, f16};

/// Numbers that repeat from run to run, in -1..1.
pub(crate) fn numbers(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn typed<T: Element>(values: &[f64]) -> Vec<T> {
    values.iter().map(|&value| T::from_f64(value)).collect()
}

fn widened<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| value.to_f64()).collect()
}

/// The operands of a call with everything in it, as f64.
#[derive(Clone, Default)]
struct Case {
    d: usize,
    x: Vec<f64>,
    residual: Option<Vec<f64>>,
    gate: Option<Vec<f64>>,
    weight: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
    grad: Vec<f64>,
    grad_sum: Option<Vec<f64>>,
}

impl Case {
    fn new(rows: usize, d: usize, gated: bool) -> Self {
        let all = |seed| numbers(rows * d, seed);
        Self {
            d,
            x: all(1),
            residual: Some(all(2)),
            gate: gated.then(|| all(3).iter().map(|v| 3.0 * v).collect()),
            weight: Some(numbers(d, 4)),
            bias: Some(numbers(d, 5)),
            grad: all(6),
            grad_sum: Some(all(7)),
        }
    }

    fn rounded<T: Element>(self) -> Self {
        let round = |v: Vec<f64>| widened(&typed::<T>(&v));
        Self {
            x: round(self.x),
            residual: self.residual.map(round),
            gate: self.gate.map(round),
            grad: round(self.grad),
            grad_sum: self.grad_sum.map(round),
            ..self
        }
    }

    fn rows(&self) -> usize {
        self.x.len() / self.d
    }
}

/// What a call gives, as f64.
#[derive(Debug, Clone, Default, PartialEq)]
struct Outcome {
    o: Vec<f64>,
    sum: Vec<f64>,
    dx: Vec<f64>,
    dresidual: Vec<f64>,
    dgate: Vec<f64>,
    dweight: Vec<f64>,
    dbias: Vec<f64>,
}

fn act(act: Act, x: f64) -> (f64, f64) {
    let x = [x];
    let (one, x) = ([1.0], View::new(&x, &[1]).unwrap());
    let value = act.forward(x).unwrap().as_slice::<f64>().unwrap()[0];
    let slope = act.backward(x, View::new(&one, &[1]).unwrap()).unwrap();
    (value, slope.as_slice::<f64>().unwrap()[0])
}

/// The formulas at the head of this file, element by element.
fn plain(norm: &Normalize, case: &Case) -> Outcome {
    let (d, e) = (case.d, case.d / norm.groups);
    let mut out = Outcome {
        o: vec![0.0; case.x.len()],
        dx: vec![0.0; case.x.len()],
        dgate: vec![0.0; case.x.len()],
        dweight: vec![0.0; d],
        dbias: vec![0.0; d],
        ..Outcome::default()
    };
    let residual = |i: usize| case.residual.as_ref().map_or(0.0, |v| v[i]);
    out.sum = (0..case.x.len()).map(|i| case.x[i] + residual(i)).collect();
    let (pre, post) = match (&case.gate, norm.gate_position) {
        (None, _) => (false, false),
        (_, GatePosition::Pre) => (true, false),
        (_, GatePosition::Post) => (false, true),
    };
    let g: Vec<(f64, f64)> = match &case.gate {
        Some(gate) => gate.iter().map(|&x| act(norm.gate_act, x)).collect(),
        None => vec![(1.0, 0.0); case.x.len()],
    };
    let one = if norm.weight_form == WeightForm::OnePlus { 1.0 } else { 0.0 };
    for start in (0..case.x.len()).step_by(e.max(1)) {
        let at = start..start + e;
        let mean = |f: &dyn Fn(usize) -> f64| at.clone().map(f).sum::<f64>() / e as f64;
        let p = |i: usize| out.sum[i] * if pre { g[i].0 } else { 1.0 };
        let m = if norm.center { mean(&p) } else { 0.0 };
        let sigma = (mean(&|i| (p(i) - m).powi(2)) + norm.eps).sqrt();
        let r = |i: usize| (p(i) - m) / sigma;
        let w = |i: usize| norm.scale * case.weight.as_ref().map_or(1.0, |w| one + w[i % d]);
        let o1 = |i: usize| w(i) * r(i) + case.bias.as_ref().map_or(0.0, |b| b[i % d]);
        let do1 = |i: usize| case.grad[i] * if post { g[i].0 } else { 1.0 };
        let dr = |i: usize| do1(i) * w(i);
        let mean_rdr = mean(&|i| r(i) * dr(i));
        let mean_dr = if norm.center { mean(&dr) } else { 0.0 };
        let dp = |i: usize| (dr(i) - r(i) * mean_rdr - mean_dr) / sigma;
        for i in at.clone() {
            out.o[i] = o1(i) * if post { g[i].0 } else { 1.0 };
            let arrives = case.grad_sum.as_ref().map_or(0.0, |v| v[i]);
            out.dx[i] = dp(i) * if pre { g[i].0 } else { 1.0 } + arrives;
            out.dgate[i] = g[i].1 * if pre { dp(i) * out.sum[i] } else { case.grad[i] * o1(i) };
            out.dweight[i % d] += do1(i) * norm.scale * r(i);
            out.dbias[i % d] += do1(i);
        }
    }
    out.dresidual = out.dx.clone();
    out
}

/// The same by the operator, forward then backward, into memory full of NaN.
fn run<T: Element>(norm: &Normalize, case: &Case) -> Result<Outcome> {
    let (rows, d, n) = (case.rows(), case.d, case.x.len());
    let shape = [rows, d];
    let [x, grad] = [&case.x, &case.grad].map(|v| typed::<T>(v));
    let optional = |v: &Option<Vec<f64>>| v.as_ref().map(|v| typed::<T>(v));
    let (residual, gate, grad_sum) =
        (optional(&case.residual), optional(&case.gate), optional(&case.grad_sum));
    let parameter = |v: &Option<Vec<f64>>| v.as_ref().map(|v| typed::<T::Real>(v));
    let (weight, bias) = (parameter(&case.weight), parameter(&case.bias));
    let nan = T::from_f64(f64::NAN);
    let [mut o, mut sum, mut dx, mut dresidual, mut dgate] = [(); 5].map(|()| vec![nan; n]);
    let none = T::Real::of(f64::NAN);
    let [mut rstd, mut mean] = [(); 2].map(|()| vec![none; rows * norm.groups]);
    let [mut dweight, mut dbias] = [(); 2].map(|()| vec![none; d]);
    let residual_view = residual.as_ref().map(|v| View::new(v, &shape).unwrap());
    let gate_view = gate.as_ref().map(|v| View::new(v, &shape).unwrap());
    let grad_sum_view = grad_sum.as_ref().map(|v| View::new(v, &shape).unwrap());
    let weight_view = weight.as_ref().map(|v| View::new(v, &[d]).unwrap());
    let bias_view = bias.as_ref().map(|v| View::new(v, &[d]).unwrap());
    let statistics = [rows, norm.groups];
    let x_view = View::new(&x, &shape)?;
    norm.forward_into(NormalizeForward {
        weight: weight_view,
        bias: bias_view,
        gate: gate_view,
        residual: match residual_view {
            Some(residual) => Residual::AddInto(residual, ViewMut::new(&mut sum, &shape)?),
            None => Residual::None,
        },
        rstd: Some(ViewMut::new(&mut rstd, &statistics)?),
        mean: if norm.center { Some(ViewMut::new(&mut mean, &statistics)?) } else { None },
        ..NormalizeForward::new(x_view, ViewMut::new(&mut o, &shape)?)
    })?;
    norm.backward_into(NormalizeBackward {
        residual: residual_view,
        gate: gate_view,
        weight: weight_view,
        bias: bias_view,
        mean: if norm.center { Some(View::new(&mean, &statistics)?) } else { None },
        grad_residual_out: grad_sum_view,
        dx: Some(ViewMut::new(&mut dx, &shape)?),
        dresidual: Some(ViewMut::new(&mut dresidual, &shape)?),
        dgate: gate.is_some().then(|| ViewMut::new(&mut dgate, &shape)).transpose()?,
        dweight: weight.is_some().then(|| ViewMut::new(&mut dweight, &[d])).transpose()?,
        dbias: Some(ViewMut::new(&mut dbias, &[d])?),
        ..NormalizeBackward::new(View::new(&grad, &shape)?, x_view, View::new(&rstd, &statistics)?)
    })?;
    Ok(Outcome {
        o: widened(&o),
        sum: if residual.is_some() { widened(&sum) } else { case.x.clone() },
        dx: widened(&dx),
        dresidual: widened(&dresidual),
        dgate: if gate.is_some() { widened(&dgate) } else { vec![0.0; n] },
        dweight: if weight.is_some() { widened(&dweight) } else { vec![0.0; d] },
        dbias: widened(&dbias),
    })
}

/// The largest difference, relative to the size of the largest element.
fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let size = want.iter().fold(1e-3, |m: f64, w| m.max(w.abs()));
    let apart = |(g, w): (&f64, &f64)| if g.is_nan() { f64::INFINITY } else { (g - w).abs() };
    got.iter().zip(want).map(apart).fold(0.0, f64::max) / size
}

fn assert_close(got: &Outcome, want: &Outcome, bound: f64, what: &str) {
    let all = |o: &Outcome| {
        let Outcome { o, sum, dx, dresidual, dgate, dweight, dbias } = o.clone();
        [o, sum, dx, dresidual, dgate, dweight, dbias]
    };
    let names = ["o", "sum", "dx", "dresidual", "dgate", "dweight", "dbias"];
    for ((got, want), name) in all(got).iter().zip(all(want)).zip(names) {
        let error = error(got, &want);
        assert!(error <= bound, "{what}: {name} is off by {error:e}");
    }
}

/// Options that matter together, for a row of `d`.
fn variants(d: usize) -> Vec<Normalize> {
    let mut all = vec![
        Normalize::rms_norm(),
        Normalize::layer_norm(),
        Normalize { scale: -1.5, weight_form: WeightForm::OnePlus, ..Normalize::rms_norm() },
    ];
    for groups in [2, 3] {
        if d.is_multiple_of(groups) {
            all.push(Normalize::rms_norm().with_groups(groups));
            all.push(Normalize { scale: 0.5, ..Normalize::layer_norm().with_groups(groups) });
        }
    }
    for norm in all.clone() {
        all.push(Normalize { gate_position: GatePosition::Post, ..norm });
    }
    all
}

#[test]
fn agrees_with_the_formulas() -> Result<()> {
    for isa in Isa::available() {
        with_isa(isa, || -> Result<()> {
            for d in [1, 2, 7, 8, 9, 15, 16, 17, 30, 127, 2048] {
                for norm in variants(d) {
                    for gated in [false, true] {
                        let what = format!("{isa} d {d} gated {gated} {norm:?}");
                        // A row of one, centered, is all rounding error over a tiny sigma.
                        let norm = if d < 8 { norm.with_eps(0.1) } else { norm };
                        let case = compare::<f64>(&norm, Case::new(3, d, gated), 1e-12, &what)?;
                        let case = compare::<f32>(&norm, case, 4e-6, &what)?;
                        let case = compare::<bf16>(&norm, case, 4.1e-3, &what)?;
                        compare::<f16>(&norm, case, 6.5e-4, &what)?;
                    }
                }
            }
            Ok(())
        })??;
    }
    Ok(())
}

/// Norms with each gate that has loops of its own.
pub(crate) fn usual_gates() -> impl Iterator<Item = Normalize> {
    [GatePosition::Pre, GatePosition::Post].into_iter().flat_map(|gate_position| {
        [Act::Sigmoid, Act::Silu].map(|gate_act| Normalize {
            gate_position,
            gate_act,
            ..Normalize::rms_norm()
        })
    })
}

/// Compares all results on numbers of `T` with the plain formulas, and gives those numbers back.
fn compare<T: Element>(norm: &Normalize, case: Case, bound: f64, what: &str) -> Result<Case> {
    let case = case.rounded::<T>();
    assert_close(&run::<T>(norm, &case)?, &plain(norm, &case), bound, what);
    Ok(case)
}

#[test]
fn long_rows() -> Result<()> {
    for d in [100_003, 70_000] {
        for norm in [Normalize::rms_norm(), Normalize::layer_norm()] {
            for gated in [false, true] {
                let case = Case::new(2, d, gated).rounded::<f32>();
                let want = plain(&norm, &case);
                assert_close(&run::<f32>(&norm, &case)?, &want, 2e-6, &format!("{d} {norm:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn every_gate() -> Result<()> {
    for gate_act in Act::ALL {
        for gate_position in [GatePosition::Pre, GatePosition::Post] {
            for center in [false, true] {
                let norm = Normalize { gate_act, gate_position, center, ..Normalize::default() };
                for residual in [false, true] {
                    let mut case = Case::new(4, 37, true);
                    if !residual {
                        (case.residual, case.grad_sum) = (None, None);
                    }
                    let what = format!("{norm:?}");
                    let case = compare::<f64>(&norm, case, 1e-11, &what)?;
                    compare::<f32>(&norm, case, 1e-5, &what)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_are_those_of_the_forward() -> Result<()> {
    // Central differences of sum(o * grad) + sum(sum * grad_sum), all operands but the weight.
    for gate_position in [GatePosition::Pre, GatePosition::Post] {
        for center in [false, true] {
            let norm = Normalize {
                gate_position,
                center,
                gate_act: Act::Silu,
                weight_form: WeightForm::OnePlus,
                scale: 0.7,
                groups: 2,
                ..Normalize::default()
            };
            let case = Case::new(2, 6, true);
            let loss = |case: &Case| -> f64 {
                let out = run::<f64>(&norm, case).unwrap();
                let sums = case.grad_sum.as_ref().unwrap();
                let o: f64 = out.o.iter().zip(&case.grad).map(|(a, b)| a * b).sum();
                o + out.sum.iter().zip(sums).map(|(a, b)| a * b).sum::<f64>()
            };
            let out = run::<f64>(&norm, &case)?;
            type Pick = fn(&mut Case) -> &mut Vec<f64>;
            let operands: [(Pick, &[f64]); 5] = [
                (|c| &mut c.x, &out.dx),
                (|c| c.residual.as_mut().unwrap(), &out.dresidual),
                (|c| c.gate.as_mut().unwrap(), &out.dgate),
                (|c| c.weight.as_mut().unwrap(), &out.dweight),
                (|c| c.bias.as_mut().unwrap(), &out.dbias),
            ];
            for (operand, (pick, gradient)) in operands.into_iter().enumerate() {
                for (i, want) in gradient.iter().enumerate() {
                    let moved = |by: f64| {
                        let mut case = case.clone();
                        pick(&mut case)[i] += by;
                        loss(&case)
                    };
                    let got = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                    assert!((got - want).abs() < 1e-7, "{operand} {i}: {got} {want} {norm:?}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_mean_far_above_the_deviation() -> Result<()> {
    for isa in Isa::available() {
        with_isa(isa, || -> Result<()> {
            for mean in [1e4, 1e5, 1e6] {
                for d in [37, 1000, 5000] {
                    let norm = Normalize::layer_norm();
                    let mut case = Case::new(3, d, false);
                    (case.residual, case.grad_sum) = (None, None);
                    case.x.iter_mut().for_each(|x| *x = mean + 2.0 * *x);
                    let case = case.rounded::<f32>();
                    let want = plain(&norm, &case);
                    let got = run::<f32>(&norm, &case)?;
                    assert_close(&got, &want, 2e-6, &format!("{isa} mean {mean} d {d}"));
                }
            }
            Ok(())
        })??;
    }
    Ok(())
}

#[test]
fn constant_rows_are_zero_when_centered() -> Result<()> {
    let x = [1234.567f32; 100];
    let o = Normalize::layer_norm().forward(View::new(&x, &[2, 50])?, None)?;
    assert!(o.as_slice::<f32>()?.iter().all(|&o| o == 0.0));
    Ok(())
}

#[test]
fn dx_is_orthogonal_to_r() -> Result<()> {
    let norm = Normalize::layer_norm().with_eps(0.0);
    let (x, grad) = (numbers(500, 1), numbers(500, 2));
    let [x, grad] = [View::new(&x, &[1, 500])?, View::new(&grad, &[1, 500])?];
    let kept = norm.forward_keeping(x, None)?;
    let dx = norm.backward(grad, x, None, &kept)?.dx;
    let (r, dx) = (kept.o.as_slice::<f64>()?, dx.as_slice::<f64>()?);
    assert!(dx.iter().zip(r).map(|(a, b)| a * b).sum::<f64>().abs() < 1e-12);
    assert!(dx.iter().sum::<f64>().abs() < 1e-12);
    Ok(())
}

#[test]
fn the_sum_in_place_is_the_sum() -> Result<()> {
    for d in [19, 70_001] {
        for gate in [false, true] {
            let shape = [2, d];
            let (x, residual) =
                (typed::<bf16>(&numbers(2 * d, 1)), typed::<bf16>(&numbers(2 * d, 2)));
            let g = typed::<bf16>(&numbers(2 * d, 3));
            let gate = if gate { Some(View::new(&g, &shape)?) } else { None };
            let [mut o, mut sum, mut o2, mut o3] = [(); 4].map(|()| vec![bf16::NAN; 2 * d]);
            let mut in_place = residual.clone();
            let norm = Normalize::layer_norm();
            let x = View::new(&x, &shape)?;
            let residual_view = View::new(&residual, &shape)?;
            norm.forward_into(NormalizeForward {
                gate,
                residual: Residual::AddInto(residual_view, ViewMut::new(&mut sum, &shape)?),
                ..NormalizeForward::new(x, ViewMut::new(&mut o, &shape)?)
            })?;
            norm.forward_into(NormalizeForward {
                gate,
                residual: Residual::AddInPlace(ViewMut::new(&mut in_place, &shape)?),
                ..NormalizeForward::new(x, ViewMut::new(&mut o2, &shape)?)
            })?;
            norm.forward_into(NormalizeForward {
                gate,
                residual: Residual::Add(residual_view),
                ..NormalizeForward::new(x, ViewMut::new(&mut o3, &shape)?)
            })?;
            assert!(sum == in_place && o == o2 && o == o3);
            let added = x.to_f64_vec().into_iter().zip(widened(&residual));
            assert!(added.zip(&sum).all(|((a, b), s)| bf16::from_f64(a + b) == *s));
        }
    }
    Ok(())
}

#[test]
fn from_the_kept_sum() -> Result<()> {
    // Where the sum is exact, the backward from it is the backward from its addends.
    let x: Vec<f32> = numbers(60, 1).iter().map(|v| (v * 64.0).round() as f32).collect();
    let residual: Vec<f32> = x.iter().rev().copied().collect();
    let sum: Vec<f32> = x.iter().zip(&residual).map(|(a, b)| a + b).collect();
    let (grad, rstd) = (typed::<f32>(&numbers(60, 2)), [0.02f32, 0.03]);
    let view = |v| View::new(v, &[2, 30]);
    let (mut from_both, mut from_sum) = ([f32::NAN; 60], [f32::NAN; 60]);
    let rstd = View::new(&rstd, &[2, 1])?;
    let norm = Normalize::rms_norm();
    norm.backward_into(NormalizeBackward {
        residual: Some(view(&residual)?),
        dresidual: Some(ViewMut::new(&mut from_both, &[2, 30])?),
        ..NormalizeBackward::new(view(&grad)?, view(&x)?, rstd)
    })?;
    norm.backward_into(NormalizeBackward {
        dx: Some(ViewMut::new(&mut from_sum, &[2, 30])?),
        ..NormalizeBackward::new(view(&grad)?, view(&sum)?, rstd)
    })?;
    assert_eq!(from_both, from_sum);
    Ok(())
}

#[test]
fn a_large_gate_beside_a_small_row() -> Result<()> {
    // The product of gate and rstd has no place in f32, but those that dx is made of do.
    let (x, gate, grad) = ([0.0f32, 1e-4], [1e36f32, 1.0], [0.0f32, 1.0]);
    let (mut dx, mut dgate) = ([f32::NAN; 2], [f32::NAN; 2]);
    let rms = (1e-8f64 / 2.0 + 1e-6).sqrt();
    let (norm, rstd) =
        (Normalize { gate_act: Act::None, ..Normalize::rms_norm() }, [1.0 / rms as f32]);
    let given = NormalizeBackward::new(
        View::new(&grad, &[1, 2])?,
        View::new(&x, &[1, 2])?,
        View::new(&rstd, &[1, 1])?,
    );
    norm.backward_into(NormalizeBackward {
        gate: Some(View::new(&gate, &[1, 2])?),
        dx: Some(ViewMut::new(&mut dx, &[1, 2])?),
        dgate: Some(ViewMut::new(&mut dgate, &[1, 2])?),
        ..given
    })?;
    let r = 1e-4 / rms;
    let dp = (1.0 - r * r / 2.0) / rms;
    assert_eq!((dx[0], dgate[0]), (0.0, 0.0));
    assert!((f64::from(dx[1]) / dp - 1.0).abs() < 1e-6, "{dx:?} {dp}");
    assert!((f64::from(dgate[1]) / (1e-4 * dp) - 1.0).abs() < 1e-6, "{dgate:?}");
    Ok(())
}

#[test]
fn each_gradient_alone_is_the_same() -> Result<()> {
    let (rows, d) = (20, 45);
    let all = |seed| typed::<bf16>(&numbers(rows * d, seed));
    let (x, gate, grad) = (all(1), all(2), all(3));
    let (weight, bias) = (typed::<f32>(&numbers(d, 4)), typed::<f32>(&numbers(d, 5)));
    for gate_position in [GatePosition::Pre, GatePosition::Post] {
        for center in [false, true] {
            let norm = Normalize { gate_position, center, groups: 3, ..Normalize::layer_norm() };
            let kept = norm.forward_keeping(View::new(&x, &[rows, d])?, None)?;
            let gradients = |ask: [bool; 5]| -> Result<_> {
                let [mut dx, mut dresidual, mut dgate] =
                    [(); 3].map(|()| vec![bf16::ZERO; rows * d]);
                let (mut dweight, mut dbias) = (vec![f32::NAN; d], vec![bf16::NAN; d]);
                let shape = [rows, d];
                fn wish<'v, T: Element>(
                    ask: bool,
                    v: &'v mut [T],
                    shape: &[usize],
                ) -> Option<ViewMut<'v>> {
                    ask.then(|| ViewMut::new(v, shape).unwrap())
                }
                norm.backward_into(NormalizeBackward {
                    gate: Some(View::new(&gate, &shape)?),
                    weight: Some(View::new(&weight, &[d])?),
                    bias: Some(View::new(&bias, &[d])?),
                    mean: kept.mean.as_ref().map(Buffer::view),
                    dx: wish(ask[0], &mut dx, &shape),
                    dresidual: wish(ask[1], &mut dresidual, &shape),
                    dgate: wish(ask[2], &mut dgate, &shape),
                    dweight: wish(ask[3], &mut dweight, &[d]),
                    dbias: wish(ask[4], &mut dbias, &[d]),
                    ..NormalizeBackward::new(
                        View::new(&grad, &shape)?,
                        View::new(&x, &shape)?,
                        kept.rstd.view(),
                    )
                })?;
                Ok([
                    widened(&dx),
                    widened(&dresidual),
                    widened(&dgate),
                    widened(&dweight),
                    widened(&dbias),
                ])
            };
            let all = gradients([true; 5])?;
            assert!(all.iter().flatten().all(|v| v.is_finite()));
            for i in 0..5 {
                let mut ask = [false; 5];
                ask[i] = true;
                assert_eq!(gradients(ask)?[i], all[i], "{i}");
            }
            gradients([false; 5])?;
        }
    }
    Ok(())
}

/// All that the usual calls give; with `more`, from calls that ask for something in addition
/// that changes nothing, and so run the general code.
fn usual_calls<T: Element>(rows: usize, d: usize, more: bool) -> Result<Vec<Vec<f64>>> {
    let shape = [rows, d];
    let all = |seed| typed::<T>(&numbers(rows * d, seed));
    let (x, residual, grad, grad_sum) = (all(1), all(2), all(3), all(4));
    let view = |v| View::new(v, &shape);
    let (x, residual, grad, grad_sum) =
        (view(&x)?, view(&residual)?, view(&grad)?, view(&grad_sum)?);
    let (weight, bias) = (typed::<f32>(&numbers(d, 5)), typed::<f32>(&numbers(d, 6)));
    let (weight, bias) = (View::new(&weight, &[d])?, View::new(&bias, &[d])?);
    let (zeros, zero_bias) = (vec![T::default(); rows * d], vec![0.0f32; d]);
    let zeros = View::new(&zeros, &shape)?;
    let zero_bias = Some(View::new(&zero_bias, &[d])?).filter(|_| more);
    let real = T::DTYPE.real();
    let (rms, layer) = (Normalize::rms_norm(), Normalize::layer_norm());
    let mut given = Vec::new();
    for kind in 0..4 {
        let mut o = vec![T::from_f64(f64::NAN); rows * d];
        let mut sum = typed::<T>(&residual.to_f64_vec());
        let into = match kind {
            0 => Residual::None,
            1 => Residual::AddInto(residual, ViewMut::new(&mut sum, &shape)?),
            2 => Residual::AddInPlace(ViewMut::new(&mut sum, &shape)?),
            _ if more => Residual::Add(zeros),
            _ => Residual::None,
        };
        let centered = kind == 3;
        let [mut rstd, mut mean] =
            [Buffer::zeros(real, &[rows, 1])?, Buffer::zeros(real, &[rows, 1])?];
        let norm = if centered { layer } else { rms };
        norm.forward_into(NormalizeForward {
            weight: Some(weight),
            bias: if centered { Some(bias) } else { zero_bias },
            residual: into,
            rstd: Some(rstd.view_mut()),
            mean: centered.then(|| mean.view_mut()),
            ..NormalizeForward::new(x, ViewMut::new(&mut o, &shape)?)
        })?;
        let kept = if matches!(kind, 1 | 2) { View::new(&sum, &shape)? } else { x };
        let [mut dx, mut same] = [(); 2].map(|()| vec![T::from_f64(f64::NAN); rows * d]);
        let [mut dweight, mut dbias] = [(); 2].map(|()| vec![f32::NAN; d]);
        norm.backward_into(NormalizeBackward {
            weight: Some(weight),
            mean: centered.then(|| mean.view()),
            grad_residual_out: (kind == 1).then_some(grad_sum),
            dx: Some(ViewMut::new(&mut dx, &shape)?),
            dresidual: more.then(|| ViewMut::new(&mut same, &shape)).transpose()?,
            dweight: (kind != 2).then(|| ViewMut::new(&mut dweight, &[d])).transpose()?,
            dbias: centered.then(|| ViewMut::new(&mut dbias, &[d])).transpose()?,
            ..NormalizeBackward::new(grad, kept, rstd.view())
        })?;
        if more {
            assert_eq!(widened(&dx), widened(&same));
        }
        assert!(widened(&o).iter().chain(&widened(&dx)).all(|v| v.is_finite()), "{kind} {d}");
        given.extend([widened(&o), widened(&sum), widened(&dx), rstd.view().to_f64_vec()]);
        if kind != 2 {
            given.push(widened(&dweight));
        }
        if centered {
            given.push(widened(&dbias));
        }
    }
    Ok(given)
}

#[test]
fn usual_calls_agree_with_the_general_code() -> Result<()> {
    for isa in Isa::available() {
        with_isa(isa, || -> Result<()> {
            for d in [1, 7, 16, 17, 45, 48, 64, 127, 192, 2048, 2050, 4160] {
                assert_eq!(usual_calls::<f32>(19, d, false)?, usual_calls::<f32>(19, d, true)?);
                assert_eq!(usual_calls::<f16>(19, d, false)?, usual_calls::<f16>(19, d, true)?);
                assert_eq!(usual_calls::<bf16>(70, d, false)?, usual_calls::<bf16>(70, d, true)?);
            }
            Ok(())
        })??;
    }
    let general = usual_calls::<bf16>(1100, 512, true)?;
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let usual = pool.install(|| usual_calls::<bf16>(1100, 512, false))?;
        assert!(usual == general, "{threads} threads");
    }
    Ok(())
}

/// o, rstd, dx, dgate and dweight of a gated norm; with `more`, by the general code.
fn gated_call<T: Element>(
    norm: &Normalize,
    d: usize,
    gate: &[f64],
    more: bool,
) -> Result<[Vec<f64>; 5]> {
    let (n, rows) = (gate.len(), gate.len() / d);
    let shape = [rows, d];
    let [x, grad] = [1, 2].map(|seed| typed::<T>(&numbers(n, seed)));
    let (gate, weight, zeros) =
        (typed::<T>(gate), typed::<T>(&numbers(d, 3)), vec![T::default(); n]);
    let [x, grad, gate, zeros] = [&x, &grad, &gate, &zeros].map(|v| View::new(v, &shape));
    let (x, grad, gate, weight) = (x?, grad?, gate?, View::new(&weight, &[d])?);
    let [mut o, mut dx, mut same, mut dgate] = [(); 4].map(|()| vec![T::from_f64(f64::NAN); n]);
    let mut dweight = vec![T::from_f64(f64::NAN); d];
    let mut rstd = Buffer::zeros(T::DTYPE.real(), &[rows, 1])?;
    norm.forward_into(NormalizeForward {
        weight: Some(weight),
        gate: Some(gate),
        residual: if more { Residual::Add(zeros?) } else { Residual::None },
        rstd: Some(rstd.view_mut()),
        ..NormalizeForward::new(x, ViewMut::new(&mut o, &shape)?)
    })?;
    norm.backward_into(NormalizeBackward {
        weight: Some(weight),
        gate: Some(gate),
        dx: Some(ViewMut::new(&mut dx, &shape)?),
        dresidual: more.then(|| ViewMut::new(&mut same, &shape)).transpose()?,
        dgate: Some(ViewMut::new(&mut dgate, &shape)?),
        dweight: Some(ViewMut::new(&mut dweight, &[d])?),
        ..NormalizeBackward::new(grad, x, rstd.view())
    })?;
    let rstd = rstd.view().to_f64_vec();
    Ok([widened(&o), rstd, widened(&dx), widened(&dgate), widened(&dweight)])
}

#[test]
fn weight_gradients_of_gates_are_exact() -> Result<()> {
    /// The error of dweight in f32, for 16-bit activations, relative to its norm.
    fn relative_error<T: Element>(norm: &Normalize, case: &Case) -> Result<f64> {
        let (rows, d) = (case.rows(), case.d);
        let shape = [rows, d];
        let gate = case.gate.clone().unwrap_or_default();
        let [x, grad, gate] = [&case.x, &case.grad, &gate].map(|v| typed::<T>(v));
        let [x, grad, gate] = [&x, &grad, &gate].map(|v| View::new(v, &shape));
        let (x, grad, gate) = (x?, grad?, gate?);
        let weight = typed::<f32>(&numbers(d, 4));
        let weight = Some(View::new(&weight, &[d])?);
        let [mut o, mut dx, mut dgate] = [(); 3].map(|()| vec![T::from_f64(f64::NAN); rows * d]);
        let (mut rstd, mut dweight) = (vec![f32::NAN; rows], vec![f32::NAN; d]);
        norm.forward_into(NormalizeForward {
            weight,
            gate: Some(gate),
            rstd: Some(ViewMut::new(&mut rstd, &[rows, 1])?),
            ..NormalizeForward::new(x, ViewMut::new(&mut o, &shape)?)
        })?;
        norm.backward_into(NormalizeBackward {
            weight,
            gate: Some(gate),
            dx: Some(ViewMut::new(&mut dx, &shape)?),
            dgate: Some(ViewMut::new(&mut dgate, &shape)?),
            dweight: Some(ViewMut::new(&mut dweight, &[d])?),
            ..NormalizeBackward::new(grad, x, View::new(&rstd, &[rows, 1])?)
        })?;
        let want = plain(norm, case).dweight;
        let size: f64 = want.iter().map(|w| w * w).sum();
        let apart: f64 = widened(&dweight).iter().zip(&want).map(|(g, w)| (g - w).powi(2)).sum();
        Ok((apart / size).sqrt())
    }
    fn check<T: Element>() -> Result<()> {
        for norm in usual_gates() {
            let case = Case::new(64, 2048, true);
            let case = Case { residual: None, bias: None, grad_sum: None, ..case }.rounded::<T>();
            let error = relative_error::<T>(&norm, &case)?;
            assert!(error < 2e-6, "{} {norm:?}: {error:e}", T::DTYPE);
        }
        Ok(())
    }
    check::<bf16>()?;
    check::<f16>()
}

#[test]
fn fused_gates_agree_with_the_general_code() -> Result<()> {
    fn check<T: Element>(norm: &Normalize, d: usize, gate: &[f64], bits: i32) -> Result<()> {
        let fused = gated_call::<T>(norm, d, gate, false)?;
        let general = gated_call::<T>(norm, d, gate, true)?;
        // Sums of terms that cancel differ by what the arithmetic rounds.
        let absolute = [1e-44, 0.0, 1e-5, 1e-5, 1e-4];
        for ((fused, general), absolute) in fused.iter().zip(&general).zip(absolute) {
            for (i, (a, b)) in fused.iter().zip(general).enumerate() {
                let bound = b.abs() * 2f64.powi(-bits) + absolute;
                assert!((a - b).abs() <= bound, "{} {norm:?} {d} {i}: {a} {b}", T::DTYPE);
            }
        }
        Ok(())
    }
    for norm in usual_gates() {
        for d in [1, 15, 40, 64, 192, 2048, 2100] {
            let mut gate: Vec<f64> = numbers(3 * d, 7).iter().map(|v| 9.0 * v).collect();
            check::<bf16>(&norm, d, &gate, 7)?;
            check::<f16>(&norm, d, &gate, 9)?;
            // The last row has arguments that are too large for the short form.
            gate[3 * d - 1] = 100.0;
            if d > 20 {
                gate[3 * d - 20] = -85.0;
            }
            check::<bf16>(&norm, d, &gate, 7)?;
            let far = gated_call::<bf16>(&norm, d, &gate, false)?;
            assert!(far.iter().flatten().all(|v| v.is_finite()));
            // The other rows do not notice.
            gate.truncate(2 * d);
            let near = gated_call::<bf16>(&norm, d, &gate, false)?;
            for (near, far) in near.iter().zip(&far).take(4) {
                assert_eq!(near[..], far[..near.len()]);
            }
            // Nor do they among several such rows, in the middle of batches.
            let rows = 37;
            let mut gate: Vec<f64> = numbers(rows * d, 8).iter().map(|v| 9.0 * v).collect();
            let near = gated_call::<bf16>(&norm, d, &gate, false)?;
            let far_rows = [1, 2, 7, 20, 36];
            for row in far_rows {
                gate[row * d + d / 2] = 90.0;
            }
            check::<bf16>(&norm, d, &gate, 7)?;
            let far = gated_call::<bf16>(&norm, d, &gate, false)?;
            for (near, far) in near.iter().zip(&far).take(4) {
                let len = near.len() / rows;
                for row in (0..rows).filter(|row| !far_rows.contains(row)) {
                    assert_eq!(near[row * len..][..len], far[row * len..][..len], "{row}");
                }
            }
        }
    }
    Ok(())
}

/// o, the sum, dx and dgate of a call, as bits, row by row of `rows` or of all rows together.
fn by_rows(
    norm: &Normalize,
    (rows, d): (usize, usize),
    kind: usize,
    alone: bool,
) -> Result<Vec<Vec<f64>>> {
    let n = rows * d;
    let [x, grad, residual, grad_sum] = [1, 2, 3, 4].map(|seed| typed::<bf16>(&numbers(n, seed)));
    let mut gate: Vec<f64> = numbers(n, 5).iter().map(|v| 5.0 * v).collect();
    for row in [0, rows / 2, rows - 1] {
        gate[row * d + d / 3] = -95.0; // too large for the short form
    }
    let (gate, weight) = (typed::<bf16>(&gate), typed::<bf16>(&numbers(d, 6)));
    let weight = View::new(&weight, &[d])?;
    let mut results = vec![Vec::new(); 4];
    let each = if alone { 1 } else { rows };
    for start in (0..rows).step_by(each) {
        let (at, shape) = (start * d..(start + each) * d, [each, d]);
        let part = |values: &[bf16]| values[at.clone()].to_vec();
        let (x, grad, gate) = (part(&x), part(&grad), part(&gate));
        let (grad_sum, mut sum) = (part(&grad_sum), part(&residual));
        let addend = sum.clone();
        let [mut o, mut dx, mut dgate] = [(); 3].map(|()| vec![bf16::NAN; each * d]);
        let mut rstd = vec![f32::NAN; each * norm.groups];
        let gated = kind >= 3;
        norm.forward_into(NormalizeForward {
            weight: Some(weight),
            gate: gated.then(|| View::new(&gate, &shape)).transpose()?,
            residual: match kind {
                1 => Residual::Add(View::new(&addend, &shape)?),
                2 => Residual::AddInPlace(ViewMut::new(&mut sum, &shape)?),
                _ => Residual::None,
            },
            rstd: Some(ViewMut::new(&mut rstd, &[each, norm.groups])?),
            ..NormalizeForward::new(View::new(&x, &shape)?, ViewMut::new(&mut o, &shape)?)
        })?;
        let mut dweight = vec![bf16::NAN; d];
        let kept = if kind == 2 { &sum } else { &x };
        norm.backward_into(NormalizeBackward {
            weight: Some(weight),
            gate: gated.then(|| View::new(&gate, &shape)).transpose()?,
            residual: (kind == 1).then(|| View::new(&addend, &shape)).transpose()?,
            grad_residual_out: (kind == 2).then(|| View::new(&grad_sum, &shape)).transpose()?,
            dx: Some(ViewMut::new(&mut dx, &shape)?),
            dgate: gated.then(|| ViewMut::new(&mut dgate, &shape)).transpose()?,
            // Without it, the sums are made and forgotten: the others have to be the same.
            dweight: (!alone).then(|| ViewMut::new(&mut dweight, &[d])).transpose()?,
            ..NormalizeBackward::new(
                View::new(&grad, &shape)?,
                View::new(kept, &shape)?,
                View::new(&rstd, &[each, norm.groups])?,
            )
        })?;
        if !gated {
            dgate.fill(bf16::ZERO);
        }
        for (result, values) in results.iter_mut().zip([&o, &sum, &dx, &dgate]) {
            result.extend(values.iter().map(|value| f64::from(value.to_f32())));
        }
    }
    Ok(results)
}

/// Each row has a weight for each of its groups, gates that are too large stand in the first, a middle and
/// the last row, and passes over batches of one, some and parts of a row share their loops.
#[test]
fn rows_alone_are_what_they_are_among_others() -> Result<()> {
    for isa in Isa::available() {
        for (rows, groups, len) in
            [(5, 4, 1024), (3, 5, 704), (9, 3, 128), (70, 2, 64), (67, 1, 192), (4, 2, 30)]
                .into_iter()
                .chain([(5, 4, 1023), (9, 3, 127), (70, 2, 65), (67, 1, 193), (70, 3, 17)])
        {
            for kind in 0..7 {
                let norm = Normalize {
                    gate_position: [GatePosition::Pre, GatePosition::Post][kind % 2],
                    gate_act: if kind > 4 { Act::Silu } else { Act::Sigmoid },
                    ..Normalize::rms_norm().with_groups(groups)
                };
                let call =
                    |alone| with_isa(isa, || by_rows(&norm, (rows, groups * len), kind, alone))?;
                let (all, alone) = (call(false)?, call(true)?);
                assert!(all.iter().flatten().all(|v| v.is_finite()));
                assert!(all == alone, "{isa} {rows} rows of {groups} x {len}, kind {kind}");
            }
        }
    }
    Ok(())
}

/// Groups are rows of their own: few and many of them, in batches of whole rows and of parts of one.
#[test]
fn groups_are_rows() -> Result<()> {
    for (rows, groups, len) in [(3, 37, 5), (7, 3, 24), (40, 1, 33), (2, 5, 700), (1, 16, 128)] {
        for center in [false, true] {
            let norm = Normalize { center, ..Normalize::rms_norm() };
            let n = rows * groups * len;
            let [x, grad] = [1, 2].map(|seed| typed::<bf16>(&numbers(n, seed)));
            let call = |rows: usize, groups: usize, d: usize| -> Result<[Vec<f64>; 4]> {
                let norm = norm.with_groups(groups);
                let [x, grad] = [View::new(&x, &[rows, d])?, View::new(&grad, &[rows, d])?];
                let kept = norm.forward_keeping(x, None)?;
                let dx = norm.backward(grad, x, None, &kept)?.dx;
                let mean = kept.mean.map_or(Vec::new(), |mean| mean.view().to_f64_vec());
                let [o, rstd, dx] =
                    [&kept.o, &kept.rstd, &dx].map(|buffer| buffer.view().to_f64_vec());
                Ok([o, rstd, dx, mean])
            };
            assert_eq!(call(rows, groups, groups * len)?, call(rows * groups, 1, len)?);
        }
    }
    Ok(())
}

#[test]
fn strides_and_broadcasts() -> Result<()> {
    // x as (2, 3, 10), stored as (3, 2, 16) and cut out of the middle; grad is one row for all.
    let stored = typed::<f32>(&numbers(96, 1));
    let x = View::new(&stored, &[3, 2, 16])?.narrow(2, 3, 10)?.permute(&[1, 0, 2])?;
    let dense = typed::<f32>(&x.to_f64_vec());
    let row = typed::<f32>(&numbers(10, 2));
    let grad = View::new(&row, &[10])?.broadcast(&[2, 3, 10])?;
    let grad_dense = typed::<f32>(&grad.to_f64_vec());
    let weight = typed::<f64>(&numbers(20, 3));
    let weight = View::strided(&weight, &[10], &[-2], 19)?;
    let norm = Normalize::layer_norm().with_groups(2);
    let dense = View::new(&dense, &[2, 3, 10])?;
    let kept = norm.forward_keeping(dense, Some(weight))?;
    let want = norm.backward(View::new(&grad_dense, &[2, 3, 10])?, dense, Some(weight), &kept)?;

    let mut o = vec![f32::NAN; 96];
    let out = ViewMut::new(&mut o, &[3, 2, 16])?.narrow(2, 5, 10)?.permute(&[1, 0, 2])?;
    let [mut rstd, mut mean] = [(); 2].map(|()| vec![f32::NAN; 12]);
    let statistics =
        |v| -> Result<ViewMut<'_>> { ViewMut::new(v, &[3, 2, 2])?.permute(&[1, 0, 2]) };
    norm.forward_into(NormalizeForward {
        weight: Some(weight),
        rstd: Some(statistics(&mut rstd)?),
        mean: Some(statistics(&mut mean)?),
        ..NormalizeForward::new(x, out)
    })?;
    let got = View::new(&o, &[3, 2, 16])?.narrow(2, 5, 10)?.permute(&[1, 0, 2])?;
    assert_eq!(got.to_f64_vec(), kept.o.view().to_f64_vec());
    assert_eq!(o.iter().filter(|v| v.is_nan()).count(), 36); // nothing beside it was written

    let mut dx = vec![f32::NAN; 60];
    let mut dweight = vec![f64::NAN; 20];
    let statistics = |v| -> Result<View<'_>> { View::new(v, &[3, 2, 2])?.permute(&[1, 0, 2]) };
    norm.backward_into(NormalizeBackward {
        weight: Some(weight),
        mean: Some(statistics(&mean)?),
        dx: Some(ViewMut::new(&mut dx, &[3, 2, 10])?.permute(&[1, 0, 2])?),
        dweight: Some(ViewMut::strided(&mut dweight, &[10], &[2], 0)?),
        ..NormalizeBackward::new(grad, x, statistics(&rstd)?)
    })?;
    let dx = View::new(&dx, &[3, 2, 10])?.permute(&[1, 0, 2])?;
    assert_eq!(dx.to_f64_vec(), want.dx.view().to_f64_vec());
    let dweight: Vec<f64> = dweight.iter().step_by(2).copied().collect();
    assert_eq!(dweight, want.dweight.unwrap().to_vec::<f64>()?);
    Ok(())
}

#[test]
fn threads_and_batches_do_not_matter() -> Result<()> {
    let (rows, d) = (999, 700);
    for (norm, gated) in
        [(Normalize::rms_norm(), false), (Normalize::layer_norm().with_groups(4), true)]
    {
        let mut case = Case::new(rows, d, gated);
        let with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| run::<bf16>(&norm, &case))
        };
        let one = with(1)?;
        for threads in [2, 3, 7] {
            assert!(with(threads)? == one, "{threads} threads");
        }
        // The last rows by themselves.
        let skip = (rows - 2) * d;
        let (x, grad) = (&mut case.x, &mut case.grad);
        for operand in [Some(x), Some(grad)]
            .into_iter()
            .chain([case.residual.as_mut(), case.gate.as_mut(), case.grad_sum.as_mut()])
            .flatten()
        {
            operand.drain(..skip);
        }
        let alone = run::<bf16>(&norm, &case)?;
        assert!(alone.o == one.o[skip..] && alone.dx == one.dx[skip..]);
    }
    Ok(())
}

#[test]
fn many_rows_do_not_wear_out_the_sums() -> Result<()> {
    // Every row adds the same to dbias and, nearly, to dweight.
    let rows = 200_000;
    let x = vec![0.5f32; 2];
    let x = View::new(&x, &[1, 2])?.broadcast(&[rows, 2])?;
    let rstd = [2.0f32];
    let rstd = View::new(&rstd, &[1, 1])?.broadcast(&[rows, 1])?;
    let weight = [1.0f32; 2];
    let (mut dweight, mut dbias) = ([f32::NAN; 2], [f32::NAN; 2]);
    let grad = [0.1f32, 0.3];
    let grad = View::new(&grad, &[1, 2])?.broadcast(&[rows, 2])?;
    Normalize::rms_norm().backward_into(NormalizeBackward {
        weight: Some(View::new(&weight, &[2])?),
        dweight: Some(ViewMut::new(&mut dweight, &[2])?),
        dbias: Some(ViewMut::new(&mut dbias, &[2])?),
        ..NormalizeBackward::new(grad, x, rstd)
    })?;
    for (got, want) in [(dweight, [20_000.0, 60_000.0]), (dbias, [20_000.0, 60_000.0])] {
        assert!(error(&widened(&got), &want) < 2e-6, "{got:?}");
    }
    Ok(())
}

#[test]
fn nan_and_infinity_stay_in_their_group() -> Result<()> {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut x = typed::<bf16>(&numbers(40, 1));
        x[13] = bf16::from_f32(bad);
        let o = Normalize::layer_norm().with_groups(2).forward(View::new(&x, &[2, 20])?, None)?;
        let o = o.to_vec::<bf16>()?;
        assert!(o[..10].iter().chain(&o[20..]).all(|v| v.is_finite()));
        assert!(o[10..20].iter().all(|v| v.is_nan()));
    }
    // A mean square beyond f32 has sigma infinite.
    let x = [1e20f32, -1e20, 3e19, 0.0];
    let o = Normalize::rms_norm().forward(View::new(&x, &[1, 4])?, None)?;
    assert_eq!(o.as_slice::<f32>()?, [0.0; 4]);
    // Any NaN in what was kept comes out as one.
    let (x, grad) = ([bf16::ONE; 3], [bf16::ONE; 3]);
    let rstd = [f32::from_bits(0x7FFF_FFFF)];
    let mut dx = [bf16::ONE; 3];
    Normalize::rms_norm().backward_into(NormalizeBackward {
        dx: Some(ViewMut::new(&mut dx, &[1, 3])?),
        ..NormalizeBackward::new(
            View::new(&grad, &[1, 3])?,
            View::new(&x, &[1, 3])?,
            View::new(&rstd, &[1, 1])?,
        )
    })?;
    assert!(dx.iter().all(|v| v.is_nan()));
    Ok(())
}

#[test]
fn a_relu_gate_cuts_any_gradient() -> Result<()> {
    let (x, gate, grad) = ([1.0f32, 2.0], [-1.0f32, 1.0], [f32::INFINITY, 1.0]);
    let (rstd, mut dgate) = ([1.0f32], [f32::NAN; 2]);
    let norm = Normalize {
        gate_act: Act::Relu,
        gate_position: GatePosition::Post,
        ..Normalize::rms_norm()
    };
    let [x, grad] = [View::new(&x, &[1, 2])?, View::new(&grad, &[1, 2])?];
    norm.backward_into(NormalizeBackward {
        gate: Some(View::new(&gate, &[1, 2])?),
        dgate: Some(ViewMut::new(&mut dgate, &[1, 2])?),
        ..NormalizeBackward::new(grad, x, View::new(&rstd, &[1, 1])?)
    })?;
    assert_eq!(dgate, [0.0, 2.0]);
    Ok(())
}

#[test]
fn empty_tensors() -> Result<()> {
    let none: [f32; 0] = [];
    let norm = Normalize::layer_norm();
    for shape in [[0, 4], [3, 0], [0, 0]] {
        let x = View::new(&none, &shape)?;
        let weight = vec![1.0f32; shape[1]];
        let weight = View::new(&weight, &[shape[1]])?;
        let kept = norm.forward_keeping(x, Some(weight))?;
        assert_eq!((kept.o.len(), kept.rstd.len()), (0, shape[0]));
        assert!(kept.rstd.as_slice::<f32>()?.iter().all(|v| v.is_nan()));
        let gradients = norm.backward(x, x, Some(weight), &kept)?;
        assert!(gradients.dx.is_empty());
        assert_eq!(gradients.dweight.unwrap().to_vec::<f32>()?, vec![0.0; shape[1]]);
    }
    let huge = norm.with_groups(usize::MAX).forward(View::new(&none, &[3, 0])?, None)?;
    assert!(huge.is_empty());
    Ok(())
}

#[test]
fn errors_name_what_is_wrong() -> Result<()> {
    let (x, three, wide) = ([1.0f32; 8], [1.0f32; 3], [1.0f64; 8]);
    let x = View::new(&x, &[2, 4])?;
    let three = View::new(&three, &[3])?;
    let forward = |norm: Normalize, weight| norm.forward(x, weight).unwrap_err().to_string();
    let rms = Normalize::rms_norm();
    for (norm, weight, expected) in [
        (rms, Some(three), "normalize: weight has shape [3], expected [4] (last dimension of x)"),
        (rms.with_eps(f64::NAN), None, "normalize: eps is NaN, expected a finite number from 0 on"),
        (rms.with_eps(-1.0), None, "normalize: eps is -1, expected a finite number from 0 on"),
        (
            Normalize { scale: f64::INFINITY, ..rms },
            None,
            "normalize: scale is inf, expected a finite number",
        ),
        (rms.with_groups(0), None, "normalize: groups is 0, expected at least 1"),
        (
            rms.with_groups(3),
            None,
            "normalize: groups is 3, expected a divisor of 4 (last dimension of x)",
        ),
    ] {
        assert_eq!(forward(norm, weight), expected);
    }
    let scalar = [1.0f32];
    let error = rms.forward(View::new(&scalar, &[])?, None).unwrap_err();
    assert_eq!(error.argument(), "x");

    // Each fault of the forward's operands.
    let mut memory = [0.0f32; 64];
    let mut rest = &mut memory[..];
    let mut take = |len: usize, shape: &[usize]| {
        let (head, tail) = std::mem::take(&mut rest).split_at_mut(len);
        rest = tail;
        ViewMut::new(head, shape)
    };
    let wide = View::new(&wide, &[2, 4])?;
    let base = |o| NormalizeForward::new(x, o);
    let o = take(8, &[2, 4])?;
    let fault = |call| rms.forward_into(call).unwrap_err().to_string();
    assert_eq!(
        fault(NormalizeForward { gate: Some(wide), ..base(o) }),
        "normalize: gate has dtype f64, expected f32 (dtype of x)"
    );
    assert_eq!(
        fault(NormalizeForward { mean: Some(take(2, &[2, 1])?), ..base(take(8, &[2, 4])?) }),
        "normalize: mean is given, expected none (center is off)"
    );
    assert_eq!(
        fault(NormalizeForward { rstd: Some(take(2, &[1, 2])?), ..base(take(8, &[2, 4])?) }),
        "normalize: rstd has shape [1, 2], expected [2, 1] (from x [2, 4])"
    );
    assert_eq!(
        fault(NormalizeForward {
            residual: Residual::AddInPlace(take(4, &[1, 4])?),
            ..base(take(8, &[2, 4])?)
        }),
        "normalize: residual has shape [1, 4], expected [2, 4] (from x [2, 4])"
    );
    assert_eq!(
        fault(NormalizeForward { bias: Some(three), ..base(take(8, &[2, 4])?) }),
        "normalize: bias has shape [3], expected [4] (last dimension of x)"
    );

    // And of the backward's.
    let rstd = [1.0f32; 2];
    let rstd = View::new(&rstd, &[2, 1])?;
    let base = || NormalizeBackward::new(x, x, rstd);
    fn backward_fault(norm: Normalize, call: NormalizeBackward<'_>) -> String {
        norm.backward_into(call).unwrap_err().to_string()
    }
    let [mut a, mut b] = [[0.0f32; 8], [0.0f32; 8]];
    assert_eq!(
        backward_fault(Normalize::layer_norm(), base()),
        "normalize: mean is missing, expected the mean that the forward kept (center is on)"
    );
    assert_eq!(
        backward_fault(rms, NormalizeBackward { mean: Some(rstd), ..base() }),
        "normalize: mean is given, expected none (center is off)"
    );
    assert_eq!(
        backward_fault(
            rms,
            NormalizeBackward { dgate: Some(ViewMut::new(&mut a, &[2, 4])?), ..base() }
        ),
        "normalize: dgate is given, expected none (there is no gate)"
    );
    assert_eq!(
        backward_fault(
            rms,
            NormalizeBackward { dweight: Some(ViewMut::new(&mut a[..4], &[4])?), ..base() }
        ),
        "normalize: dweight is given, expected none (there is no weight)"
    );
    assert_eq!(
        backward_fault(
            rms,
            NormalizeBackward { dbias: Some(ViewMut::new(&mut a, &[8])?), ..base() }
        ),
        "normalize: dbias has shape [8], expected [4] (last dimension of x)"
    );
    assert_eq!(
        backward_fault(rms, NormalizeBackward { rstd: x, ..base() }),
        "normalize: rstd has shape [2, 4], expected [2, 1] (from x [2, 4])"
    );
    assert_eq!(
        backward_fault(
            rms,
            NormalizeBackward { dx: Some(ViewMut::new(&mut b[..4], &[1, 4])?), ..base() }
        ),
        "normalize: dx has shape [1, 4], expected [2, 4] (from x [2, 4])"
    );
    // SAFETY: the memory is the array's; the call has to refuse it before it touches it.
    let over = unsafe { ViewMut::from_raw(b.as_mut_ptr().cast(), DType::F32, &[4], &[1])? };
    assert_eq!(
        backward_fault(
            rms,
            NormalizeBackward {
                dx: Some(ViewMut::new(&mut b, &[2, 4])?),
                dbias: Some(over),
                ..base()
            }
        ),
        "normalize: dbias overlaps dx in memory, expected memory of its own"
    );
    Ok(())
}
