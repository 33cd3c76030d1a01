//! A checked call, and what its launches have in common.

use cubecl::prelude::*;
use fuselane::plan::{self, Encoding};
use fuselane::{DType, Error, FusedAct, Positions, Result, TokenLayout, View};

use super::activation::{Activation, ContextLaunch};
use super::pairs::{Form, InputsLaunch, PairLayout, ProblemLaunch};
use super::{Options, elementwise, softmax_features, softmax_sequence, theta};
use crate::angles::Angles;
use crate::copy::{all_through_f32, fill, through_f32, widened};
use crate::device::Device;
use crate::kernel::angles::{AngleForm, AngleSourceLaunch, Coordinates, GivenAngles};
use crate::kernel::storage::{OperandLaunch, RowLayoutLaunch};
use crate::launch::{Storage, Width, buffer, check_buffers, largest, operand, sequence, unused};
use crate::ops::softmax::{StatisticsTensors, column_statistics};
use crate::tensor::Tensor;

/// A call of `rotate` or `cosine`, checked.
pub(super) struct Call<'a> {
    pub(super) operator: &'static str,
    pub(super) encoding: Encoding,
    pub(super) options: Options<'a>,
    pub(super) angles: Angles<'a>,
}

/// Tensors of a backward call.
#[derive(Clone, Copy)]
pub(super) struct Gradients<'a> {
    pub(super) x: Option<&'a Tensor>,
    pub(super) grad: &'a Tensor,
    pub(super) dx: Option<&'a Tensor>,
    pub(super) dtheta: Option<&'a Tensor>,
}

/// Coordinates beyond these are not exact in f32 arithmetic, and come from the host.
const EXACT: i64 = 1 << 23;

impl Call<'_> {
    /// The order of dimensions that makes (batch, tokens, heads, features).
    fn order(&self) -> [usize; 4] {
        match self.options.layout {
            TokenLayout::TokensHeads => [0, 1, 2, 3],
            TokenLayout::HeadsTokens => [0, 2, 1, 3],
        }
    }

    /// The ranges of tokens that are worked on by themselves, as first token and length: packed
    /// sequences where a softmax runs over them, else all tokens.
    fn token_ranges(&self) -> Vec<(usize, usize)> {
        match (self.options.act, self.options.sequences) {
            (FusedAct::SoftmaxSequence, Some(ends)) => ends
                .windows(2)
                .map(|pair| (pair[0], pair[1] - pair[0]))
                .filter(|range| range.1 > 0)
                .collect(),
            _ => vec![(0, self.encoding.tokens)],
        }
    }

    /// The offset that coordinates are counted from, where they are.
    fn counted_from(&self) -> Option<f32> {
        match self.options.positions {
            Positions::From(offset) if self.options.sequences.is_none() => {
                let fits = offset.abs() < EXACT && (self.encoding.tokens as i64) < EXACT;
                fits.then_some(offset as f32)
            }
            _ => None,
        }
    }

    /// The coordinates that a kernel reads; none where it makes them.
    fn listed_coordinates(&self) -> Vec<i64> {
        let Encoding { batch, tokens, .. } = self.encoding;
        let Options { positions, extra_tokens, sequences, .. } = self.options;
        match positions {
            Positions::PerToken(listed) => listed[..tokens].to_vec(),
            Positions::PerBatch(listed) => listed[..batch * tokens].to_vec(),
            // Packed sequences, or far offsets.
            Positions::From(_) if self.counted_from().is_none() => {
                let at = |t| plan::coordinates(positions, extra_tokens, sequences, tokens, 0, t)[0];
                (0..tokens).map(at).collect()
            }
            Positions::From(_) | Positions::Grid(_) => Vec::new(),
        }
    }

    fn prepare(&self, device: &Device) -> Result<Prepared> {
        let split = self.encoding.split;
        let counted_from = self.counted_from();
        let kind = match self.options.positions {
            Positions::From(_) if counted_from.is_some() => Coordinates::Counted,
            Positions::From(_) | Positions::PerToken(_) => Coordinates::PerToken,
            Positions::PerBatch(_) => Coordinates::PerBatch,
            Positions::Grid(shape) => Coordinates::Grid { axes: shape.len() },
        };
        let listed = self.listed_coordinates();
        if let (Angles::Table(_), Some(far)) =
            (&self.angles, listed.iter().find(|c| c.abs() > 2 * EXACT))
        {
            let expected = format!("coordinates within {} of 0 on a GPU", 2 * EXACT);
            let got = format!("is asked for coordinate {far}");
            return Err(Error::new(self.operator, "angle table", got, expected));
        }
        let coordinates = if listed.is_empty() {
            unused(device)?
        } else {
            let listed: Vec<f32> = listed.iter().map(|&coordinate| coordinate as f32).collect();
            device.upload(View::new(&listed, &[listed.len()])?)?
        };
        let (theta, sines) = match &self.angles {
            Angles::Theta(theta) => (widened(self.operator, theta)?, coordinates.clone()),
            Angles::Table(table) => (table.cosines().clone(), table.sines().clone()),
        };
        let given = match self.angles {
            Angles::Theta(_) => GivenAngles::Theta { single: split.theta_columns == 1 },
            Angles::Table(_) => GivenAngles::Table,
        };
        let form = AngleForm { given, shared: split.theta_heads == 1, coordinates: kind };
        let offset = counted_from.unwrap_or(0.0);
        Ok(Prepared { theta, sines, coordinates, form, offset })
    }

    fn pair_layout(&self) -> PairLayout {
        match self.encoding.pairs {
            None => PairLayout::Single,
            Some(plan::Pairs { second: None, .. }) => PairLayout::Interleaved,
            Some(_) => PairLayout::Split,
        }
    }

    /// The numbers at which rows are cut, which a vector's length has to divide.
    fn cuts(&self) -> [usize; 3] {
        let Encoding { features, pairs, .. } = self.encoding;
        match pairs {
            None => [features; 3],
            Some(pairs) => [features, pairs.count, pairs.second.unwrap_or(features)],
        }
    }

    /// Entries of the batch that a unit walks over, where `units` units do one entry.
    ///
    /// As many as make its sines and cosines cheap, unless that leaves a large device without work.
    /// No sum depends on it.
    pub(super) fn chunk(&self, units: usize) -> usize {
        // What the largest devices run at once, some hundred multiprocessors with 2048 units each.
        const UNITS: usize = 1 << 18;
        let batch = self.encoding.batch;
        let chunks = (UNITS / units.max(1)).clamp(1, batch.max(1));
        batch.div_ceil(chunks).max(1)
    }

    fn width(
        &self,
        device: &Device,
        storage: Storage,
        tensors: &[Option<&Tensor>],
    ) -> Option<Width> {
        // Those of a dimension of size 1 too: a batch of one entry is summed as one of many.
        let strides = tensors
            .iter()
            .flatten()
            .flat_map(|tensor| tensor.strides()[..3].iter().copied().chain([tensor.offset()]));
        Width::of(device, storage, strides.chain(self.cuts()))
    }
}

