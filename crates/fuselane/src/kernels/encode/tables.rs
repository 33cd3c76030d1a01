//! The angles of a call, and the cosines and sines of a tile of tokens and heads.

use std::ops::Range;

use super::segments::padded;
use super::{Angle, Encoding, Walk};
use crate::exec::scratch::Scratch;
use crate::kernels::lanes::{Lane, to_lanes};
use crate::kernels::sweep::sweep_blocks;
use crate::kernels::tile::InputTile;
use crate::ops::angles::{AngleSplit, Angles, Coordinates, MAX_AXES, Placement, TableAxis};
use crate::simd::{Kernel, LANES, Simd, V};

/// Cosines and sines of `coordinate * theta`, in index order.
pub(crate) struct SinCos<'a> {
    pub(crate) coordinate: f32,
    pub(crate) theta: &'a [f32],
    pub(crate) cos: &'a mut [f32],
    pub(crate) sin: &'a mut [f32],
}

impl Kernel for SinCos<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let coordinate = V::<S>::splat(self.coordinate);
        let rows = self.theta.chunks(LANES).zip(self.cos.chunks_mut(LANES));
        for ((theta, cos), sin) in rows.zip(self.sin.chunks_mut(LANES)) {
            let (mut cosines, mut sines) = ([0.0; LANES], [0.0; LANES]);
            cosines[..theta.len()].copy_from_slice(theta);
            let (s, c) = (coordinate * V::load_f32(&cosines)).sin_cos();
            c.store_f32(&mut cosines);
            s.store_f32(&mut sines);
            cos.copy_from_slice(&cosines[..theta.len()]);
            sin.copy_from_slice(&sines[..theta.len()]);
        }
    }
}

/// What a checked call knows about its angles.
pub(crate) struct AnglePlan<'a> {
    pub(crate) split: AngleSplit,
    /// Whether all heads have the same angles, so that they are made once: theta has one row, or its
    /// rows are the same, as those of the usual schedules are.
    pub(super) shared: bool,
    placement: Placement<'a>,
    tokens: usize,
    source: Source<'a>,
}

enum Source<'a> {
    Frequencies(Scratch<f32>),
    Table { axes: &'a [TableAxis], cos: &'a [f32], sin: &'a [f32] },
}

impl<'a> AnglePlan<'a> {
    /// The angles of a call that was checked, with tokens. Reads theta.
    pub(super) fn new(
        angles: Angles<'a>,
        placement: Placement<'a>,
        split: AngleSplit,
        tokens: usize,
    ) -> Self {
        let source = match angles {
            Angles::Theta(theta) => Source::Frequencies(split.frequencies(theta)),
            Angles::Table(table) => Source::Table {
                axes: table.axes(),
                cos: table.cosines_f32().unwrap_or_default(),
                sin: table.sines_f32().unwrap_or_default(),
            },
        };
        let shared = split.theta_heads == 1
            || matches!(&source, Source::Frequencies(all) if split.same_rows(all));
        Self { split, shared, placement, tokens, source }
    }

    /// Whether each batch entry has its own positions.
    pub(super) fn per_batch(&self) -> bool {
        self.placement.per_batch()
    }

    /// The integer coordinate of a token on each axis.
    #[inline(always)]
    fn coordinates(&self, batch: usize, token: usize) -> Coordinates {
        self.placement.coordinates(self.tokens, batch, token)
    }

    /// Adds `coordinate * gradient` for the angles of one token and head: `gradients[step * j]`
    /// belongs to angle j.
    pub(super) fn add_gradients(
        &self,
        [batch, token]: [usize; 2],
        gradients: &[f32],
        step: usize,
        sums: &mut [f32],
    ) {
        let at = self.coordinates(batch, token);
        for (axis, &coordinate) in at[..self.split.axes].iter().enumerate() {
            let (range, coordinate) = (self.split.range(axis), coordinate as f32);
            let from = gradients[range.start * step..].iter().step_by(step);
            for (sum, &gradient) in sums[range].iter_mut().zip(from) {
                *sum += coordinate * gradient;
            }
        }
    }
}

