//! The angles of position encodings: which angle each token, head and pair has.
//!
//! Tokens stand at integer coordinates on `m` axes (one axis for a sequence). A head has `count`
//! angles per token, split among the axes: angle j lies on axis j / e and is
//!
//! ```text
//! A[j] = coordinate(axis) * theta[j mod e]        with e = columns of theta, e * m >= count
//! ```
//!
//! as the f32 product, rounded once (f64 for f64 activations). A theta with a single column serves
//! every angle. Sines and cosines are computed tile by tile and used for the whole batch, or
//! taken from an [`AngleTable`] that a caller made once.

use std::ops::Range;

use crate::dtype::{DType, Element, Real, with_real};
use crate::error::{Error, Result};
use crate::isa;
use crate::pool::{same_reals, same_reals_mut};
use crate::scratch::Scratch;
use crate::simd::{self, Kernel, Lanes, MAX_LANES, Math, Memory};
use crate::view::{View, ViewMut};

/// Where each token stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions<'a> {
    /// Token t stands at t + offset (within its packed sequence, if there are several).
    From(i64),
    /// One position for each of the n tokens, the same for every batch entry.
    PerToken(&'a [i64]),
    /// b * n positions, one for each batch entry and token.
    PerBatch(&'a [i64]),
    /// Tokens on a grid of this shape, the last axis fastest; the angles are split among the axes.
    Grid(&'a [usize]),
}

impl Default for Positions<'_> {
    fn default() -> Self {
        Self::From(0)
    }
}

/// The frequencies of a call: theta itself, or sines and cosines made from it before.
///
/// Theta has shape (h, e), (1, e), (h, 1) or (1, 1).
#[derive(Debug, Clone, Copy)]
pub enum Angles<'a> {
    /// Frequencies; sines and cosines are computed as they are needed.
    Theta(View<'a>),
    /// A table, shared by calls.
    Table(&'a AngleTable),
}

impl<'a> From<View<'a>> for Angles<'a> {
    fn from(theta: View<'a>) -> Self {
        Self::Theta(theta)
    }
}

impl<'a> From<&'a AngleTable> for Angles<'a> {
    fn from(table: &'a AngleTable) -> Self {
        Self::Table(table)
    }
}

/// Sines and cosines of all angles of a sequence or grid, made once and shared between queries
/// and keys, layers and steps.
///
/// A grid's table has one entry per coordinate of each axis, not per token, so it is small.
///
/// ```
/// use fuselane::{AngleTable, DType, View};
/// let theta = [1.0f32, 0.1];
/// let theta = View::new(&theta, &[1, 2])?;
/// let sequence = AngleTable::for_sequence(theta, 2, 0..1024, DType::BF16)?;
/// assert_eq!(sequence.bytes(), 1024 * 2 * 2 * 4);
/// let grid = AngleTable::for_grid(theta, 4, &[32, 32], DType::BF16)?;
/// assert_eq!(grid.bytes(), (32 + 32) * 2 * 2 * 4);
/// # Ok::<(), fuselane::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct AngleTable {
    split: Split,
    axes: Vec<Axis>,
    values: Values,
}

/// How many angles a head has, and how they spread over theta and the axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Split {
    /// Rows of theta: 1 (shared) or one per head.
    pub(crate) theta_heads: usize,
    /// Columns of theta.
    pub(crate) theta_columns: usize,
    /// Angles per token and head.
    pub(crate) count: usize,
    /// Angles on each axis but the last, which may have fewer.
    pub(crate) per_axis: usize,
    /// Axes.
    pub(crate) axes: usize,
}

/// The entries of one axis: coordinates `start..start + len`, each with `heads * width` cosines
/// and sines, from `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Axis {
    start: i64,
    len: usize,
    first: usize,
    width: usize,
}

#[derive(Debug, Clone, PartialEq)]
enum Values {
    F32 { cos: Vec<f32>, sin: Vec<f32> },
    F64 { cos: Vec<f64>, sin: Vec<f64> },
}

impl Values {
    fn dtype(&self) -> DType {
        match self {
            Self::F32 { .. } => DType::F32,
            Self::F64 { .. } => DType::F64,
        }
    }

