//! The loops of the activations, and their values for the kernels that apply one on the way.

use super::lanes::Lane;
use super::sink::{RowSink, Sink};
use super::source::{Prefetch, Source};
use super::sweep::{At, sweep, sweep_blocks, sweep_by};
use crate::exec::rows::TaskRows;
use crate::ops::act::Act;
use crate::simd::{Kernel, Simd, V};

/// An activation as a type, so that each has loops of its own.
pub(crate) trait Function: Copy {
    /// Whether results are exact, so that rounding them is nothing but leaving bits out.
    const EXACT: bool = false;
    /// Whether there is a fast form, for results of 16 bits.
    const HAS_FAST: bool = false;
    /// Whether a block of the exact form takes so much arithmetic that loops need no steps of four.
    const BY_BLOCKS: bool = false;
    /// What a loop asks for ahead: more, and into the second-level cache, where there is little arithmetic.
    const PREFETCH: Prefetch = Prefetch::L1(4 << 10);
    /// f(x).
    fn value<S: Simd>(x: V<S>) -> V<S>;
    /// f(x), within a rounding of [`Function::value`], and f'(x), sharing what they have in common.
    fn value_and_slope<S: Simd>(x: V<S>) -> (V<S>, V<S>);
    /// f(x), as exact as its rounding to the element type needs.
    #[inline(always)]
    fn value_fast<S: Simd>(x: V<S>) -> V<S> {
        Self::value(x)
    }
    /// [`Function::value_and_slope`], as exact as their rounding to the element type needs.
    #[inline(always)]
    fn value_and_slope_fast<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        Self::value_and_slope(x)
    }
    /// grad * f'(x), as exact as its rounding to the element type needs.
    #[inline(always)]
    fn gradient<S: Simd>(x: V<S>, grad: V<S>) -> V<S> {
        grad * Self::value_and_slope_fast(x).1
    }
    /// [`Function::value_fast`] of x up to [`IN_RANGE`] in magnitude, with less work.
    #[inline(always)]
    fn value_in_range<S: Simd>(x: V<S>) -> V<S> {
        Self::value_fast(x)
    }
    /// [`Function::gradient`] of x up to [`IN_RANGE`] in magnitude, with less work.
    #[inline(always)]
    fn gradient_in_range<S: Simd>(x: V<S>, grad: V<S>) -> V<S> {
        Self::gradient(x, grad)
    }
    /// grad * f'(x), from o = f(x), for those that can do without x.
    #[inline(always)]
    fn gradient_from_output<S: Simd>(_o: V<S>, grad: V<S>) -> V<S> {
        grad
    }
    /// Rounds f(x) or its gradient.
    #[inline(always)]
    fn round<S: Simd>(value: V<S>) -> S::Packed {
        if Self::EXACT { value.truncate() } else { value.round_ties_away() }
    }
}

/// x
#[derive(Clone, Copy)]
struct Identity;

impl Function for Identity {
    const EXACT: bool = true;
    const PREFETCH: Prefetch = Prefetch::L2(8 << 10);
    #[inline(always)]
    fn value<S: Simd>(x: V<S>) -> V<S> {
        x
    }
    #[inline(always)]
    fn value_and_slope<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        (x, V::splat(1.0))
    }
    #[inline(always)]
    fn gradient<S: Simd>(_x: V<S>, grad: V<S>) -> V<S> {
        grad
    }
}

/// max(x, 0), whose gradient is 0 where x is not above 0, whatever arrives.
#[derive(Clone, Copy)]
struct Relu;

impl Function for Relu {
    const EXACT: bool = true;
    const PREFETCH: Prefetch = Prefetch::L2(8 << 10);
    #[inline(always)]
    fn value<S: Simd>(x: V<S>) -> V<S> {
        V::zero().max(x)
    }
    #[inline(always)]
    fn value_and_slope<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        (Self::value(x), Self::gradient(x, V::splat(1.0)))
    }
    #[inline(always)]
    fn gradient<S: Simd>(x: V<S>, grad: V<S>) -> V<S> {
        V::select(x.le(V::zero()), V::zero(), grad)
    }
    #[inline(always)]
    fn gradient_from_output<S: Simd>(o: V<S>, grad: V<S>) -> V<S> {
        Self::gradient(o, grad)
    }
}

/// max(x, 0)^2
#[derive(Clone, Copy)]
struct ReluSquared;

impl Function for ReluSquared {
    const PREFETCH: Prefetch = Prefetch::L2(8 << 10);
    #[inline(always)]
    fn value<S: Simd>(x: V<S>) -> V<S> {
        let positive = Relu::value(x);
        positive * positive
    }
    #[inline(always)]
    fn value_and_slope<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        let positive = Relu::value(x);
        (positive * positive, positive + positive)
    }
    /// The product is doubled last: twice x or twice the gradient may overflow where the result does not.
    #[inline(always)]
    fn gradient<S: Simd>(x: V<S>, grad: V<S>) -> V<S> {
        let half = grad * x;
        V::select(x.le(V::zero()), V::zero(), half + half)
    }
}