/// What the launches of a call have in common.
struct Prepared {
    /// Frequencies, or cosines; sines; coordinates.
    theta: Tensor,
    sines: Tensor,
    coordinates: Tensor,
    form: AngleForm,
    /// What is added to a counted coordinate.
    offset: f32,
}

/// Tokens that launches work on, and how.
pub(super) struct TokenRange<'a> {
    pub(super) call: &'a Call<'a>,
    prepared: &'a Prepared,
    pub(super) device: &'a Device,
    pub(super) storage: Storage,
    pub(super) width: Width,
    /// The first token, counted in the call.
    first: usize,
    tokens: usize,
    /// The largest number that an index reaches.
    pub(super) numbers: usize,
}

impl<'a> TokenRange<'a> {
    fn new(
        call: &'a Call<'a>,
        prepared: &'a Prepared,
        device: &'a Device,
        [first, tokens]: [usize; 2],
        tensors: &[Option<&Tensor>],
    ) -> Result<Self> {
        let dtype = tensors.iter().flatten().next().map_or(DType::F32, |tensor| tensor.dtype());
        let storage = Storage::of(device, dtype);
        // The tensors are those of the call, of which it was found that there is a width.
        let width = call.width(device, storage, tensors).ok_or_else(|| {
            let got = "has an odd number of elements";
            Error::new(call.operator, "x", got, "pairs of bf16 in whole words")
        })?;
        let numbers = largest(tensors.iter().copied());
        Ok(Self { call, prepared, device, storage, width, first, tokens, numbers })
    }

    /// The same tokens, for launches on some of the tensors alone.
    pub(super) fn of_tensors(&self, tensors: &[Option<&Tensor>]) -> Result<Self> {
        let Self { call, prepared, device, first, tokens, .. } = *self;
        Self::new(call, prepared, device, [first, tokens], tensors)
    }

    pub(super) fn batch(&self) -> usize {
        self.call.encoding.batch
    }

    /// Rows of an entry of the batch: tokens and heads.
    pub(super) fn rows(&self) -> usize {
        self.tokens * self.call.encoding.heads
    }

