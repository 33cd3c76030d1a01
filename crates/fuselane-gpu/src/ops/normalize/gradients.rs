//! Of one vector of a row: its terms of the sums that a backward needs, and its gradients.

use cubecl::prelude::*;

use super::inputs::{Gate, InputForm, Inputs, Parameters, RowMoments, Starts, start_if};
use crate::kernel::math;
use crate::kernel::reduce::Team;
use crate::kernel::storage::Operand;

/// What a backward does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BackwardForm {
    pub(super) inputs: InputForm,
    /// Whether a gradient arrives at the sum of x and the residual.
    pub(super) grad_sum: bool,
    pub(super) dx: bool,
    pub(super) dresidual: bool,
    pub(super) dgate: bool,
    pub(super) dweight: bool,
    pub(super) dbias: bool,
    pub(super) team: Team,
    /// Vectors that each unit has in registers; 0 where rows are read again.
    pub(super) per_unit: usize,
}

impl BackwardForm {
    /// Whether sums over the group are needed.
    pub(super) fn needs_sums(self) -> bool {
        let dgate = self.dgate && self.inputs.gate == Gate::Pre;
        self.inputs.center || self.dx || self.dresidual || dgate
    }

    pub(super) fn needs_parameters(self) -> bool {
        self.dweight || self.dbias
    }
}

/// The gradients that have x's shape: those that arrive at o and at the sum of x and the residual,
/// and those that are asked for.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Gradients<E: Numeric, P: Size> {
    pub(super) grad: Operand<E, P>,
    grad_sum: Operand<E, P>,
    dx: Operand<E, P>,
    dresidual: Operand<E, P>,
    dgate: Operand<E, P>,
}

/// Where a group of a row begins in them, but for the first one, and in the parameters.
#[derive(CubeType, Clone, Copy)]
pub(super) struct GradientStarts {
    parameters: usize,
    grad_sum: usize,
    dx: usize,
    dresidual: usize,
    dgate: usize,
}

/// What is subtracted and multiplied in a group of a row.
#[derive(CubeType, Clone, Copy)]
pub(super) struct GradientMoments {
    pub(super) row: RowMoments,
    pub(super) mean_dr: f32,
    pub(super) mean_rdr: f32,
    pub(super) scale: f32,
}

/// A vector of the sum of x and the residual, of the gradient, and of the gate.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Vectors<N: Size> {
    pub(super) sum: Vector<f32, N>,
    pub(super) grad: Vector<f32, N>,
    pub(super) gate: Vector<f32, N>,
}

/// Some of them in registers.
#[derive(CubeType)]
pub(super) struct VectorArray<N: Size> {
    sums: Array<Vector<f32, N>>,
    grads: Array<Vector<f32, N>>,
    gates: Array<Vector<f32, N>>,
}

#[cube]
impl<N: Size> VectorArray<N> {
    pub(super) fn new(#[comptime] len: usize) -> Self {
        let sums = Array::<Vector<f32, N>>::new(len);
        let grads = Array::<Vector<f32, N>>::new(len);
        let gates = Array::<Vector<f32, N>>::new(len);
        VectorArray::<N> { sums, grads, gates }
    }

    pub(super) fn get(&self, #[comptime] i: usize) -> Vectors<N> {
        Vectors::<N> { sum: self.sums[i], grad: self.grads[i], gate: self.gates[i] }
    }

    pub(super) fn set(&mut self, #[comptime] i: usize, vectors: &Vectors<N>) {
        self.sums[i] = vectors.sum;
        self.grads[i] = vectors.grad;
        self.gates[i] = vectors.gate;
    }
}

#[cube]
pub(super) fn load<E: Numeric, P: Size, N: Size>(
    grad: &Operand<E, P>,
    inputs: &Inputs<E, P>,
    grad_start: usize,
    starts: &Starts,
    column: usize,
) -> Vectors<N> {
    let sum = inputs.sum::<N>(starts, column);
    let grad = grad.load::<N>(grad_start + column);
    let gate = inputs.gate::<N>(starts, column);
    Vectors::<N> { sum, grad, gate }
}

/// q (but for the low part of the mean), the gradient that arrives before a gate that comes last,
/// and the activated gate.
#[derive(CubeType, Clone, Copy)]
struct Centered<N: Size> {
    q: Vector<f32, N>,
    grad: Vector<f32, N>,
    gate: Vector<f32, N>,
}

#[cube]
impl<N: Size> Vectors<N> {
    fn centered(&self, mean_hi: f32, #[comptime] form: InputForm) -> Centered<N> {
        let mut gate = self.gate;
        if comptime!(form.has_gate()) {
            gate = math::value::<N>(self.gate, form.act, form.short);
        }
        let mut q = self.sum;
        let mut grad = self.grad;
        if comptime!(form.gate == Gate::Pre) {
            q *= gate;
        }
        if comptime!(form.gate == Gate::Post) {
            grad *= gate;
        }
        if comptime!(form.center) {
            q -= Vector::<f32, N>::new(mean_hi);
        }
        Centered::<N> { q, grad, gate }
    }
}

/// The sums of q, of dr and of their products.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowSums<N: Size> {
    pub(super) q: Vector<f32, N>,
    pub(super) dr: Vector<f32, N>,
    pub(super) product: Vector<f32, N>,
}