#[derive(Clone, Copy)]
struct Sigmoid;

impl Function for Sigmoid {
    const HAS_FAST: bool = true;
    #[inline(always)]
    fn value<S: Simd>(x: V<S>) -> V<S> {
        x.sigmoid()
    }
    #[inline(always)]
    fn value_and_slope<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        x.sigmoid_and_slope()
    }
    #[inline(always)]
    fn value_fast<S: Simd>(x: V<S>) -> V<S> {
        x.sigmoid_fast()
    }
    #[inline(always)]
    fn value_and_slope_fast<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        x.sigmoid_and_slope_fast()
    }
    #[inline(always)]
    fn value_in_range<S: Simd>(x: V<S>) -> V<S> {
        x.sigmoid_fast_in_range()
    }
    #[inline(always)]
    fn gradient_in_range<S: Simd>(x: V<S>, grad: V<S>) -> V<S> {
        grad * x.sigmoid_slope_fast_in_range()
    }
    #[inline(always)]
    fn gradient_from_output<S: Simd>(o: V<S>, grad: V<S>) -> V<S> {
        grad * o.neg_mul_add(o, o)
    }
}

#[derive(Clone, Copy)]
struct Silu;

impl Function for Silu {
    const HAS_FAST: bool = true;
    #[inline(always)]
    fn value<S: Simd>(x: V<S>) -> V<S> {
        x.silu()
    }
    #[inline(always)]
    fn value_and_slope<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        x.silu_and_slope()
    }
    #[inline(always)]
    fn value_fast<S: Simd>(x: V<S>) -> V<S> {
        x.silu_fast()
    }
    #[inline(always)]
    fn value_and_slope_fast<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        x.silu_and_slope_fast()
    }
    #[inline(always)]
    fn value_in_range<S: Simd>(x: V<S>) -> V<S> {
        x.silu_fast_in_range()
    }
    #[inline(always)]
    fn gradient_in_range<S: Simd>(x: V<S>, grad: V<S>) -> V<S> {
        grad * x.silu_slope_fast_in_range()
    }
}

#[derive(Clone, Copy)]
struct Tanh;

impl Function for Tanh {
    const BY_BLOCKS: bool = true;
    #[inline(always)]
    fn value<S: Simd>(x: V<S>) -> V<S> {
        x.tanh()
    }
    #[inline(always)]
    fn value_and_slope<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        x.tanh_and_slope()
    }
    #[inline(always)]
    fn gradient_from_output<S: Simd>(o: V<S>, grad: V<S>) -> V<S> {
        grad * o.neg_mul_add(o, V::splat(1.0))
    }
}

#[derive(Clone, Copy)]
struct Gelu;

impl Function for Gelu {
    const BY_BLOCKS: bool = true;
    #[inline(always)]
    fn value<S: Simd>(x: V<S>) -> V<S> {
        x.gelu()
    }
    #[inline(always)]
    fn value_and_slope<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        x.gelu_and_slope()
    }
}

#[derive(Clone, Copy)]
struct GeluTanh;

impl Function for GeluTanh {
    const BY_BLOCKS: bool = true;
    #[inline(always)]
    fn value<S: Simd>(x: V<S>) -> V<S> {
        x.gelu_tanh()
    }
    #[inline(always)]
    fn value_and_slope<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        x.gelu_tanh_and_slope()
    }
}

#[derive(Clone, Copy)]
struct Softplus;

impl Function for Softplus {
    const BY_BLOCKS: bool = true;
    #[inline(always)]
    fn value<S: Simd>(x: V<S>) -> V<S> {
        x.softplus()
    }
    #[inline(always)]
    fn value_and_slope<S: Simd>(x: V<S>) -> (V<S>, V<S>) {
        (x.softplus(), x.sigmoid())
    }
}

/// A loop that is compiled for each activation.
trait ForEachAct<S: Simd> {
    fn run<F: Function>(self);
}

/// Runs a loop, in a function of its own for each activation.
#[inline(always)]
fn dispatch_act<S: Simd>(act: Act, code: impl ForEachAct<S>) {
    #[inline(always)]
    fn call<S: Simd, F: Function>(code: impl ForEachAct<S>) {
        S::call(
            #[inline(always)]
            move || code.run::<F>(),
        );
    }
    match act {
        Act::None => call::<S, Identity>(code),
        Act::Relu => call::<S, Relu>(code),
        Act::Sigmoid => call::<S, Sigmoid>(code),
        Act::Silu => call::<S, Silu>(code),
        Act::Tanh => call::<S, Tanh>(code),
        Act::Gelu => call::<S, Gelu>(code),
        Act::GeluTanh => call::<S, GeluTanh>(code),
        Act::Softplus => call::<S, Softplus>(code),
        Act::ReluSquared => call::<S, ReluSquared>(code),
    }
}

