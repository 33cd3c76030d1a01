//! What the backward of a row is composed of: the way from the operands to r and back (a [`Prologue`]),
//! and what is asked for (an [`Epilogue`]).

use super::Options;
use crate::kernels::lanes::Lane;
use crate::kernels::normalize::{Any, Sigmoid, Silu};
use crate::kernels::sink::Sink;
use crate::kernels::source::Source;
use crate::kernels::sweep::At;
use crate::ops::act::Act;
use crate::ops::normalize::GatePosition::{Post, Pre};
use crate::simd::math::FoldedSigmoid;
use crate::simd::{Simd, V};

/// What the passes read of a row.
pub(super) struct Inputs<'r, S: Simd> {
    pub(super) grad: Source<'r, S>,
    pub(super) x: Source<'r, S>,
    pub(super) residual: Source<'r, S>,
    pub(super) gate: Source<'r, S>,
    pub(super) grad_residual_out: Source<'r, S>,
    pub(super) weight: &'r [Lane],
    pub(super) bias: &'r [Lane],
    /// g'(gate), if it was found before.
    pub(super) slopes: &'r [Lane],
}

/// What is known of a row as a whole: `f32`, or `V` in a loop.
#[derive(Clone, Copy, Default)]
pub(super) struct Moments<N> {
    pub(super) mean: N,
    pub(super) rstd: N,
    /// The mean of q, which is what is left of the mean of p.
    pub(super) mean_q: N,
    pub(super) mean_dr: N,
    /// The mean of r * dr.
    pub(super) mean_rdr: N,
}

impl Moments<f32> {
    #[inline(always)]
    pub(super) fn splat<S: Simd>(self) -> Moments<V<S>> {
        let Self { mean, rstd, mean_q, mean_dr, mean_rdr } = self;
        let [mean, rstd, mean_q] = [mean, rstd, mean_q].map(V::splat);
        let [mean_dr, mean_rdr] = [mean_dr, mean_rdr].map(V::splat);
        Moments { mean, rstd, mean_q, mean_dr, mean_rdr }
    }
}

/// A block, on the way to its gradients.
pub(super) struct Point<S: Simd> {
    grad: V<S>,
    /// x + residual.
    sum: V<S>,
    weight: V<S>,
    /// g(gate), and its derivative.
    value: V<S>,
    slope: V<S>,
    r: V<S>,
    /// The gradient of p.
    dp: V<S>,
}

/// The gradients of a block.
pub(super) struct Gradients<S: Simd> {
    /// Of the result before a gate that multiplies it.
    do1: V<S>,
    r: V<S>,
    dx: V<S>,
    dgate: V<S>,
}

/// Leads from the operands to r, and from the gradient of p to those of the operands.
pub(super) trait Prologue<S: Simd>: Copy {
    /// Whether a row may be reduced in the loop that writes another one.
    const PIPELINED: bool = true;
    /// Whether it chooses block by block, and so takes no steps and stores no spans, to be less code.
    const GENERIC: bool = false;
    /// Whether the first pass evaluates the gate, which needs the registers, and time enough for a single
    /// sum to wait.
    const GATED: bool = false;
    /// Whether the mean of p is subtracted.
    #[inline(always)]
    fn centers(self) -> bool {
        false
    }
    /// Whether the means are needed.
    #[inline(always)]
    fn reduces(self) -> bool {
        true
    }
    /// The activation of the gate, if its values are to be found before.
    #[inline(always)]
    fn gate_before(self) -> Option<Act> {
        None
    }
    /// x + residual.
    #[inline(always)]
    fn sum(self, row: &Inputs<'_, S>, at: At) -> V<S> {
        row.x.load(at)
    }
    /// g(gate), in the first pass, which keeps something of it for the second one.
    #[inline(always)]
    fn save_gate(self, _row: &Inputs<'_, S>, _saved_gate: &mut [Lane], _at: At) -> V<S> {
        V::zero()
    }
    /// g(gate) and its derivative, in the second pass.
    #[inline(always)]
    fn gate(self, _row: &Inputs<'_, S>, _saved_gate: &[Lane], _at: At) -> (V<S>, V<S>) {
        (V::zero(), V::zero())
    }
    /// p and do1: one of these is multiplied by the gate.
    #[inline(always)]
    fn p_and_do1(self, sum: V<S>, grad: V<S>, _value: V<S>) -> (V<S>, V<S>) {
        (sum, grad)
    }
    /// The gradient of x.
    #[inline(always)]
    fn dx(self, point: &Point<S>, _row: &Inputs<'_, S>, _at: At) -> V<S> {
        point.dp
    }
    /// The gradient of the gate.
    #[inline(always)]
    fn dgate(self, _point: &Point<S>, _row: &Inputs<'_, S>, _at: At) -> V<S> {
        V::zero()
    }
}

