//! What forward and backward share: the inputs of a row, the weight, and sums over a row.

use cubecl::prelude::*;
use fuselane::{Act, GatePosition, Normalize, WeightForm};

use crate::kernel::math;
use crate::kernel::reduce::{Fold, Team, over_lanes, over_units};
use crate::kernel::storage::{Operand, RowLayout};
use crate::launch::Storage;
use crate::tensor::Tensor;

/// Vectors that a unit sums before it adds them to its sum, where rows are read again: the error
/// of a sum does not grow with the row then.
pub(super) const CHUNK: usize = 64;

/// How the weight enters, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Weight {
    None,
    Plain,
    OnePlus,
}

/// Where the gate multiplies, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Gate {
    None,
    Pre,
    Post,
}

/// What forward and backward read, in a device's memory. The parameters are dense and of f32.
#[derive(Clone, Copy)]
pub(super) struct InputTensors<'a> {
    pub(super) x: &'a Tensor,
    pub(super) residual: Option<&'a Tensor>,
    pub(super) gate: Option<&'a Tensor>,
    pub(super) weight: Option<&'a Tensor>,
    pub(super) bias: Option<&'a Tensor>,
}

/// What the input of the normalization is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct InputForm {
    residual: bool,
    pub(super) gate: Gate,
    pub(super) act: Act,
    weight: Weight,
    pub(super) bias: bool,
    pub(super) center: bool,
    /// Whether activations are stored in 16 bits.
    pub(super) short: bool,
}

impl InputForm {
    pub(super) fn new(
        options: &Normalize,
        storage: Storage,
        InputTensors { residual, gate, weight, bias, .. }: InputTensors<'_>,
    ) -> Self {
        Self {
            residual: residual.is_some(),
            gate: match (gate, options.gate_position) {
                (None, _) => Gate::None,
                (_, GatePosition::Pre) => Gate::Pre,
                (_, GatePosition::Post) => Gate::Post,
            },
            // One kernel for all calls without a gate.
            act: gate.map_or(Act::None, |_| options.gate_act),
            weight: match (weight, options.weight_form) {
                (None, _) => Weight::None,
                (_, WeightForm::Plain) => Weight::Plain,
                (_, WeightForm::OnePlus) => Weight::OnePlus,
            },
            bias: bias.is_some(),
            center: options.center,
            short: storage.is_short(),
        }
    }

    pub(super) fn has_gate(self) -> bool {
        self.gate != Gate::None
    }
}

/// Operands that forward and backward read.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Inputs<E: Numeric, P: Size> {
    x: Operand<E, P>,
    residual: Operand<E, P>,
    gate: Operand<E, P>,
    #[cube(comptime)]
    pub(super) form: InputForm,
}

/// The weight and the bias, or their gradients.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Parameters<N: Size> {
    pub(super) weight: Box<[Vector<f32, N>]>,
    pub(super) bias: Box<[Vector<f32, N>]>,
}

/// A number for each group of a row: 1 / sigma, or the mean.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Statistic {
    numbers: Box<[f32]>,
    layout: RowLayout,
}

/// The sizes of a call.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Sizes {
    pub(super) shape: Sequence<usize>,
    pub(super) groups: usize,
    /// Vectors of a group.
    pub(super) vectors: usize,
    /// The rows of the launch: those of the call, or the groups of all of them.
    pub(super) rows: usize,
    /// Numbers of a group.
    pub(super) len: f32,
}

/// Where a group of a row begins in each of the inputs.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Starts {
    x: usize,
    residual: usize,
    gate: usize,
}

#[cube]
impl Statistic {
    pub(super) fn get(&self, shape: &Sequence<usize>, row: usize, group: usize) -> f32 {
        self.numbers[self.layout.row_start(shape, row) + group]
    }

    pub(super) fn set(&mut self, shape: &Sequence<usize>, row: usize, group: usize, number: f32) {
        self.numbers[self.layout.row_start(shape, row) + group] = number;
    }
}

/// Where a group of a row begins in an operand, or 0 where that does not take part.
#[cube]
pub(super) fn start_if<E: Numeric, P: Size>(
    operand: &Operand<E, P>,
    shape: &Sequence<usize>,
    row: usize,
    first: usize,
    #[comptime] given: bool,
) -> usize {
    let mut start = 0usize;
    if comptime!(given) {
        start = operand.row_start(shape, row) + first;
    }
    start
}

#[cube]
impl<E: Numeric, P: Size> Inputs<E, P> {
    /// Where the group that begins at vector `first` of a row does.
    pub(super) fn starts(&self, shape: &Sequence<usize>, row: usize, first: usize) -> Starts {
        let x = self.x.row_start(shape, row) + first;
        let form = comptime!(self.form);
        let residual = start_if::<E, P>(&self.residual, shape, row, first, form.residual);
        let has_gate = comptime!(form.has_gate());
        let gate = start_if::<E, P>(&self.gate, shape, row, first, has_gate);
        Starts { x, residual, gate }
    }

    /// x, with the residual.
    pub(super) fn sum<N: Size>(&self, starts: &Starts, column: usize) -> Vector<f32, N> {
        let mut sum = self.x.load::<N>(starts.x + column);
        if comptime!(self.form.residual) {
            sum += self.residual.load::<N>(starts.residual + column);
        }
        sum
    }

    /// The gate before its activation, or zeros where there is none.
    pub(super) fn gate<N: Size>(&self, starts: &Starts, column: usize) -> Vector<f32, N> {
        let mut gate = Vector::<f32, N>::new(0.0f32);
        if comptime!(self.form.has_gate()) {
            gate = self.gate.load::<N>(starts.gate + column);
        }
        gate
    }

    /// `numbers` times the gate, where that comes at `position`.
    pub(super) fn gated<N: Size>(
        &self,
        numbers: Vector<f32, N>,
        starts: &Starts,
        column: usize,
        #[comptime] position: Gate,
    ) -> Vector<f32, N> {
        let mut gated = numbers;
        if comptime!(self.form.gate == position) {
            let gate = self.gate.load::<N>(starts.gate + column);
            gated *= math::value::<N>(gate, self.form.act, self.form.short);
        }
        gated
    }
}

#[cube]
impl<N: Size> Parameters<N> {
    /// The scale times the weight.
    pub(super) fn scaled_weight(
        &self,
        at: usize,
        scale: f32,
        #[comptime] form: InputForm,
    ) -> Vector<f32, N> {
        let mut scaled = Vector::<f32, N>::new(scale);
        if comptime!(form.weight == Weight::Plain) {
            scaled *= self.weight[at];
        }
        if comptime!(form.weight == Weight::OnePlus) {
            scaled *= Vector::<f32, N>::new(1.0f32) + self.weight[at];
        }
        scaled
    }
}

/// The sum over a row of what its units have.
#[cube]
pub(super) fn over_row<N: Size>(
    sum: Vector<f32, N>,
    shared: &mut Shared<[f32]>,
    #[comptime] team: Team,
) -> f32 {
    over_units(over_lanes::<N>(sum, Fold::Sum), shared, Fold::Sum, team)
}

/// 1 / sigma of a row, and the mean, in two numbers: as a forward saved it, and what that lacks.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowMoments {
    pub(super) mean_hi: f32,
    pub(super) mean_lo: f32,
    pub(super) rstd: f32,
}
