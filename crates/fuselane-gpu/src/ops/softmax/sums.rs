//! What a row or a column is reduced to, and the result that is made of it.

use cubecl::prelude::*;

use super::{Inputs, Pass, Plan};
use crate::kernel::math;
use crate::kernel::storage::Operand;

/// Where maxima start.
pub(super) const LEAST: f32 = f32::MIN;
/// How far numbers may exceed what their sum was started with before that is replaced: a slowly
/// rising column then does not collect a rounding error for each step.
const MARGIN: f32 = 8.0;
/// Vectors that [`sweep`] has in flight at once. The same for all widths, so that a column is
/// summed in the same order whatever its neighbours are.
const CHUNK: usize = 4;

/// The statistics of some numbers, each lane for itself.
#[derive(CubeType)]
pub(super) struct Sums<N: Size> {
    pub(super) max: Vector<f32, N>,
    /// What the exponentials in `sum` and `dot` are relative to.
    pub(super) shift: Vector<f32, N>,
    /// Of exp(x - shift); or how many outputs are not masked, where [`Plan::counts`].
    pub(super) sum: Vector<f32, N>,
    /// Of exp(x - shift) * grad, or o * grad; or of grad for the logarithm.
    pub(super) dot: Vector<f32, N>,
}

/// What [`result`] needs of a row or a column.
#[derive(CubeType)]
pub(super) struct Scales<N: Size> {
    max: Vector<f32, N>,
    /// The inverse of the sum, or its logarithm for the forward of the logarithm.
    scale: Vector<f32, N>,
    /// What `grad` is reduced to.
    total: Vector<f32, N>,
}

/// Where a row or a column of an operand begins, and the stride of its vectors.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Axis {
    pub(super) start: usize,
    pub(super) stride: usize,
}

/// That of each operand.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Axes {
    pub(super) x: Axis,
    pub(super) grad: Axis,
    pub(super) o: Axis,
}

/// The vectors `first`, `first + step` and so on, below `end`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Span {
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) step: usize,
}

/// Vectors of x and of the gradient in registers.
#[derive(CubeType)]
pub(super) struct Chunk<N: Size> {
    pub(super) xs: Array<Vector<f32, N>>,
    pub(super) grads: Array<Vector<f32, N>>,
}

#[cube]
impl Axis {
    fn at(&self, i: usize) -> usize {
        self.start + i * self.stride
    }
}

#[cube]
impl<N: Size> Chunk<N> {
    pub(super) fn new(#[comptime] len: usize) -> Self {
        let xs = Array::<Vector<f32, N>>::new(len);
        let grads = Array::<Vector<f32, N>>::new(len);
        Chunk::<N> { xs, grads }
    }

    /// Loads the vectors `from`, `from + step` and so on. What is beyond the end is loaded, so that
    /// all loads go out together, and not used.
    pub(super) fn load<E: Numeric, P: Size>(
        &mut self,
        inputs: &Inputs<E, P>,
        axes: &Axes,
        span: &Span,
        from: usize,
        #[comptime] len: usize,
    ) {
        #[unroll]
        for k in 0..len {
            let i = (from + k * span.step).min(span.end - 1);
            self.xs[k] = inputs.x.load::<N>(axes.x.at(i));
            if comptime!(inputs.plan.needs_grad()) {
                self.grads[k] = inputs.grad.load::<N>(axes.grad.at(i));
            }
        }
    }
}

#[cube]
impl<N: Size> Sums<N> {
    /// No numbers yet.
    pub(super) fn new() -> Self {
        let least = Vector::<f32, N>::new(LEAST);
        let zero = Vector::<f32, N>::new(0.0f32);
        Sums::<N> { max: least, shift: least, sum: zero, dot: zero }
    }

    /// Adds the terms of a vector; gives its exponential, where there is one, or the vector itself.
    pub(super) fn add(
        &mut self,
        x: Vector<f32, N>,
        grad: Vector<f32, N>,
        #[comptime] plan: Plan,
    ) -> Vector<f32, N> {
        let mut weight = x;
        if comptime!(plan.needs_exponentials()) {
            weight = math::exp::<N>(x - self.shift, plan.short);
            self.sum += weight;
        }
        if comptime!(plan.counts()) {
            self.sum += unmasked::<N>(x);
        }
        if comptime!(plan.needs_grad()) {
            if comptime!(plan.log) {
                self.dot += grad;
            } else {
                self.dot += weight * grad;
            }
        }
        weight
    }

    /// Makes the exponentials relative to `max`, which has no number above it.
    pub(super) fn rescale(&mut self, max: Vector<f32, N>, #[comptime] plan: Plan) {
        let scale = math::exp::<N>(self.shift - max, plan.short);
        self.sum *= scale;
        if comptime!(!plan.log) {
            self.dot *= scale;
        }
        self.max = max;
        self.shift = max;
    }
}

#[cube]
pub(super) fn larger<N: Size>(a: Vector<f32, N>, b: Vector<f32, N>) -> Vector<f32, N> {
    let mut larger = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        larger.insert(i, a.extract(i).max(b.extract(i)));
    }
    larger
}

/// For each lane, 0 if it is minus infinity, else 1.
#[cube]
fn unmasked<N: Size>(o: Vector<f32, N>) -> Vector<f32, N> {
    let mut counts = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        counts.insert(i, select(o.extract(i) < LEAST, 0.0f32, 1.0f32));
    }
    counts
}