#[cube]
impl<N: Size> RowSums<N> {
    pub(super) fn zero() -> Self {
        let zero = Vector::<f32, N>::new(0.0f32);
        RowSums::<N> { q: zero, dr: zero, product: zero }
    }

    pub(super) fn add(
        &mut self,
        vectors: &Vectors<N>,
        scaled_weight: Vector<f32, N>,
        mean_hi: f32,
        #[comptime] form: InputForm,
    ) {
        let centered = vectors.centered(mean_hi, form);
        let dr = centered.grad * scaled_weight;
        self.product += centered.q * dr;
        if comptime!(form.center) {
            self.q += centered.q;
            self.dr += dr;
        }
    }

    pub(super) fn add_chunk(&mut self, chunk: &RowSums<N>, #[comptime] form: InputForm) {
        self.product += chunk.product;
        if comptime!(form.center) {
            self.q += chunk.q;
            self.dr += chunk.dr;
        }
    }
}

/// Terms of the gradients of the parameters.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Terms<N: Size> {
    pub(super) weight: Vector<f32, N>,
    pub(super) bias: Vector<f32, N>,
}

#[cube]
impl<E: Numeric, P: Size> Gradients<E, P> {
    /// Where the group that begins at vector `first` of a row does.
    pub(super) fn starts(
        &self,
        shape: &Sequence<usize>,
        row: usize,
        first: usize,
        #[comptime] form: BackwardForm,
    ) -> GradientStarts {
        let grad_sum = start_if::<E, P>(&self.grad_sum, shape, row, first, form.grad_sum);
        let dx = start_if::<E, P>(&self.dx, shape, row, first, form.dx);
        let dresidual = start_if::<E, P>(&self.dresidual, shape, row, first, form.dresidual);
        let dgate = start_if::<E, P>(&self.dgate, shape, row, first, form.dgate);
        GradientStarts { parameters: first, grad_sum, dx, dresidual, dgate }
    }

    /// Writes those of a column of a group; gives its terms of the gradients of the parameters.
    pub(super) fn write<N: Size>(
        &mut self,
        vectors: &Vectors<N>,
        moments: &GradientMoments,
        parameters: &Parameters<N>,
        starts: &GradientStarts,
        column: usize,
        #[comptime] form: BackwardForm,
    ) -> Terms<N> {
        let inputs = comptime!(form.inputs);
        let centered = vectors.centered(moments.row.mean_hi, inputs);
        let grad = centered.grad;
        let rstd = Vector::<f32, N>::new(moments.row.rstd);
        let mut r = centered.q;
        if comptime!(inputs.center) {
            r -= Vector::<f32, N>::new(moments.row.mean_lo);
        }
        r *= rstd;
        let weight = grad * r * Vector::<f32, N>::new(moments.scale);
        let feature = starts.parameters + column;
        let scaled_weight = parameters.scaled_weight(feature, moments.scale, inputs);
        let mut dr = grad * scaled_weight;
        if comptime!(inputs.center) {
            dr -= Vector::<f32, N>::new(moments.mean_dr);
        }
        let dp = (dr - r * Vector::<f32, N>::new(moments.mean_rdr)) * rstd;
        if comptime!(form.dx || form.dresidual) {
            let mut ds = dp;
            if comptime!(inputs.gate == Gate::Pre) {
                ds *= centered.gate;
            }
            if comptime!(form.grad_sum) {
                ds += self.grad_sum.load::<N>(starts.grad_sum + column);
            }
            if comptime!(form.dx) {
                self.dx.store::<N>(starts.dx + column, ds);
            }
            if comptime!(form.dresidual) {
                self.dresidual.store::<N>(starts.dresidual + column, ds);
            }
        }
        if comptime!(form.dgate) {
            let mut dvalue = dp * vectors.sum;
            if comptime!(inputs.gate == Gate::Post) {
                let mut o = r * scaled_weight;
                if comptime!(inputs.bias) {
                    o += parameters.bias[feature];
                }
                dvalue = vectors.grad * o;
            }
            let dgate = math::pull_back::<N>(vectors.gate, dvalue, inputs.act, inputs.short);
            self.dgate.store::<N>(starts.dgate + column, dgate);
        }
        Terms::<N> { weight, bias: grad }
    }
}

/// Adds to a partial sum in memory, which the first step begins.
#[cube]
pub(super) fn add_to_partial<N: Size>(
    partials: &mut [Vector<f32, N>],
    at: usize,
    value: Vector<f32, N>,
    step: usize,
) {
    let mut sum = value;
    if step > 0usize {
        sum = partials[at] + sum;
    }
    partials[at] = sum;
}

/// The sum of a register over the rows of a team, by the units of its first row, into row `at` of
/// the partial sums.
#[cube]
pub(super) fn store_partial<N: Size>(
    partials: &mut [Vector<f32, N>],
    at: usize,
    inside: bool,
    value: Vector<f32, N>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] team: Team,
) {
    if comptime!(team.rows == 1) {
        if inside {
            partials[at] = value;
        }
    } else {
        let unit = UNIT_POS_X as usize;
        shared[(UNIT_POS_Y * comptime!(team.units)) as usize + unit] = value;
        sync_cube();
        if UNIT_POS_Y == 0u32 && inside {
            let mut sum = value;
            for i in 1..comptime!(team.rows as usize) {
                sum += shared[i * comptime!(team.units as usize) + unit];
            }
            partials[at] = sum;
        }
        sync_cube();
    }
}