    fn slices<R: Real>(&self) -> (&[R], &[R]) {
        match self {
            Self::F32 { cos, sin } => (same_reals(cos), same_reals(sin)),
            Self::F64 { cos, sin } => (same_reals(cos), same_reals(sin)),
        }
    }
}

impl Split {
    /// Checks theta's shape and spreads `count` angles over it.
    pub(crate) fn new(
        operator: &'static str,
        theta: View<'_>,
        count: usize,
        axes: usize,
    ) -> Result<Self> {
        let &[theta_heads, theta_columns] = theta.shape() else {
            return Err(Error::new(
                operator,
                "theta",
                format!("has shape {:?}", theta.shape()),
                "(heads, frequencies), (1, frequencies) or (heads, 1)",
            ));
        };
        let per_axis = if theta_columns == 1 { count.div_ceil(axes.max(1)) } else { theta_columns };
        if per_axis.saturating_mul(axes) < count {
            return Err(Error::new(
                operator,
                "theta",
                format!("has {theta_columns} frequencies for each of {axes} axes"),
                format!("at least {count} angles in all"),
            ));
        }
        Ok(Self { theta_heads, theta_columns, count, per_axis, axes })
    }

    /// Heads have to be the call's, or one for all.
    fn check_heads(&self, operator: &'static str, name: &'static str, heads: usize) -> Result<()> {
        if self.theta_heads != 1 && self.theta_heads != heads {
            return Err(Error::new(
                operator,
                name,
                format!("has {} heads", self.theta_heads),
                format!("1 or {heads} (heads of x)"),
            ));
        }
        Ok(())
    }

    /// The angles on an axis.
    #[inline(always)]
    fn range(&self, axis: usize) -> Range<usize> {
        let from = axis.saturating_mul(self.per_axis).min(self.count);
        from..(from + self.per_axis.min(self.count)).min(self.count)
    }

    /// The column of theta that an angle comes from.
    #[inline(always)]
    fn column(&self, angle: usize) -> usize {
        if self.theta_columns == 1 { 0 } else { angle % self.per_axis }
    }

    /// The frequency of each angle: `theta_heads` rows of `count`.
    fn frequencies<R: Real>(&self, theta: View<'_>) -> Scratch<R> {
        // Only the columns in use: theta may be a broadcast view, longer than any memory.
        let columns = self.theta_columns.min(self.count);
        let theta = theta.narrow(1, 0, columns).unwrap_or(theta);
        let mut given = Scratch::<R>::new(theta.len());
        theta.widen(&mut given);
        let mut spread = Scratch::<R>::zeros(self.theta_heads * self.count);
        for (row, spread) in spread.chunks_mut(self.count.max(1)).take(self.theta_heads).enumerate()
        {
            for (angle, value) in spread.iter_mut().enumerate() {
                *value = given[row * columns + self.column(angle)];
            }
        }
        spread
    }

    /// Gathers the gradients of the angles (`theta_heads` rows of `count`) into theta's shape.
    pub(crate) fn gather<R: Real>(&self, angles: &[R], dtheta: &mut ViewMut<'_>) {
        let len = self.theta_heads * self.theta_columns;
        let mut sums = Scratch::<f64>::zeros(len);
        for row in 0..self.theta_heads {
            for angle in 0..self.count {
                sums[row * self.theta_columns + self.column(angle)] +=
                    angles[row * self.count + angle].to_f64();
            }
        }
        dtheta.round_from(&sums[..len]);
    }
}

impl AngleTable {
    /// The angles of a sequence whose positions lie in `positions`, `count` for each token and
    /// head, for activations of `dtype`. `rotate` has one angle per pair, `cosine` one per
    /// feature.
    pub fn for_sequence(
        theta: View<'_>,
        count: usize,
        positions: Range<i64>,
        dtype: DType,
    ) -> Result<Self> {
        let len = usize::try_from(positions.end.saturating_sub(positions.start)).unwrap_or(0);
        Self::new(theta, count, &[(positions.start, len)], dtype)
    }

