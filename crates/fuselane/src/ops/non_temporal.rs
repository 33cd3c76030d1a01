//! Tests of non-temporal stores, which only large calls make: forced on small ones, they give the same
//! bits in the same places.

use half::{bf16, f16};

use super::act::Act;
use super::cosine::{Cosine, CosineBackward};
use super::encode::FusedAct;
use super::normalize::tests::{self, usual_gates};
use super::normalize::{GatePosition, Normalize, NormalizeBackward, NormalizeForward, Residual};
use super::rotate::{Rotate, RotateBackward};
use super::softmax::Softmax;
use crate::dtype::{Element, Real};
use crate::error::Result;
use crate::exec::rows::force_non_temporal;
use crate::view::{View, ViewMut};
use crate::{Isa, Positions, with_isa};

/// Batch, tokens and heads; batches of rows of all operators are met, and their ends.
const ROWS: [usize; 3] = [5, 13, 2];
const COUNT: usize = ROWS[0] * ROWS[1] * ROWS[2];

fn numbers<T: Element>(len: usize, seed: u64) -> Vec<T> {
    tests::numbers(len, seed).iter().map(|&number| T::from_f64(2.0 * number)).collect()
}

/// What a call writes to an output that begins `offset` elements behind a cache line's border. What
/// lies around it keeps its value.
fn written<T: Element>(
    len: usize,
    offset: usize,
    call: impl FnOnce(&mut [T]) -> Result<()>,
) -> Result<Vec<u64>> {
    let mut memory = vec![T::from_f64(-77.0); len + 256];
    let start = memory.as_ptr().align_offset(64) + offset;
    call(&mut memory[start..start + len])?;
    let around = memory[..start].iter().chain(&memory[start + len..]);
    assert!(around.into_iter().all(|value| value.to_f64() == -77.0));
    Ok(memory[start..start + len].iter().map(|value| value.to_f64().to_bits()).collect())
}

/// Past the caches and through them.
fn same<T: Element>(what: &str, len: usize, call: impl Fn(&mut [T]) -> Result<()>) -> Result<()> {
    let plain = written(len, 0, &call)?;
    for offset in [0, 8, 16, 32, 1] {
        let past = force_non_temporal(|| written(len, offset, &call))?;
        assert!(past == plain, "{what}, {offset} elements behind a line's border");
    }
    Ok(())
}

fn activations<T: Element>(features: usize) -> Result<()> {
    let (n, shape) = (COUNT * features, [ROWS[0], ROWS[1], ROWS[2], features]);
    let [mut x, grad] = [1, 2].map(|seed| numbers::<T>(n, seed));
    // Rows that are not near 0, and one that is masked.
    for far in [1, 9, COUNT - 1] {
        x[far * features + features / 2] = T::from_f64(90.0);
    }
    x[3 * features..4 * features].fill(T::from_f64(f64::NEG_INFINITY));
    let [x, grad] = [View::new(&x, &shape)?, View::new(&grad, &shape)?];
    for act in [Act::Relu, Act::Sigmoid, Act::Silu] {
        same::<T>("act", n, |o| act.forward_into(x, ViewMut::new(o, &shape)?))?;
        same::<T>("act backward", n, |o| act.backward_into(x, grad, ViewMut::new(o, &shape)?))?;
    }
    for softmax in [
        Softmax::over(-1),
        Softmax { zero_masked_rows: true, ..Softmax::over(-1) },
        Softmax { log: true, ..Softmax::over(-1) },
        Softmax::over(-2),
        Softmax::over(1),
    ] {
        same::<T>("softmax", n, |o| softmax.forward_into(x, ViewMut::new(o, &shape)?))?;
        same::<T>("softmax backward", n, |o| {
            softmax.backward_into(x, grad, ViewMut::new(o, &shape)?)
        })?;
    }
    Ok(())
}