/// The cosines and sines of a tile of tokens and heads, in the order of lanes.
///
/// Each angle has one entry, or two for operators that pair neighbours: then the sine of the first is
/// negated.
pub(super) struct Tables {
    /// Entries for each angle.
    step: usize,
    /// Entries of one head, in whole blocks.
    width: usize,
    /// Heads with angles of their own in a tile.
    heads: usize,
    /// Cosines in the first half, and sines in the second one.
    entries: Scratch<Lane>,
    /// Where they begin.
    starts: [usize; 2],
    /// The frequencies as the sines have them, for all rows of theta.
    frequencies: Scratch<Lane>,
    /// Cosines and sines of one head, in index order, on their way from an `AngleTable`.
    gathered: Scratch<f32>,
    /// What was filled in last: token of the tile, coordinates, first head.
    last: Option<(usize, Coordinates, usize)>,
    /// [`Tables::fill`] of the instruction set.
    pub(super) fill: fn(&mut Self, &AnglePlan<'_>, usize, Range<usize>, Range<usize>),
}

/// A token of a tile.
#[derive(Clone, Copy)]
struct Token<'t> {
    /// Its place in the tables.
    slot: usize,
    at: &'t Coordinates,
    /// The heads with angles of their own.
    heads: &'t Range<usize>,
}

/// Cosines and sines of some tokens and heads.
#[derive(Clone, Copy)]
pub(super) struct TableRows<'t> {
    /// Each from its cosines to the end of its sines.
    pub(super) rows: InputTile<'t, Lane>,
    /// Where the sines begin.
    sin: usize,
    /// How many there are of each.
    pub(super) width: usize,
}

impl<'t> TableRows<'t> {
    /// The cosines and sines of a token and head.
    #[inline(always)]
    pub(super) fn row(&self, i: usize, j: usize) -> Angle<'t> {
        self.angle(self.rows.row([0, i, j]))
    }

    /// The cosines and sines of a row.
    #[inline(always)]
    pub(super) fn angle<'r>(&self, row: &'r [Lane]) -> Angle<'r> {
        Angle { cos: &row[..self.width], sin: &row[self.sin..][..self.width] }
    }
}

impl Tables {
    /// Room for a tile.
    pub(super) fn new<S: Simd, E: Encoding>(walk: &Walk<'_, '_, E>) -> Self {
        let (plan, step) = (&walk.plan.angles, walk.encoding.angle_step());
        let [tokens, heads] = walk.plan.tile;
        let AngleSplit { theta_heads, count, .. } = plan.split;
        let width = padded(count * step);
        let (theta_heads, heads) = if plan.shared { (1, 1) } else { (theta_heads, heads) };
        let mut frequencies = Scratch::new(0);
        let mut gathered = Scratch::new(0);
        match &plan.source {
            Source::Frequencies(theta) => {
                frequencies = Scratch::new(theta_heads * width);
                for head in 0..theta_heads {
                    let (from, to) = (&theta[head * count..][..count], head * width);
                    lay_out::<S>(from, step, -1.0, &mut frequencies[to..to + width]);
                }
            }
            Source::Table { .. } => gathered = Scratch::new(2 * padded(count)),
        }
        let room = tokens * heads * width + PAGE / size_of::<Lane>();
        let starts = [0, padded(room)];
        let entries = Scratch::new(2 * padded(room));
        Self {
            step,
            width,
            heads,
            entries,
            starts,
            frequencies,
            gathered,
            last: None,
            fill: Self::fill::<S>,
        }
    }