/// q and dr of the block at `at`, in the first pass.
#[inline(always)]
pub(super) fn q_and_dr<S: Simd, P: Prologue<S>>(
    prologue: P,
    row: &Inputs<'_, S>,
    mean: V<S>,
    saved_gate: &mut [Lane],
    at: At,
) -> (V<S>, V<S>) {
    let value = prologue.save_gate(row, saved_gate, at);
    let (p, do1) = prologue.p_and_do1(prologue.sum(row, at), row.grad.load(at), value);
    let q = if prologue.centers() { p - mean } else { p };
    (q, do1 * V::at(row.weight, at))
}

/// The gradients of the block at `at`, in the second pass.
#[inline(always)]
pub(super) fn gradients<S: Simd, P: Prologue<S>>(
    prologue: P,
    row: &Inputs<'_, S>,
    moments: &Moments<V<S>>,
    saved_gate: &[Lane],
    at: At,
) -> Gradients<S> {
    let (value, slope) = prologue.gate(row, saved_gate, at);
    let (sum, grad, weight) = (prologue.sum(row, at), row.grad.load(at), V::at(row.weight, at));
    let (p, do1) = prologue.p_and_do1(sum, grad, value);
    let (mut q, mut dr) = (p, do1 * weight);
    if prologue.centers() {
        q = q - moments.mean - moments.mean_q;
        dr = dr - moments.mean_dr;
    }
    let r = q * moments.rstd;
    let dp = r.neg_mul_add(moments.mean_rdr, dr) * moments.rstd;
    let point = Point { grad, sum, weight, value, slope, r, dp };
    let (dx, dgate) = (prologue.dx(&point, row, at), prologue.dgate(&point, row, at));
    Gradients { do1, r, dx, dgate }
}

#[derive(Clone, Copy)]
pub(super) struct Plain;

impl<S: Simd> Prologue<S> for Plain {}

/// x + residual.
#[derive(Clone, Copy)]
pub(super) struct Sum;

impl<S: Simd> Prologue<S> for Sum {
    #[inline(always)]
    fn sum(self, row: &Inputs<'_, S>, at: At) -> V<S> {
        row.x.load(at) + row.residual.load(at)
    }
}

/// Adds the gradient that arrives at x + residual from elsewhere.
#[derive(Clone, Copy)]
pub(super) struct PlusResidualOut;