fn norms<T: Element>(features: usize) -> Result<()> {
    let (n, rows) = (COUNT * features, [COUNT, features]);
    let [x, grad, residual] = [1, 2, 3].map(|seed| numbers::<T>(n, seed));
    let mut gate = numbers::<T>(n, 4);
    for far in [0, 7, 40, COUNT - 1] {
        gate[far * features + features / 2] = T::from_f64(90.0);
    }
    let [x2, grad2, residual2, gate2] = [
        View::new(&x, &rows)?,
        View::new(&grad, &rows)?,
        View::new(&residual, &rows)?,
        View::new(&gate, &rows)?,
    ];
    let weight = numbers::<T>(features, 5);
    let weight = View::new(&weight, &[features])?;
    let rstd = vec![T::Real::of(0.9); COUNT];
    let rstd = View::new(&rstd, &[COUNT, 1])?;
    for norm in usual_gates() {
        for (gate, residual) in [(None, None), (None, Some(residual2)), (Some(gate2), None)] {
            same::<T>("normalize", n, |o| {
                norm.forward_into(NormalizeForward {
                    weight: Some(weight),
                    gate,
                    residual: residual.map_or(Residual::None, Residual::Add),
                    ..NormalizeForward::new(x2, ViewMut::new(o, &rows)?)
                })
            })?;
            // The sum in the place of the residual, which is read there too.
            same::<T>("normalize in place", n, |sum| {
                sum.copy_from_slice(&grad);
                let mut o = vec![T::default(); n];
                norm.forward_into(NormalizeForward {
                    weight: Some(weight),
                    residual: Residual::AddInPlace(ViewMut::new(sum, &rows)?),
                    ..NormalizeForward::new(x2, ViewMut::new(&mut o, &rows)?)
                })
            })?;
            for of_gate in [false, true] {
                if of_gate && gate.is_none() {
                    continue;
                }
                same::<T>("normalize backward", n, |o| {
                    let mut other = vec![T::default(); n];
                    let (this, that) = (ViewMut::new(o, &rows)?, ViewMut::new(&mut other, &rows)?);
                    let (dx, dgate) = if of_gate { (that, this) } else { (this, that) };
                    let mut dweight = vec![T::default(); features];
                    norm.backward_into(NormalizeBackward {
                        weight: Some(weight),
                        gate,
                        residual,
                        dx: Some(dx),
                        dgate: gate.map(|_| dgate),
                        dweight: Some(ViewMut::new(&mut dweight, &[features])?),
                        ..NormalizeBackward::new(grad2, x2, rstd)
                    })
                })?;
            }
        }
    }
    Ok(())
}

/// Norms of all options, in groups, with all that a call can write at once: dense, and with gaps.
fn norms_of_groups<T: Element>(rows: usize, features: usize, groups: usize) -> Result<()> {
    let (n, shape) = (rows * features, [rows, features]);
    let inputs = [1, 2, 3, 4, 5].map(|seed| numbers::<T>(n, seed));
    let [x, grad, residual, gate, grad_sum] = [
        View::new(&inputs[0], &shape)?,
        View::new(&inputs[1], &shape)?,
        View::new(&inputs[2], &shape)?,
        View::new(&inputs[3], &shape)?,
        View::new(&inputs[4], &shape)?,
    ];
    let parameters = [6, 7].map(|seed| numbers::<f32>(features, seed));
    let [weight, bias] =
        [View::new(&parameters[0], &[features])?, View::new(&parameters[1], &[features])?];
    let statistics = vec![T::Real::of(0.9); rows * groups];
    let statistics = View::new(&statistics, &[rows, groups])?;
    for (center, gated, gate_position, gap) in [
        (false, false, GatePosition::Pre, 0),
        (false, true, GatePosition::Pre, 0),
        (false, true, GatePosition::Post, 0),
        (true, false, GatePosition::Pre, 0),
        (true, true, GatePosition::Post, 0),
        (false, false, GatePosition::Pre, 5),
    ] {
        let norm = Normalize { center, gate_position, ..Normalize::rms_norm() };
        let norm = norm.with_groups(groups);
        let gate = gated.then_some(gate);
        let place = rows * (features + gap);
        same::<T>("normalize with all", 5 * place + features, |all| {
            let (places, dweight) = all.split_at_mut(5 * place);
            let mut places = places.chunks_mut(place);
            let mut next = || {
                let memory = places.next().expect("five places");
                ViewMut::new(memory, &[rows, features + gap])?.narrow(1, gap / 2, features)
            };
            norm.forward_into(NormalizeForward {
                weight: Some(weight),
                bias: center.then_some(bias),
                gate,
                residual: Residual::AddInto(residual, next()?),
                ..NormalizeForward::new(x, next()?)
            })?;
            norm.backward_into(NormalizeBackward {
                weight: Some(weight),
                bias: center.then_some(bias),
                gate,
                residual: Some(residual),
                mean: center.then_some(statistics),
                grad_residual_out: Some(grad_sum),
                dx: Some(next()?),
                dresidual: Some(next()?),
                dgate: gate.map(|_| next()).transpose()?,
                dweight: Some(ViewMut::new(dweight, &[features])?),
                ..NormalizeBackward::new(grad, x, statistics)
            })
        })?;
    }
    Ok(())
}