    /// Moves the tables to where their rows are not taken for those of an output at `address`: a load
    /// waits for stores before it whose addresses have the same last 12 bits, and non-temporal stores
    /// take long. Rows of tables and outputs mostly are equally long, so that they keep their distance.
    /// Results do not depend on it.
    pub(super) fn keep_off(&mut self, plan: &AnglePlan<'_>, address: usize) {
        // Entries of several axes are taken over from token to token, and stay where they are.
        if self.last.is_some() && plan.split.axes > 1 {
            return;
        }
        let half = self.entries.len() / 2;
        let (cos, sin) = self.entries.split_at(half);
        let starts =
            [start(cos, address + COS_DISTANCE), half + start(sin, address + SIN_DISTANCE)];
        if starts != self.starts {
            (self.starts, self.last) = (starts, None);
        }
    }

    /// Fills in the angles of neighbouring tokens, from the tile's first on.
    fn fill<S: Simd>(
        &mut self,
        plan: &AnglePlan<'_>,
        batch: usize,
        tokens: Range<usize>,
        heads: Range<usize>,
    ) {
        let heads = if plan.shared { 0..1 } else { heads };
        S::call(
            #[inline(always)]
            move || {
                for (slot, token) in tokens.enumerate() {
                    let at = plan.coordinates(batch, token);
                    let token = Token { slot, at: &at, heads: &heads };
                    match plan.source {
                        Source::Frequencies(_) => self.compute::<S>(&plan.split, token),
                        Source::Table { axes, cos, sin } => {
                            self.look_up::<S>(&plan.split, token, axes, [cos, sin]);
                        }
                    }
                    self.last = Some((slot, at, heads.start));
                }
            },
        );
    }

    /// Cosines and sines of a sub-tile: `rows` tokens, from one of the tile on, and heads.
    #[inline(always)]
    pub(super) fn rows(
        &self,
        plan: &AnglePlan<'_>,
        token: usize,
        rows: [usize; 2],
    ) -> TableRows<'_> {
        let steps = [self.heads * self.width, if plan.shared { 0 } else { self.width }];
        let [cos, sin] = self.starts;
        let (width, sin) = (self.width, sin - cos);
        let entries = &self.entries[cos + token * steps[0]..];
        TableRows { rows: InputTile::strided(entries, rows, steps, sin + width), sin, width }
    }

    /// Where the cosines and sines of a head begin.
    #[inline(always)]
    fn at(&self, slot: usize, head: usize) -> [usize; 2] {
        let at = (slot * self.heads + head) * self.width;
        [self.starts[0] + at, self.starts[1] + at]
    }

    /// Axis by axis; blocks with angles of several axes one by one.
    #[inline(always)]
    fn compute<S: Simd>(&mut self, split: &AngleSplit, token: Token<'_>) {
        let at = token.at;
        let (step, len) = (self.step, split.count * self.step);
        let (mut i, mut axis) = (0, 0);
        while i < len {
            while split.range(axis).end * step <= i {
                axis += 1;
            }
            let end = split.range(axis).end * step;
            let whole = if end == len { padded(len) } else { i + (end - i) / LANES * LANES };
            let (next, coordinates) = match whole == i {
                true => (i + LANES, mixed::<S>(split, i, step, at)),
                false => (whole, V::splat(at[axis] as f32)),
            };
            if whole == i || !self.take_over(token, i..whole, axis) {
                self.sin_cos(token, i..next, coordinates);
            }
            i = next;
        }
    }

    /// Takes over the entries `range`, all of one axis, of the token before, if it stands at the same
    /// coordinate.
    #[inline(always)]
    fn take_over(&mut self, token: Token<'_>, range: Range<usize>, axis: usize) -> bool {
        let Token { slot, at, heads } = token;
        let Some((last, before, head)) = self.last else { return false };
        if before[axis] != at[axis] || head != heads.start {
            return false;
        }
        if last != slot {
            for head in 0..heads.len() {
                let ([cos, sin], [to_cos, to_sin]) = (self.at(last, head), self.at(slot, head));
                let Range { start, end } = range;
                self.entries.copy_within(cos + start..cos + end, to_cos + start);
                self.entries.copy_within(sin + start..sin + end, to_sin + start);
            }
        }
        true
    }

    /// Cosines and sines of the whole blocks `range` of all heads.
    #[inline(always)]
    fn sin_cos<S: Simd>(&mut self, token: Token<'_>, range: Range<usize>, coordinates: V<S>) {
        let Token { slot, heads, .. } = token;
        let ([cos_at, sin_at], width) = (self.at(slot, 0), self.width);
        let frequencies = &*self.frequencies;
        let (cosines, sines) = self.entries[cos_at..].split_at_mut(sin_at - cos_at);
        let (start, len) = (range.start, range.len());
        for head in 0..heads.len() {
            let at = head * width + start;
            let theta = &frequencies[heads.start * width + at..][..len];
            let (cos, sin) = (&mut cosines[at..][..len], &mut sines[at..][..len]);
            sweep_blocks(
                0..len,
                #[inline(always)]
                |at| {
                    let (s, c) = (coordinates * V::at(theta, at)).sin_cos();
                    s.set_at(sin, at);
                    c.set_at(cos, at);
                },
            );
        }
    }

    /// From an `AngleTable`, whose cosines and sines are `all`.
    #[inline(always)]
    fn look_up<S: Simd>(
        &mut self,
        split: &AngleSplit,
        Token { slot, at, heads }: Token<'_>,
        axes: &[TableAxis],
        all: [&[f32]; 2],
    ) {
        let (step, width) = (self.step, self.width);
        for head in 0..heads.len() {
            let [cos_at, sin_at] = self.at(slot, head);
            let (cos, sin) = self.gathered.split_at_mut(padded(split.count));
            let (cos, sin) = (&mut cos[..split.count], &mut sin[..split.count]);
            for (axis, entry) in axes.iter().enumerate() {
                let i = (at[axis] - entry.start) as usize;
                let row = i * split.theta_heads + heads.start + head;
                let first = entry.first + row * entry.width;
                let range = split.range(axis);
                cos[range.clone()].copy_from_slice(&all[0][first..first + entry.width]);
                sin[range].copy_from_slice(&all[1][first..first + entry.width]);
            }
            lay_out::<S>(cos, step, 1.0, &mut self.entries[cos_at..cos_at + width]);
            lay_out::<S>(sin, step, -1.0, &mut self.entries[sin_at..sin_at + width]);
        }
    }
}