impl<S: Simd> Prologue<S> for PlusResidualOut {
    #[inline(always)]
    fn dx(self, point: &Point<S>, row: &Inputs<'_, S>, at: At) -> V<S> {
        point.dp + row.grad_residual_out.load(at)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Centered;

impl<S: Simd> Prologue<S> for Centered {
    const PIPELINED: bool = false;
    #[inline(always)]
    fn centers(self) -> bool {
        true
    }
}

/// A gate whose value and slope come of a [`FoldedSigmoid`].
pub(super) trait FoldedGate: Copy {
    /// Whether they come of the gate itself, too.
    const READS_GATE: bool;
    fn value_and_slope<S: Simd>(sigmoid: FoldedSigmoid<S>, gate: V<S>) -> (V<S>, V<S>);
}

impl FoldedGate for Sigmoid {
    const READS_GATE: bool = false;
    #[inline(always)]
    fn value_and_slope<S: Simd>(sigmoid: FoldedSigmoid<S>, _: V<S>) -> (V<S>, V<S>) {
        sigmoid.sigmoid_and_slope()
    }
}

impl FoldedGate for Silu {
    const READS_GATE: bool = true;
    #[inline(always)]
    fn value_and_slope<S: Simd>(sigmoid: FoldedSigmoid<S>, gate: V<S>) -> (V<S>, V<S>) {
        sigmoid.silu_and_slope(gate)
    }
}

/// Where a gate multiplies.
pub(super) trait Position: Copy {
    fn p_and_do1<S: Simd>(sum: V<S>, grad: V<S>, value: V<S>) -> (V<S>, V<S>);
    /// The gradient of x.
    fn dx<S: Simd>(point: &Point<S>) -> V<S>;
    /// The gradient of g(gate).
    fn dvalue<S: Simd>(point: &Point<S>) -> V<S>;
}

/// p = x * g(gate).
#[derive(Clone, Copy)]
pub(super) struct In;

impl Position for In {
    #[inline(always)]
    fn p_and_do1<S: Simd>(sum: V<S>, grad: V<S>, value: V<S>) -> (V<S>, V<S>) {
        (sum * value, grad)
    }
    #[inline(always)]
    fn dx<S: Simd>(point: &Point<S>) -> V<S> {
        point.dp * point.value
    }
    #[inline(always)]
    fn dvalue<S: Simd>(point: &Point<S>) -> V<S> {
        point.dp * point.sum
    }
}

/// do1 = do * g(gate).
#[derive(Clone, Copy)]
pub(super) struct Out;

impl Position for Out {
    #[inline(always)]
    fn p_and_do1<S: Simd>(sum: V<S>, grad: V<S>, value: V<S>) -> (V<S>, V<S>) {
        (sum, grad * value)
    }
    #[inline(always)]
    fn dx<S: Simd>(point: &Point<S>) -> V<S> {
        point.dp
    }
    #[inline(always)]
    fn dvalue<S: Simd>(point: &Point<S>) -> V<S> {
        point.grad * (point.r * point.weight)
    }
}

/// A gate at a position.
#[derive(Clone, Copy)]
pub(super) struct Gated<P, G>(pub(super) P, pub(super) G);

impl<S: Simd, P: Position, G: FoldedGate> Prologue<S> for Gated<P, G> {
    const GATED: bool = true;
    #[inline(always)]
    fn save_gate(self, row: &Inputs<'_, S>, saved_gate: &mut [Lane], at: At) -> V<S> {
        let gate = row.gate.load(at);
        let sigmoid = FoldedSigmoid::of(gate);
        sigmoid.0.set_at(saved_gate, at);
        G::value_and_slope(sigmoid, gate).0
    }
    #[inline(always)]
    fn gate(self, row: &Inputs<'_, S>, saved_gate: &[Lane], at: At) -> (V<S>, V<S>) {
        let gate = if G::READS_GATE { row.gate.load(at) } else { V::zero() };
        G::value_and_slope(FoldedSigmoid(V::at(saved_gate, at)), gate)
    }
    #[inline(always)]
    fn p_and_do1(self, sum: V<S>, grad: V<S>, value: V<S>) -> (V<S>, V<S>) {
        P::p_and_do1(sum, grad, value)
    }
    #[inline(always)]
    fn dx(self, point: &Point<S>, _: &Inputs<'_, S>, _: At) -> V<S> {
        P::dx(point)
    }
    #[inline(always)]
    fn dgate(self, point: &Point<S>, _: &Inputs<'_, S>, _: At) -> V<S> {
        P::dvalue(point) * point.slope
    }
}

/// Takes the gradients of blocks to where they are asked for.
pub(super) trait Epilogue<S: Simd>: Copy {
    #[inline(always)]
    fn writes_dx(self) -> bool {
        true
    }
    #[inline(always)]
    fn writes_dgate(self) -> bool {
        false
    }
    /// Whether dweight is summed, asked for or not.
    #[inline(always)]
    fn sums_dweight(self) -> bool {
        true
    }
    fn put<O: Sink<S>>(self, gradients: Gradients<S>, to: &mut Outputs<'_, O>, at: At);
}

/// Where the gradients of a row go.
pub(super) struct Outputs<'r, O> {
    pub(super) dx: O,
    pub(super) dresidual: O,
    pub(super) dgate: O,
    pub(super) dweight: &'r mut [Lane],
    pub(super) dbias: &'r mut [Lane],
}

impl<O> Outputs<'_, O> {
    #[inline(always)]
    fn add_dweight<S: Simd>(&mut self, gradients: &Gradients<S>, at: At) {
        gradients.do1.mul_add(gradients.r, V::at(self.dweight, at)).set_at(self.dweight, at);
    }

    #[inline(always)]
    fn add_dbias<S: Simd>(&mut self, gradients: &Gradients<S>, at: At) {
        (gradients.do1 + V::at(self.dbias, at)).set_at(self.dbias, at);
    }
}

#[derive(Clone, Copy)]
pub(super) struct Dx;

impl<S: Simd> Epilogue<S> for Dx {
    #[inline(always)]
    fn sums_dweight(self) -> bool {
        false
    }
    #[inline(always)]
    fn put<O: Sink<S>>(self, gradients: Gradients<S>, to: &mut Outputs<'_, O>, at: At) {
        to.dx.put(at, gradients.dx.round());
    }
}

#[derive(Clone, Copy)]
pub(super) struct DxDweight;

impl<S: Simd> Epilogue<S> for DxDweight {
    #[inline(always)]
    fn put<O: Sink<S>>(self, gradients: Gradients<S>, to: &mut Outputs<'_, O>, at: At) {
        to.add_dweight(&gradients, at);
        to.dx.put(at, gradients.dx.round());
    }
}

#[derive(Clone, Copy)]
pub(super) struct DxDweightDbias;

impl<S: Simd> Epilogue<S> for DxDweightDbias {
    #[inline(always)]
    fn put<O: Sink<S>>(self, gradients: Gradients<S>, to: &mut Outputs<'_, O>, at: At) {
        to.add_dweight(&gradients, at);
        to.add_dbias(&gradients, at);
        to.dx.put(at, gradients.dx.round());
    }
}

#[derive(Clone, Copy)]
pub(super) struct DxDgateDweight;

impl<S: Simd> Epilogue<S> for DxDgateDweight {
    #[inline(always)]
    fn writes_dgate(self) -> bool {
        true
    }
    #[inline(always)]
    fn put<O: Sink<S>>(self, gradients: Gradients<S>, to: &mut Outputs<'_, O>, at: At) {
        to.add_dweight(&gradients, at);
        // With an activation in them, a tie is chance.
        to.dgate.put(at, gradients.dgate.round_ties_away());
        to.dx.put(at, gradients.dx.round_ties_away());
    }
}

impl Any<'_, Options> {
    #[inline(always)]
    fn options(self) -> Options {
        *self.0
    }
}

