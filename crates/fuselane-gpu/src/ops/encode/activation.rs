//! The activation before an encoding.

use cubecl::prelude::*;
use fuselane::Act;

use super::pairs::{Index, PairLayout, Pairs, Problem};
use crate::kernel::angles::AngleSource;
use crate::kernel::math;
use crate::kernel::reduce::{Fold, fold, over_lanes};
use crate::launch::{Storage, buffer};
use crate::ops::softmax::StatisticsTensors;

/// The activation, with what its statistics belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Activation {
    Elementwise(Act),
    /// Softmax over the sequence: statistics of each (batch, head, feature).
    Columns,
    /// Softmax over the features: statistics of each (batch, token, head).
    Rows,
}

/// Of each row or column of a softmax, the maximum and the inverse of the sum of exp(x - maximum).
#[derive(CubeType, CubeLaunch)]
pub(super) struct Statistics {
    pub(super) maxima: Box<[f32]>,
    pub(super) inverses: Box<[f32]>,
}

/// What kernels need besides the activations.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Context {
    pub(super) statistics: Statistics,
    pub(super) angles: AngleSource,
    pub(super) problem: Problem,
}

impl From<&StatisticsTensors> for StatisticsLaunch {
    fn from(tensors: &StatisticsTensors) -> Self {
        let StatisticsTensors { maxima, inverses } = tensors;
        Self::new(buffer(maxima, Storage::F32), buffer(inverses, Storage::F32))
    }
}

/// The statistics `numbers` of a vector of pairs.
#[cube]
pub(super) fn statistic<N: Size>(
    numbers: &[f32],
    problem: &Problem,
    batch: usize,
    index: &Index,
) -> Pairs<N> {
    if comptime!(problem.form.act == Activation::Rows) {
        let all = Vector::<f32, N>::new(numbers[problem.row_number(batch, index)]);
        Pairs::<N> { a: all, b: all }
    } else {
        let row = (batch * problem.heads + index.head) * problem.features * N::value();
        let mut a = Vector::<f32, N>::new(0.0f32);
        let mut b = Vector::<f32, N>::new(0.0f32);
        let vector = index.vector;
        #[unroll]
        for i in 0..N::value() {
            if index.rotates {
                match comptime!(problem.form.pairs) {
                    PairLayout::Split => {
                        a.insert(i, numbers[row + vector * N::value() + i]);
                        b.insert(i, numbers[row + (problem.second + vector) * N::value() + i]);
                    }
                    PairLayout::Interleaved => {
                        let first = row + 2usize * (vector * N::value() + i);
                        a.insert(i, numbers[first]);
                        b.insert(i, numbers[first + 1usize]);
                    }
                    PairLayout::Single => a.insert(i, numbers[row + vector * N::value() + i]),
                }
            } else {
                let vector = problem.pass_through(vector);
                a.insert(i, numbers[row + vector * N::value() + i]);
            }
        }
        Pairs::<N> { a, b }
    }
}

/// f(x).
#[cube]
pub(super) fn activated<N: Size>(
    x: &Pairs<N>,
    context: &Context,
    batch: usize,
    index: &Index,
    #[comptime] short: bool,
) -> Pairs<N> {
    let problem = &context.problem;
    match comptime!(problem.form.act) {
        Activation::Elementwise(act) => Pairs::<N> {
            a: math::value::<N>(x.a, act, short),
            b: math::value::<N>(x.b, act, short),
        },
        _ => {
            let max = statistic::<N>(&context.statistics.maxima, problem, batch, index);
            let short = comptime!(short && problem.form.short_exp);
            let mut a = math::exp::<N>(x.a - max.a, short);
            let mut b = x.b;
            if comptime!(problem.form.is_rotate()) {
                b = math::exp::<N>(x.b - max.b, short);
            }
            let inverse = statistic::<N>(&context.statistics.inverses, problem, batch, index);
            a *= inverse.a;
            if comptime!(problem.form.is_rotate()) {
                b *= inverse.b;
            }
            Pairs::<N> { a, b: second_or_zero::<N>(b, index.rotates) }
        }
    }
}

/// exp(x - max), for a softmax over the features.
#[cube]
pub(super) fn exponentials<N: Size>(
    x: &Pairs<N>,
    max: f32,
    index: &Index,
    problem: &Problem,
    #[comptime] short: bool,
) -> Pairs<N> {
    // In turns: the second features after all the first ones make NVIDIA's compiler spill.
    let mut a = Vector::<f32, N>::new(0.0f32);
    let mut b = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        a.insert(i, math::exp_of(x.a.extract(i) - max, short));
        if comptime!(problem.form.is_rotate()) {
            b.insert(i, math::exp_of(x.b.extract(i) - max, short));
        }
    }
    Pairs::<N> { a, b: second_or_zero::<N>(b, index.rotates) }
}

/// The second features; 0 where features pass through, as there are none. What an activation makes
/// of nothing may be infinite.
#[cube]
fn second_or_zero<N: Size>(b: Vector<f32, N>, rotates: bool) -> Vector<f32, N> {
    let mut second = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        second.insert(i, select(rotates, b.extract(i), 0.0f32));
    }
    second
}

/// The fold of all features.
#[cube]
pub(super) fn over_pairs<N: Size>(
    pairs: &Pairs<N>,
    index: &Index,
    problem: &Problem,
    #[comptime] kind: Fold,
) -> f32 {
    let mut all = over_lanes::<N>(pairs.a, kind);
    if comptime!(problem.form.is_rotate()) {
        if index.rotates {
            all = fold(all, over_lanes::<N>(pairs.b, kind), kind);
        }
    }
    all
}