    /// The angles of tokens on a grid.
    pub fn for_grid(theta: View<'_>, count: usize, shape: &[usize], dtype: DType) -> Result<Self> {
        let axes: Vec<(i64, usize)> = shape.iter().map(|&len| (0, len)).collect();
        Self::new(theta, count, &axes, dtype)
    }

    fn new(theta: View<'_>, count: usize, axes: &[(i64, usize)], dtype: DType) -> Result<Self> {
        const OPERATOR: &str = "angle_table";
        if axes.is_empty() || axes.len() > MAX_AXES {
            let got = format!("has {} axes", axes.len());
            return Err(Error::new(OPERATOR, "grid", got, format!("1 to {MAX_AXES}")));
        }
        let split = Split::new(OPERATOR, theta, count, axes.len())?;
        let mut total = 0usize;
        let mut entries = Vec::with_capacity(axes.len());
        for (axis, &(start, len)) in axes.iter().enumerate() {
            let width = split.range(axis).len();
            entries.push(Axis { start, len, first: total, width });
            let more = len.checked_mul(split.theta_heads).and_then(|n| n.checked_mul(width));
            total = more
                .and_then(|more| total.checked_add(more))
                .filter(|&total| total < isize::MAX as usize / 16)
                .ok_or_else(|| {
                    let got = format!("of {len} coordinates overflows memory");
                    Error::new(OPERATOR, "positions", got, "a table that fits")
                })?;
        }
        let values = with_real!(dtype, R => {
            let (mut cos, mut sin): (Vec<R>, Vec<R>) = (Vec::new(), Vec::new());
            if cos.try_reserve_exact(total).is_err() || sin.try_reserve_exact(total).is_err() {
                return Err(Error::new(
                    OPERATOR,
                    "positions",
                    format!("need a table of {} bytes", 2 * total * size_of::<R>()),
                    "memory for it",
                ));
            }
            cos.resize(total, 0.0);
            sin.resize(total, 0.0);
            let frequencies = split.frequencies::<R>(theta);
            for (axis, entry) in entries.iter().enumerate() {
                // Without angles there may be any number of coordinates.
                let len = if entry.width == 0 || split.theta_heads == 0 { 0 } else { entry.len };
                for i in 0..len {
                    let coordinate = R::of_integer(entry.start + i as i64);
                    for head in 0..split.theta_heads {
                        let at = entry.first + (i * split.theta_heads + head) * entry.width;
                        let theta = &frequencies[head * count..][split.range(axis)];
                        simd::run(isa(), R::DTYPE, SinCos {
                            coordinate,
                            theta,
                            cos: &mut cos[at..at + entry.width],
                            sin: &mut sin[at..at + entry.width],
                        });
                    }
                }
            }
            Values::from((cos, sin))
        });
        Ok(Self { split, axes: entries, values })
    }

    /// Bytes that the table takes.
    pub fn bytes(&self) -> usize {
        match &self.values {
            Values::F32 { cos, .. } => cos.len() * 8,
            Values::F64 { cos, .. } => cos.len() * 16,
        }
    }

    /// Angles per token and head.
    pub fn count(&self) -> usize {
        self.split.count
    }
}

impl From<(Vec<f32>, Vec<f32>)> for Values {
    fn from((cos, sin): (Vec<f32>, Vec<f32>)) -> Self {
        Self::F32 { cos, sin }
    }
}

impl From<(Vec<f64>, Vec<f64>)> for Values {
    fn from((cos, sin): (Vec<f64>, Vec<f64>)) -> Self {
        Self::F64 { cos, sin }
    }
}

/// Sines and cosines of `coordinate * theta`.
struct SinCos<'a, R> {
    coordinate: R,
    theta: &'a [R],
    cos: &'a mut [R],
    sin: &'a mut [R],
}

impl<R: Real> Kernel for SinCos<'_, R> {
    #[inline(always)]
    fn run<L, T>(self)
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let coordinate = T::Real::of(self.coordinate.to_f64());
        let theta: &[T::Real] = same_reals(self.theta);
        sin_cos::<L>(coordinate, theta, same_reals_mut(self.cos), same_reals_mut(self.sin));
    }
}