impl<S: Simd> Prologue<S> for Any<'_, Options> {
    const PIPELINED: bool = false;
    const GENERIC: bool = true;
    #[inline(always)]
    fn centers(self) -> bool {
        self.options().center
    }
    #[inline(always)]
    fn reduces(self) -> bool {
        let Options { gate, center, dx, dresidual, dgate, .. } = self.options();
        center || dx || dresidual || dgate && matches!(gate, Some((Pre, _)))
    }
    #[inline(always)]
    fn gate_before(self) -> Option<Act> {
        self.0.gate.map(|gate| gate.1)
    }
    #[inline(always)]
    fn sum(self, row: &Inputs<'_, S>, at: At) -> V<S> {
        if self.options().residual { Sum.sum(row, at) } else { Plain.sum(row, at) }
    }
    #[inline(always)]
    fn save_gate(self, _: &Inputs<'_, S>, saved_gate: &mut [Lane], at: At) -> V<S> {
        if self.options().gate.is_some() { V::at(saved_gate, at) } else { V::zero() }
    }
    #[inline(always)]
    fn gate(self, row: &Inputs<'_, S>, saved_gate: &[Lane], at: At) -> (V<S>, V<S>) {
        if self.options().gate.is_none() {
            return (V::zero(), V::zero());
        }
        row.gate.prefetch(at);
        (V::at(saved_gate, at), V::at(row.slopes, at))
    }
    #[inline(always)]
    fn p_and_do1(self, sum: V<S>, grad: V<S>, value: V<S>) -> (V<S>, V<S>) {
        match self.options().gate {
            None => (sum, grad),
            Some((Pre, _)) => In::p_and_do1(sum, grad, value),
            Some((Post, _)) => Out::p_and_do1(sum, grad, value),
        }
    }
    #[inline(always)]
    fn dx(self, point: &Point<S>, row: &Inputs<'_, S>, at: At) -> V<S> {
        let dx = if let Some((Pre, _)) = self.options().gate { In::dx(point) } else { point.dp };
        if self.options().grad_residual_out { dx + row.grad_residual_out.load(at) } else { dx }
    }
    #[inline(always)]
    fn dgate(self, point: &Point<S>, row: &Inputs<'_, S>, at: At) -> V<S> {
        let Options { gate, bias, dgate, .. } = self.options();
        let Some((position, act)) = gate.filter(|_| dgate) else {
            return V::zero();
        };
        let &Point { grad, weight, slope, r, .. } = point;
        let dvalue = match position {
            Pre => In::dvalue(point),
            Post if bias => grad * (r * weight + V::at(row.bias, at)),
            Post => Out::dvalue(point),
        };
        match act {
            // As `Act::gradient` does.
            Act::Relu | Act::ReluSquared => {
                V::select(slope.le(V::zero()), V::zero(), dvalue * slope)
            }
            _ => dvalue * slope,
        }
    }
}

impl<S: Simd> Epilogue<S> for Any<'_, Options> {
    #[inline(always)]
    fn writes_dx(self) -> bool {
        self.0.dx
    }
    #[inline(always)]
    fn writes_dgate(self) -> bool {
        self.0.dgate
    }
    #[inline(always)]
    fn sums_dweight(self) -> bool {
        self.0.dweight
    }
    #[inline(always)]
    fn put<O: Sink<S>>(self, gradients: Gradients<S>, to: &mut Outputs<'_, O>, at: At) {
        let Options { dx, dresidual, dgate, dweight, dbias, .. } = self.options();
        if dweight {
            to.add_dweight(&gradients, at);
        }
        if dbias {
            to.add_dbias(&gradients, at);
        }
        if dgate {
            to.dgate.put(at, gradients.dgate.round());
        }
        let packed = gradients.dx.round();
        if dx {
            to.dx.put(at, packed);
        }
        if dresidual {
            to.dresidual.put(at, packed);
        }
    }
}