/// The operators that take rows of any length.
fn any_rows<T: Element>(features: usize) -> Result<()> {
    activations::<T>(features)?;
    norms::<T>(features)
}

fn all_operators<T: Element>(features: usize) -> Result<()> {
    any_rows::<T>(features)?;
    let n = COUNT * features;
    let shape = [ROWS[0], ROWS[1], ROWS[2], features];
    let [x, grad] = [1, 2].map(|seed| numbers::<T>(n, seed));
    let [x4, grad4] = [View::new(&x, &shape)?, View::new(&grad, &shape)?];

    let theta = numbers::<f32>(features / 2, 6);
    let theta = View::new(&theta, &[1, features / 2])?;
    let angles = numbers::<f32>(features, 7);
    let angles = View::new(&angles, &[1, features])?;
    let heads_first = [ROWS[0], ROWS[2], ROWS[1], features];
    let wide = [ROWS[0], ROWS[2], ROWS[1], 2 * features];
    let (x_heads, grad_wide) = (View::new(&x, &heads_first)?, numbers::<T>(2 * n, 8));
    let grad_wide = View::new(&grad_wide, &wide)?;
    let acts = [
        FusedAct::default(),
        Act::Silu.into(),
        FusedAct::SoftmaxFeatures,
        FusedAct::SoftmaxSequence,
    ];
    for act in acts {
        let rotate = Rotate { act, ..Rotate::default() };
        same::<T>("rotate", n, |o| rotate.forward_into(x4, theta, ViewMut::new(o, &shape)?))?;
        same::<T>("rotate backward", n, |o| {
            let (x, dx) = (Some(x4), Some(ViewMut::new(o, &shape)?));
            let (grad, angles) = (grad4, theta.into());
            rotate.backward_into(RotateBackward { x, grad, angles, dx, dtheta: None })
        })?;
        let grid = [ROWS[1]];
        let cosine = Cosine { act, positions: Positions::Grid(&grid), ..Cosine::default() };
        same::<T>("cosine", 2 * n, |o| {
            cosine.forward_into(x_heads, angles, ViewMut::new(o, &wide)?)
        })?;
        same::<T>("cosine backward", n, |o| {
            let (x, dx) = (Some(x_heads), Some(ViewMut::new(o, &heads_first)?));
            let (grad, angles) = (grad_wide, angles.into());
            cosine.backward_into(CosineBackward { x, grad, angles, dx, dtheta: None })
        })?;
    }
    Ok(())
}

#[test]
fn stores_past_the_caches_give_the_same_bits() -> Result<()> {
    for isa in Isa::available() {
        for features in [34, 64, 80, 96, 128, 320] {
            with_isa(isa, || -> Result<()> {
                all_operators::<bf16>(features)?;
                all_operators::<f16>(features)?;
                all_operators::<f32>(features)
            })??;
        }
        with_isa(isa, || all_operators::<bf16>(2048))??;
        for (rows, features, groups) in [(70, 387, 3), (9, 2049, 3), (9, 2045, 5), (2, 66_001, 1)] {
            with_isa(isa, || -> Result<()> {
                norms_of_groups::<bf16>(rows, features, groups)?;
                norms_of_groups::<f32>(rows, features, groups)
            })??;
        }
        // Rows that begin anywhere.
        for features in [1, 17, 33, 63, 65, 100, 127, 129, 641, 2049] {
            with_isa(isa, || -> Result<()> {
                any_rows::<bf16>(features)?;
                any_rows::<f16>(features)?;
                any_rows::<f32>(features)
            })??;
        }
    }
    Ok(())
}