#[inline(always)]
fn sin_cos<L>(coordinate: L::Real, theta: &[L::Real], cos: &mut [L::Real], sin: &mut [L::Real])
where
    L: Math + Memory<<L as Lanes>::Real>,
{
    for i in (0..theta.len()).step_by(L::N) {
        let theta: L = L::read(theta, i, Real::of(0.0));
        let (s, c) = L::splat(coordinate).mul(theta).sin_cos();
        s.write(sin, i, false);
        c.write(cos, i, false);
    }
}

/// What a call knows about its angles, checked.
pub(crate) struct AnglePlan<'a, R: Real> {
    pub(crate) split: Split,
    positions: Positions<'a>,
    extra_tokens: usize,
    sequences: Option<&'a [usize]>,
    tokens: usize,
    source: Source<'a, R>,
}

enum Source<'a, R: Real> {
    Frequencies(Scratch<R>),
    Table { axes: &'a [Axis], cos: &'a [R], sin: &'a [R] },
}

/// The most axes of a grid.
const MAX_AXES: usize = 16;

/// Where the tokens of a call stand, before it is known how the angles are made.
#[derive(Clone, Copy)]
pub(crate) struct Placement<'a> {
    pub(crate) positions: Positions<'a>,
    pub(crate) extra_tokens: usize,
    pub(crate) sequences: Option<&'a [usize]>,
}

impl Placement<'_> {
    /// The number of axes.
    pub(crate) fn axes(&self) -> usize {
        match self.positions {
            Positions::Grid(shape) => shape.len(),
            _ => 1,
        }
    }

    /// Checks everything that does not concern theta.
    pub(crate) fn check(&self, operator: &'static str, batch: usize, tokens: usize) -> Result<()> {
        let fail = |argument, got: String, expected: String| {
            Err(Error::new(operator, argument, got, expected))
        };
        let extra = self.extra_tokens;
        match self.positions {
            Positions::From(offset) => {
                if extra > tokens {
                    let expected = format!("at most {tokens} (tokens of x)");
                    return fail("extra_tokens", format!("is {extra}"), expected);
                }
                if offset.checked_add_unsigned(tokens as u64).is_none() {
                    let expected = "positions that fit into i64".into();
                    return fail("positions", format!("start at {offset}"), expected);
                }
            }
            Positions::PerToken(given) if given.len() != tokens => {
                let expected = format!("{tokens} (tokens of x)");
                return fail("positions", format!("has {} entries", given.len()), expected);
            }
            Positions::PerBatch(given) if Some(given.len()) != batch.checked_mul(tokens) => {
                let expected = format!("{batch} * {tokens} (batch and tokens of x)");
                return fail("positions", format!("has {} entries", given.len()), expected);
            }
            Positions::PerToken(_) | Positions::PerBatch(_) if extra != 0 => {
                let expected = "0 where positions are given per token".into();
                return fail("extra_tokens", format!("is {extra}"), expected);
            }
            Positions::PerToken(_) | Positions::PerBatch(_) => {}
            Positions::Grid(shape) => {
                if shape.is_empty() || shape.len() > MAX_AXES {
                    let expected = format!("1 to {MAX_AXES}");
                    return fail("grid", format!("has {} axes", shape.len()), expected);
                }
                let cells = shape.iter().try_fold(1usize, |n, &s| n.checked_mul(s));
                if cells.and_then(|cells| cells.checked_add(extra)) != Some(tokens) {
                    let expected = format!("{tokens} in all (tokens of x)");
                    return fail("grid", format!("{shape:?} and {extra} extra tokens"), expected);
                }
            }
        }
        let Some(ends) = self.sequences else { return Ok(()) };
        if matches!(self.positions, Positions::Grid(_)) || extra != 0 {
            let expected = "none with a grid or extra tokens".into();
            return fail("sequences", "are given".into(), expected);
        }
        let rising = ends.windows(2).all(|pair| pair[0] <= pair[1]);
        if ends.first() != Some(&0) || ends.last() != Some(&tokens) || !rising {
            let expected = format!("ends that rise from 0 to {tokens} (tokens of x)");
            return fail("sequences", describe(ends), expected);
        }
        Ok(())
    }
}