    /// Vectors of pairs of a row.
    pub(super) fn vectors(&self) -> usize {
        let Encoding { features, pairs, .. } = self.call.encoding;
        let n = self.width.numbers;
        features / n - pairs.map_or(0, |pairs| pairs.count / n)
    }

    /// Blocks that sums over the tokens are cut into, and tokens of each. A function of the sizes
    /// alone, so that sums repeat: some hundred blocks at most.
    pub(super) fn token_blocks(&self) -> (usize, usize) {
        const BLOCKS: usize = 256;
        let per_block = self.tokens.div_ceil(BLOCKS).max(8);
        (self.tokens.div_ceil(per_block), per_block)
    }

    /// A tensor of (batch, tokens, heads, features) as a kernel's argument.
    pub(super) fn operand<E: Numeric, P: Size>(&self, tensor: &Tensor) -> OperandLaunch<E, P> {
        let n = self.width.numbers;
        let outer = tensor.shape()[..3].iter().zip(&tensor.strides()[..3]);
        // The stride of a dimension of size 1 may be anything.
        let strides = outer.map(|(&size, &stride)| if size > 1 { stride / n } else { 0 });
        let layout = RowLayoutLaunch::new(tensor.offset() / n, sequence(strides));
        operand(tensor, layout, self.storage)
    }

    pub(super) fn inputs<E: Numeric, P: Size>(
        &self,
        [x, grad]: [&Tensor; 2],
    ) -> InputsLaunch<E, P> {
        InputsLaunch::new(self.operand(x), self.operand(grad))
    }

    pub(super) fn problem(&self, chunk: usize, act: Activation) -> ProblemLaunch {
        let Encoding { batch, heads, features, pairs, .. } = self.call.encoding;
        let (features, n) = (features / self.width.numbers, self.width.numbers);
        let (rotated, second) = match pairs {
            None => (features, features),
            Some(pairs) => (pairs.count / n, pairs.second.unwrap_or(0) / n),
        };
        let form = Form {
            pairs: self.call.pair_layout(),
            act,
            heads_inside: self.call.options.layout == TokenLayout::TokensHeads,
            short: self.storage.is_short(),
            short_exp: self.storage == Storage::F16,
        };
        let (tokens, vectors) = (self.tokens, self.vectors());
        ProblemLaunch::new(batch, chunk, tokens, heads, vectors, rotated, features, second, form)
    }

    pub(super) fn angles(&self) -> AngleSourceLaunch {
        let Self { call, prepared, .. } = self;
        let split = call.encoding.split;
        let grid: &[usize] = match call.options.positions {
            Positions::Grid(shape) => shape,
            _ => &[],
        };
        let axes = match &call.angles {
            Angles::Table(table) => table.axes(),
            Angles::Theta(_) => &[],
        };
        let mut starts = SequenceArg::new();
        for axis in axes {
            starts.push(axis.start as f32);
        }
        let columns =
            if prepared.form.is_table() { split.theta_heads } else { split.theta_columns };
        AngleSourceLaunch::new(
            buffer(&prepared.theta, Storage::F32),
            buffer(&prepared.sines, Storage::F32),
            buffer(&prepared.coordinates, Storage::F32),
            call.encoding.tokens,
            self.first,
            call.options.extra_tokens,
            prepared.offset,
            split.per_axis,
            columns,
            sequence(grid.iter().copied()),
            starts,
            sequence(axes.iter().map(|axis| axis.first)),
            sequence(axes.iter().map(|axis| axis.width)),
            prepared.form,
        )
    }

    pub(super) fn context(
        &self,
        statistics: &StatisticsTensors,
        chunk: usize,
        act: Activation,
    ) -> ContextLaunch {
        ContextLaunch::new(statistics.into(), self.angles(), self.problem(chunk, act))
    }

    /// Memory to stand where a kernel has an argument that it does not touch.
    fn unused(&self) -> Tensor {
        self.prepared.coordinates.clone()
    }

    /// The activation of `x` with its statistics.
    fn activation(&self, x: &Tensor) -> Result<(Activation, StatisticsTensors)> {
        Ok(match self.call.options.act {
            FusedAct::Elementwise(act) => {
                let (maxima, inverses) = (self.unused(), self.unused());
                (Activation::Elementwise(act), StatisticsTensors { maxima, inverses })
            }
            FusedAct::SoftmaxSequence => {
                (Activation::Columns, column_statistics(self.call.operator, x, 1)?)
            }
            FusedAct::SoftmaxFeatures => (Activation::Rows, softmax_features::statistics(self, x)?),
        })
    }