/// The sums of some vectors.
///
/// A chunk of them is loaded at once, for its maximum and then for its exponentials. These are
/// relative to a shift, which is the maximum of the first chunk until it is exceeded by [`MARGIN`].
#[cube]
pub(super) fn sweep<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    axes: &Axes,
    span: &Span,
) -> Sums<N> {
    let plan = comptime!(inputs.plan);
    let count = comptime!(CHUNK);
    let mut sums = Sums::<N>::new();
    let mut chunk = Chunk::<N>::new(count);
    let mut at = span.first;
    while at < span.end {
        chunk.load::<E, P>(inputs, axes, span, at, count);
        if comptime!(plan.needs_exponentials()) {
            #[unroll]
            for k in 0..count {
                sums.max = larger::<N>(sums.max, chunk.xs[k]);
            }
            #[unroll]
            for i in 0..N::value() {
                let max = sums.max.extract(i);
                if max > sums.shift.extract(i) + MARGIN {
                    let scale = math::exp_of(sums.shift.extract(i) - max, plan.short);
                    sums.shift.insert(i, max);
                    sums.sum.insert(i, sums.sum.extract(i) * scale);
                    if comptime!(plan.needs_grad() && !plan.log) {
                        sums.dot.insert(i, sums.dot.extract(i) * scale);
                    }
                }
            }
        }
        let zero = Vector::<f32, N>::new(0.0f32);
        let mut of_chunk = Sums::<N> { max: sums.max, shift: sums.shift, sum: zero, dot: zero };
        #[unroll]
        for k in 0..count {
            if at + k * span.step < span.end {
                of_chunk.add(chunk.xs[k], chunk.grads[k], plan);
            }
        }
        sums.sum += of_chunk.sum;
        sums.dot += of_chunk.dot;
        at += count * span.step;
    }
    sums
}

/// Stores the results of the vectors that [`sweep`] goes over.
#[cube]
pub(super) fn write<E: Numeric, P: Size, N: Size>(
    inputs: &Inputs<E, P>,
    o: &mut Operand<E, P>,
    axes: &Axes,
    span: &Span,
    scales: &Scales<N>,
) {
    let count = comptime!(CHUNK);
    let mut chunk = Chunk::<N>::new(count);
    let mut at = span.first;
    while at < span.end {
        chunk.load::<E, P>(inputs, axes, span, at, count);
        #[unroll]
        for k in 0..count {
            let i = at + k * span.step;
            if i < span.end {
                let (x, grad) = (chunk.xs[k], chunk.grads[k]);
                let y = result::<N>(x, grad, scales, false, inputs.plan);
                o.store::<N>(axes.o.at(i), y);
            }
        }
        at += count * span.step;
    }
}

/// From the sums of a whole row or column, relative to its maximum.
#[cube]
pub(super) fn scales<N: Size>(sums: &Sums<N>, #[comptime] plan: Plan) -> Scales<N> {
    let mut scale = sums.sum;
    let mut total = sums.dot;
    if comptime!(plan.needs_exponentials()) {
        #[unroll]
        for i in 0..N::value() {
            let sum = sums.sum.extract(i);
            let mut of_lane = 1.0f32 / sum;
            if comptime!(plan.needs_grad() && !plan.log) {
                total.insert(i, sums.dot.extract(i) / sum);
            }
            if comptime!(plan.log && !plan.needs_grad()) {
                // Of nothing but minus infinity: minus infinity, by a division, as shaders cannot
                // write it.
                of_lane = select(sum > 0.0f32, math::ln_of(sum), -1.0f32 / sum);
            }
            if comptime!(plan.zero_masked) {
                of_lane = select(sum == 0.0f32, 0.0f32, of_lane);
            }
            scale.insert(i, of_lane);
        }
    }
    Scales::<N> { max: sums.max, scale, total }
}

/// What is stored for a vector `x`; `exponential` says that it is the exponentials already, if any
/// are needed.
#[cube]
pub(super) fn result<N: Size>(
    x: Vector<f32, N>,
    grad: Vector<f32, N>,
    scales: &Scales<N>,
    #[comptime] exponential: bool,
    #[comptime] plan: Plan,
) -> Vector<f32, N> {
    if comptime!(plan.log && !plan.needs_grad()) {
        x - scales.max - scales.scale
    } else {
        let mut o = x;
        if comptime!(plan.needs_exponentials()) {
            if comptime!(!exponential) {
                o = math::exp::<N>(x - scales.max, plan.short);
            }
            o *= scales.scale;
        } else if comptime!(plan.log) {
            o = math::exp::<N>(x, plan.short);
        }
        if comptime!(plan.needs_grad()) {
            o = pulled_back::<N>(o, grad, scales, plan);
        }
        o
    }
}

/// The gradient, from the softmax `o`.
#[cube]
fn pulled_back<N: Size>(
    o: Vector<f32, N>,
    grad: Vector<f32, N>,
    scales: &Scales<N>,
    #[comptime] plan: Plan,
) -> Vector<f32, N> {
    let mut dx = o * scales.total;
    if comptime!(plan.log) {
        dx = grad - dx;
    } else {
        dx = o * (grad - scales.total);
    }
    if comptime!(plan.zero_masked) {
        // Whatever arrives at a masked row, its gradient is zero. Of an output, a zero needs no
        // look at the rest of its row: any zero has this gradient.
        #[unroll]
        for i in 0..N::value() {
            let mut unmasked = scales.scale.extract(i);
            if comptime!(plan.pass == Pass::FromOutput && !plan.log) {
                unmasked = o.extract(i);
            }
            dx.insert(i, select(unmasked == 0.0f32, 0.0f32, dx.extract(i)));
        }
    }
    dx
}