fn describe(ends: &[usize]) -> String {
    match ends {
        [] => "are empty".into(),
        [first, .., last] => format!("run from {first} to {last} in {} entries", ends.len()),
        [only] => format!("are [{only}]"),
    }
}

impl<'a, R: Real> AnglePlan<'a, R> {
    /// Checks the angles of a call with `count` angles for each token and head.
    pub(crate) fn new(
        operator: &'static str,
        angles: Angles<'a>,
        placement: Placement<'a>,
        count: usize,
        [batch, tokens, heads]: [usize; 3],
    ) -> Result<Self> {
        placement.check(operator, batch, tokens)?;
        let (split, source) = match angles {
            Angles::Theta(theta) => {
                let split = Split::new(operator, theta, count, placement.axes())?;
                split.check_heads(operator, "theta", heads)?;
                // A call without tokens needs no angles, however many each would have.
                let none = batch == 0 || tokens == 0 || heads == 0;
                let frequencies = if none { Scratch::new(0) } else { split.frequencies(theta) };
                (split, Source::Frequencies(frequencies))
            }
            Angles::Table(table) => {
                check_table(operator, table, R::DTYPE, placement, count, heads, tokens)?;
                let (cos, sin) = table.values.slices();
                (table.split, Source::Table { axes: &table.axes, cos, sin })
            }
        };
        let Placement { positions, extra_tokens, sequences } = placement;
        Ok(Self { split, positions, extra_tokens, sequences, tokens, source })
    }

    /// Whether each batch entry has its own positions.
    pub(crate) fn per_batch(&self) -> bool {
        matches!(self.positions, Positions::PerBatch(_))
    }

    /// The integer coordinate of a token on each axis.
    #[inline(always)]
    fn coordinates(&self, batch: usize, token: usize) -> [i64; MAX_AXES] {
        let mut at = [0i64; MAX_AXES];
        match self.positions {
            Positions::From(offset) => {
                let start = match self.sequences {
                    Some(ends) => ends[ends.partition_point(|&end| end <= token) - 1],
                    None => self.extra_tokens,
                };
                if token >= start {
                    at[0] = (token - start) as i64 + offset;
                }
            }
            Positions::PerToken(given) => at[0] = given[token],
            Positions::PerBatch(given) => at[0] = given[batch * self.tokens + token],
            Positions::Grid(shape) => {
                if let Some(mut cell) = token.checked_sub(self.extra_tokens) {
                    for (axis, &size) in shape.iter().enumerate().rev() {
                        at[axis] = (cell % size) as i64;
                        cell /= size;
                    }
                }
            }
        }
        at
    }

    /// Adds `coordinate * gradient` for the angles of one token and head: `gradients[step * j]`
    /// belongs to angle j.
    #[inline(always)]
    pub(crate) fn add_gradients(
        &self,
        [batch, token]: [usize; 2],
        gradients: &[R],
        step: usize,
        sums: &mut [R],
    ) {
        let at = self.coordinates(batch, token);
        for axis in 0..self.split.axes {
            let coordinate = R::of_integer(at[axis]);
            let range = self.split.range(axis);
            let from = gradients[range.start * step..].iter().step_by(step);
            for (sum, &gradient) in sums[range].iter_mut().zip(from) {
                *sum += coordinate * gradient;
            }
        }
    }
}