    fn forward(&self, x: &Tensor, o: &Tensor) -> Result<()> {
        let over_features = self.call.options.act == FusedAct::SoftmaxFeatures;
        if over_features && softmax_features::forward(self, x, o)? {
            return Ok(());
        }
        let (act, statistics) = self.activation(x)?;
        elementwise::forward(self, act, &statistics, x, o)
    }

    /// Writes dx, and returns the partial sums of the angles' gradients.
    fn backward(&self, gradients: Gradients<'_>) -> Result<Option<Tensor>> {
        let Gradients { x, grad, mut dx, dtheta } = gradients;
        // Where x is not needed, something has to stand for it.
        let x = x.unwrap_or(grad);
        let over_features = self.call.options.act == FusedAct::SoftmaxFeatures;
        if let (true, Some(to)) = (over_features, dx) {
            if softmax_features::backward(self, [x, grad, to])? {
                dx = None;
            }
        }
        if dx.is_none() && dtheta.is_none() {
            return Ok(None);
        }
        let (act, statistics) = self.activation(x)?;
        if let Some(dx) = dx {
            let dots = match act {
                Activation::Elementwise(_) => self.unused(),
                Activation::Rows => softmax_features::dots(self, &statistics, [x, grad])?,
                Activation::Columns => softmax_sequence::dots(self, &statistics, [x, grad])?,
            };
            elementwise::backward(self, act, &statistics, &dots, [x, grad, dx])?;
        }
        dtheta.map(|_| theta::partial_sums(self, act, &statistics, [x, grad])).transpose()
    }
}

/// Encodes `x` into `o`.
pub(super) fn forward(call: &Call<'_>, x: &Tensor, o: &Tensor) -> Result<()> {
    if call.encoding.is_empty() {
        return Ok(());
    }
    let (device, operator) = (o.device(), call.operator);
    check_buffers(operator, device, 7)?;
    let prepared = call.prepare(device)?;
    let order = call.order();
    let (x, o) = (x.permute(&order)?, o.permute(&order)?);
    let run = |[x]: [&Tensor; 1], [o]: [&Tensor; 1]| {
        for (first, len) in call.token_ranges() {
            let (x, o) = (x.narrow(1, first, len)?, o.narrow(1, first, len)?);
            let tensors = [Some(&x), Some(&o)];
            TokenRange::new(call, &prepared, device, [first, len], &tensors)?.forward(&x, &o)?;
        }
        Ok(())
    };
    if call.width(device, Storage::of(device, x.dtype()), &[Some(&x), Some(&o)]).is_some() {
        return run([&x], [&o]);
    }
    // Two bf16 of a word belong to two units.
    all_through_f32(operator, [&x], [&o], run)
}

/// Pulls `grad` back through the encoding and the activation.
pub(super) fn backward(call: &Call<'_>, gradients: Gradients<'_>) -> Result<()> {
    let Gradients { x, grad, dx, dtheta } = gradients;
    let (device, operator) = (grad.device(), call.operator);
    if x.is_none() && dx.is_none() {
        return Ok(());
    }
    if call.encoding.is_empty() {
        return dtheta.map_or(Ok(()), |dtheta| fill(operator, dtheta, 0.0));
    }
    check_buffers(operator, device, 9)?;
    let prepared = call.prepare(device)?;
    let order = call.order();
    let x = x.map(|x| x.permute(&order)).transpose()?;
    let grad = grad.permute(&order)?;
    let dx = dx.map(|dx| dx.permute(&order)).transpose()?;
    let mut partials = Vec::new();
    let mut run = |[x, grad]: [Option<&Tensor>; 2], [dx]: [Option<&Tensor>; 1]| {
        let Some(grad) = grad else { return Ok(()) };
        for (first, len) in call.token_ranges() {
            let x = x.map(|x| x.narrow(1, first, len)).transpose()?;
            let dx = dx.map(|dx| dx.narrow(1, first, len)).transpose()?;
            let grad = grad.narrow(1, first, len)?;
            let (x, grad, dx) = (x.as_ref(), &grad, dx.as_ref());
            let tensors = [x, Some(grad), dx];
            let range = TokenRange::new(call, &prepared, device, [first, len], &tensors)?;
            partials.extend(range.backward(Gradients { x, grad, dx, dtheta })?);
        }
        Ok(())
    };
    let (inputs, outputs) = ([x.as_ref(), Some(&grad)], [dx.as_ref()]);
    let tensors = [x.as_ref(), Some(&grad), dx.as_ref()];
    if call.width(device, Storage::of(device, grad.dtype()), &tensors).is_some() {
        run(inputs, outputs)?;
    } else {
        through_f32(operator, inputs, outputs, run)?;
    }
    dtheta.map_or(Ok(()), |dtheta| theta::gradient(call, device, &partials, dtheta))
}