/// Addresses that differ by a multiple of this are alike to loads that follow stores.
const PAGE: usize = 4096;
/// Where cosines and sines begin, from where outputs do, in bytes: behind the rows that are written,
/// by more than a row, and before those that are still on their way when they come round again.
const COS_DISTANCE: usize = 768;
const SIN_DISTANCE: usize = 1024;

/// The first whole block of scratch whose address is like a given one.
fn start(scratch: &[Lane], like: usize) -> usize {
    let bytes = like.wrapping_sub(scratch.as_ptr() as usize) % PAGE;
    bytes / size_of::<Lane>() / LANES * LANES
}

/// Brings one number for each angle, in index order, into the order of the tables: `step` entries for
/// each, of which the first of two has a sign.
fn lay_out<S: Simd>(from: &[f32], step: usize, sign: f32, to: &mut [Lane]) {
    S::call(
        #[inline(always)]
        move || {
            if step == 1 {
                return to_lanes::<S>(from, to);
            }
            for (k, from) in from.chunks(LANES / 2).enumerate() {
                let mut block = [0.0; LANES];
                for (pair, &value) in block.as_chunks_mut().0.iter_mut().zip(from) {
                    *pair = [sign * value, value];
                }
                V::<S>::load_f32(&block).set(to, k * LANES);
            }
        },
    );
}

/// The coordinates that belong to the entries of the block at `i`.
#[inline(always)]
fn mixed<S: Simd>(split: &AngleSplit, i: usize, step: usize, at: &Coordinates) -> V<S> {
    let mut coordinates = [0.0; LANES];
    for (j, coordinate) in coordinates.iter_mut().enumerate() {
        let axis = (i + j) / step / split.per_axis;
        *coordinate = at[axis.min(MAX_AXES - 1)] as f32;
    }
    V::load_f32(&coordinates)
}
