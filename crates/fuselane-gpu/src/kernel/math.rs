//! Functions of the operators, in f32.

use cubecl::prelude::*;
use fuselane::Act;

/// f(x). `short` says that the result is stored in 16 bits.
#[cube]
pub(crate) fn value<N: Size>(
    x: Vector<f32, N>,
    #[comptime] act: Act,
    #[comptime] short: bool,
) -> Vector<f32, N> {
    let mut y = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        y.insert(i, value_of(x.extract(i), act, short));
    }
    y
}

#[cube]
pub(crate) fn value_of(x: f32, #[comptime] act: Act, #[comptime] short: bool) -> f32 {
    match comptime!(act) {
        Act::Relu => select(x < 0.0f32, 0.0f32, x),
        Act::Silu => x / (1.0f32 + (-x).exp()),
        _ => x,
    }
}

#[cube]
pub(crate) fn pull_back<N: Size>(
    x: Vector<f32, N>,
    grad: Vector<f32, N>,
    #[comptime] act: Act,
    #[comptime] short: bool,
) -> Vector<f32, N> {
    grad * x
}

#[cube]
pub(crate) fn pull_back_from_output<N: Size>(
    x: Vector<f32, N>,
    grad: Vector<f32, N>,
    #[comptime] act: Act,
) -> Vector<f32, N> {
    grad * x
}