/// How large arguments may be for the forms that take the least work. Rows with larger ones are done
/// again, by forms that serve all. (To clamp all arguments instead takes 8 to 25 % longer.)
pub(crate) const IN_RANGE: f32 = 80.0;

/// Takes `any` of each block of x to `o`, by `round`. Where that is faster, `in_range` is tried first, which
/// serves arguments up to [`IN_RANGE`].
#[inline(always)]
fn map_row<S: Simd, F: Function>(
    x: Source<'_, S>,
    mut o: RowSink<'_, S>,
    in_range: impl Fn(V<S>, At) -> V<S>,
    any: impl Fn(V<S>, At) -> V<S>,
    round: impl Fn(V<S>) -> S::Packed,
) {
    if F::HAS_FAST && V::<S>::HAS_FAST {
        // A NaN is larger than all.
        let mut largest = V::zero();
        sweep::<S>(
            x.len(),
            #[inline(always)]
            |at| {
                let x = x.load(at);
                largest = x.max_magnitude(largest);
                o.put(at, round(in_range(x, at)));
            },
        );
        if largest.largest() <= IN_RANGE {
            return;
        }
        S::fence(); // before the same memory is stored to again
    }
    sweep_by::<S>(
        !(F::BY_BLOCKS || F::HAS_FAST && V::<S>::HAS_FAST),
        0..x.len(),
        #[inline(always)]
        |at| o.put(at, round(any(x.load(at), at))),
    );
}

/// `o = f(x)`.
pub(crate) struct Forward<'r> {
    pub(crate) act: Act,
    pub(crate) rows: TaskRows<'r, 1, 1>,
    pub(crate) non_temporal: bool,
}

impl Kernel for Forward<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        dispatch_act::<S>(self.act, self);
    }
}

impl<S: Simd> ForEachAct<S> for Forward<'_> {
    #[inline(always)]
    fn run<F: Function>(mut self) {
        while let Some(row) = self.rows.next_row::<S::Elem>() {
            let ([x], [o]) = (row.inputs, row.outputs);
            let x = Source::<S>::new(&x[..o.len()], F::PREFETCH);
            map_row::<S, F>(
                x,
                RowSink::new(o, self.non_temporal),
                #[inline(always)]
                |x, _| F::value_in_range(x),
                #[inline(always)]
                |x, _| F::value_fast(x),
                #[inline(always)]
                |value| F::round(value),
            );
        }
    }
}

/// `x = f(x)`.
pub(crate) struct InPlace<'r> {
    pub(crate) act: Act,
    pub(crate) rows: TaskRows<'r, 0, 1>,
}

impl Kernel for InPlace<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        dispatch_act::<S>(self.act, self);
    }
}

impl<S: Simd> ForEachAct<S> for InPlace<'_> {
    #[inline(always)]
    fn run<F: Function>(mut self) {
        while let Some(row) = self.rows.next_row::<S::Elem>() {
            let [x] = row.outputs;
            let (len, mut x) = (x.len(), RowSink::<S>::new(x, false));
            sweep_blocks(
                0..len,
                #[inline(always)]
                |at| {
                    let value = F::value_fast(x.load(at));
                    x.put(at, F::round(value));
                },
            );
        }
    }
}

/// `dx = grad * f'(x)`.
pub(crate) struct Backward<'r> {
    pub(crate) act: Act,
    pub(crate) rows: TaskRows<'r, 2, 1>,
    pub(crate) non_temporal: bool,
}

impl Kernel for Backward<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        dispatch_act::<S>(self.act, self);
    }
}

impl<S: Simd> ForEachAct<S> for Backward<'_> {
    #[inline(always)]
    fn run<F: Function>(mut self) {
        while let Some(row) = self.rows.next_row::<S::Elem>() {
            let ([x, grad], [dx]) = (row.inputs, row.outputs);
            let x = Source::<S>::new(&x[..dx.len()], F::PREFETCH);
            let grad = Source::<S>::new(&grad[..dx.len()], F::PREFETCH);
            map_row::<S, F>(
                x,
                RowSink::new(dx, self.non_temporal),
                #[inline(always)]
                |x, at| F::gradient_in_range(x, grad.load(at)),
                #[inline(always)]
                |x, at| F::gradient(x, grad.load(at)),
                #[inline(always)]
                |gradient| F::round(gradient),
            );
        }
    }
}

/// `dx = grad * f'(x)`, from o = f(x), for the activations that can do without x.
pub(crate) struct BackwardFromOutput<'r> {
    pub(crate) act: Act,
    pub(crate) rows: TaskRows<'r, 2, 1>,
    pub(crate) non_temporal: bool,
}