fn check_table(
    operator: &'static str,
    table: &AngleTable,
    real: DType,
    placement: Placement<'_>,
    count: usize,
    heads: usize,
    tokens: usize,
) -> Result<()> {
    let fail =
        |got: String, expected: String| Err(Error::new(operator, "angle table", got, expected));
    table.split.check_heads(operator, "angle table", heads)?;
    if table.values.dtype() != real {
        let expected = format!("{real} (arithmetic type of x)");
        return fail(format!("is of {}", table.values.dtype()), expected);
    }
    if table.split.count != count {
        return fail(format!("has {} angles", table.split.count), format!("{count}"));
    }
    if table.axes.len() != placement.axes() {
        let expected = format!("{} (axes of the positions)", placement.axes());
        return fail(format!("has {} axes", table.axes.len()), expected);
    }
    let longest = match placement.sequences {
        Some(ends) => ends.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0),
        None => tokens - placement.extra_tokens,
    };
    let needed: Vec<Option<(i64, i64)>> = match placement.positions {
        Positions::From(offset) => {
            let last = offset + (longest as i64 - 1).max(0);
            // Extra tokens have coordinate 0.
            let extra = placement.extra_tokens > 0;
            let range = if extra { (offset.min(0), last.max(0)) } else { (offset, last) };
            vec![(tokens > 0).then_some(range)]
        }
        Positions::PerToken(given) | Positions::PerBatch(given) => {
            vec![given.iter().copied().min().zip(given.iter().copied().max())]
        }
        Positions::Grid(shape) => {
            shape.iter().map(|&size| (tokens > 0).then(|| (0, size.max(1) as i64 - 1))).collect()
        }
    };
    for (axis, needed) in table.axes.iter().zip(needed) {
        let Some((least, most)) = needed else { continue };
        let end = axis.start + axis.len as i64;
        if least < axis.start || most >= end {
            return fail(
                format!("holds coordinates {}..{end}", axis.start),
                format!("those from {least} to {most}, which the call needs"),
            );
        }
    }
    Ok(())
}

/// The sines and cosines of the token at hand, for a group of heads; what a thread fills and
/// kernels lay out as they need it.
pub(crate) struct TokenAngles<R: Real> {
    /// `heads` rows of `count`, in index order.
    cos: Scratch<R>,
    sin: Scratch<R>,
    /// The coordinates and first head that they were made for.
    made_for: Option<([i64; MAX_AXES], usize)>,
}

impl<R: Real> TokenAngles<R> {
    /// Room for `heads` heads.
    pub(crate) fn new(split: &Split, heads: usize) -> Self {
        let len = heads * split.count;
        Self { cos: Scratch::new(len), sin: Scratch::new(len), made_for: None }
    }

    /// Fills in the angles of a token for rows `heads` of theta. What the token before it
    /// had at the same coordinates is kept.
    #[inline(always)]
    pub(crate) fn fill<L>(
        &mut self,
        plan: &AnglePlan<'_, R>,
        [batch, token]: [usize; 2],
        heads: Range<usize>,
    ) where
        L: Math + Lanes<Real = R> + Memory<R>,
    {
        let split = &plan.split;
        let at = plan.coordinates(batch, token);
        for axis in 0..split.axes {
            let kept = self
                .made_for
                .is_some_and(|(before, head)| before[axis] == at[axis] && head == heads.start);
            if kept {
                continue;
            }
            let range = split.range(axis);
            for head in heads.clone() {
                let from = (head - heads.start) * split.count;
                let place = from + range.start..from + range.end;
                let (cos, sin) = (&mut self.cos[place.clone()], &mut self.sin[place]);
                match &plan.source {
                    Source::Frequencies(theta) => {
                        let theta = &theta[head * split.count..][range.clone()];
                        sin_cos::<L>(R::of_integer(at[axis]), theta, cos, sin);
                    }
                    Source::Table { axes, cos: all_cos, sin: all_sin } => {
                        let entry = &axes[axis];
                        let i = (at[axis] - entry.start) as usize;
                        let first = entry.first + (i * split.theta_heads + head) * entry.width;
                        cos.copy_from_slice(&all_cos[first..first + entry.width]);
                        sin.copy_from_slice(&all_sin[first..first + entry.width]);
                    }
                }
            }
        }
        self.made_for = Some((at, heads.start));
    }

    /// Cosines and sines of one of the heads, in index order.
    #[inline(always)]
    pub(crate) fn head(&self, split: &Split, head: usize) -> (&[R], &[R]) {
        let range = head * split.count..(head + 1) * split.count;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// A length rounded up to whole blocks of lanes.
pub(crate) const fn padded(len: usize) -> usize {
    len.next_multiple_of(MAX_LANES)
}