impl Kernel for BackwardFromOutput<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        match self.act {
            Act::Relu => self.gradients::<S, Relu>(),
            Act::Sigmoid => self.gradients::<S, Sigmoid>(),
            Act::Tanh => self.gradients::<S, Tanh>(),
            _ => self.gradients::<S, Identity>(),
        }
    }
}

impl BackwardFromOutput<'_> {
    #[inline(always)]
    fn gradients<S: Simd, F: Function>(mut self) {
        S::call(
            #[inline(always)]
            move || {
                while let Some(row) = self.rows.next_row::<S::Elem>() {
                    let ([o, grad], [dx]) = (row.inputs, row.outputs);
                    let o = Source::<S>::new(&o[..dx.len()], Identity::PREFETCH);
                    let grad = Source::<S>::new(&grad[..dx.len()], Identity::PREFETCH);
                    let (len, mut dx) = (dx.len(), RowSink::<S>::new(dx, self.non_temporal));
                    sweep::<S>(
                        len,
                        #[inline(always)]
                        |at| {
                            let gradient = F::gradient_from_output(o.load(at), grad.load(at));
                            dx.put(at, gradient.round());
                        },
                    );
                }
            },
        );
    }
}

/// f(x) of a row, out of line: for kernels that apply any activation on the way, which would be too
/// much code to have in each of them. It is as exact as the element type needs, or as f32 needs if `exact`.
#[inline(always)]
pub(crate) fn values<S: Simd>(act: Act, exact: bool, x: Source<'_, S>, values: &mut [Lane]) {
    struct Values<'r, S: Simd>(bool, Source<'r, S>, &'r mut [Lane]);
    impl<S: Simd> ForEachAct<S> for Values<'_, S> {
        #[inline(always)]
        fn run<F: Function>(self) {
            let Self(exact, x, values) = self;
            sweep_blocks(
                0..x.len(),
                #[inline(always)]
                |at| {
                    let value = match exact && F::HAS_FAST {
                        true => F::value(x.load(at)),
                        false => F::value_fast(x.load(at)),
                    };
                    value.set_at(values, at);
                },
            );
        }
    }
    dispatch_act::<S>(act, Values(exact, x, values));
}

/// f(x) and f'(x) of a row, out of line; as exact as the element type needs, or as f32 needs if `exact`.
#[inline(always)]
pub(crate) fn values_and_slopes<S: Simd>(
    act: Act,
    exact: bool,
    x: Source<'_, S>,
    values: &mut [Lane],
    slopes: &mut [Lane],
) {
    struct Slopes<'r, S: Simd>(bool, Source<'r, S>, [&'r mut [Lane]; 2]);
    impl<S: Simd> ForEachAct<S> for Slopes<'_, S> {
        #[inline(always)]
        fn run<F: Function>(self) {
            let Self(exact, x, [values, slopes]) = self;
            sweep_blocks(
                0..x.len(),
                #[inline(always)]
                |at| {
                    let (value, slope) = match exact && F::HAS_FAST {
                        true => F::value_and_slope(x.load(at)),
                        false => F::value_and_slope_fast(x.load(at)),
                    };
                    value.set_at(values, at);
                    slope.set_at(slopes, at);
                },
            );
        }
    }
    dispatch_act::<S>(act, Slopes(exact, x, [values, slopes]));
}

/// `dx = grad * f'(x)` of a row, out of line, from a gradient in scratch. Of the row that is `ahead` bytes away
/// it asks for x; `dx` comes with the wish for non-temporal stores.
#[inline(always)]
pub(crate) fn gradients<S: Simd>(
    act: Act,
    (x, ahead): (&[S::Elem], isize),
    grad: &[Lane],
    dx: (&mut [S::Elem], bool),
) {
    struct Gradients<'r, S: Simd>(&'r [S::Elem], isize, &'r [Lane], (&'r mut [S::Elem], bool));
    impl<S: Simd> ForEachAct<S> for Gradients<'_, S> {
        #[inline(always)]
        fn run<F: Function>(self) {
            let Self(x, ahead, grad, (dx, non_temporal)) = self;
            map_row::<S, F>(
                Source::new(x, Prefetch::L2(ahead)),
                RowSink::new(dx, non_temporal),
                #[inline(always)]
                |x, at| F::gradient_in_range(x, V::at(grad, at)),
                #[inline(always)]
                |x, at| F::gradient(x, V::at(grad, at)),
                // A gradient in scratch is not a number of 16 bits, even where the activation is exact.
                #[inline(always)]
                |gradient| match F::HAS_FAST {
                    true => gradient.round_ties_away(),
                    false => gradient.round(),
                },
            );
        }
    }
    dispatch_act::<S>(act, Gradients(x, ahead, grad, dx));
}
