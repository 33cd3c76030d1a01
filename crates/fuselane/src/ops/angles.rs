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

use std::marker::PhantomData;
use std::ops::Range;

use crate::dtype::{DType, Element, Real, with_real};
use crate::error::{Error, Result};
use crate::isa;
use crate::pool::{same_reals, same_reals_mut};
use crate::rows::Grid;
use crate::scratch::Scratch;
use crate::simd::{self, Kernel, Lanes, MAX_LANES, Math, Memory, Task};
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
    split: AngleSplit,
    axes: Vec<TableAxis>,
    values: Values,
}

/// How many angles a head has, and how they spread over theta and the axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AngleSplit {
    /// Rows of theta: 1 (shared) or one per head.
    pub theta_heads: usize,
    /// Columns of theta; where there is one, it serves every angle.
    pub theta_columns: usize,
    /// Angles per token and head.
    pub count: usize,
    /// Angles on each axis but the last, which may have fewer.
    pub per_axis: usize,
    /// Axes: 1, or those of a grid.
    pub axes: usize,
}

/// The entries of one axis of an [`AngleTable`]: coordinates `start..start + len`, each with
/// `width` cosines and sines for each row of theta.
///
/// Those of coordinate c and row r of theta begin at
/// `first + ((c - start) * theta_heads + r) * width`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableAxis {
    /// The least coordinate.
    pub start: i64,
    /// How many coordinates there are.
    pub len: usize,
    /// Where the entries begin, among the cosines and among the sines.
    pub first: usize,
    /// Angles on this axis.
    pub width: usize,
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

impl AngleSplit {
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
    pub fn range(&self, axis: usize) -> Range<usize> {
        let from = axis.saturating_mul(self.per_axis).min(self.count);
        from..(from + self.per_axis.min(self.count)).min(self.count)
    }

    /// The column of theta that an angle comes from.
    #[inline(always)]
    pub fn column(&self, angle: usize) -> usize {
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
            let given = &given[row * columns..(row + 1) * columns];
            if self.theta_columns == 1 {
                spread.fill(given[0]);
                continue;
            }
            for spread in spread.chunks_mut(self.per_axis.max(1)) {
                spread.copy_from_slice(&given[..spread.len()]);
            }
        }
        spread
    }

    /// Whether all of the `theta_heads` rows of [`AngleSplit::frequencies`] are the same, bit by bit.
    fn same_rows<R: Real>(&self, frequencies: &[R]) -> bool {
        let (first, others) = frequencies[..self.theta_heads * self.count].split_at(self.count);
        let same = |(a, b): (&R, &R)| a.to_f64().to_bits() == b.to_f64().to_bits();
        others.iter().zip(first.iter().cycle()).all(same)
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
        let split = AngleSplit::new(OPERATOR, theta, count, axes.len())?;
        let mut total = 0usize;
        let mut entries = Vec::with_capacity(axes.len());
        for (axis, &(start, len)) in axes.iter().enumerate() {
            let width = split.range(axis).len();
            entries.push(TableAxis { start, len, first: total, width });
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

    /// How the angles spread over theta and the axes.
    pub fn split(&self) -> AngleSplit {
        self.split
    }

    /// Where the entries of each axis lie in the cosines and the sines.
    pub fn axes(&self) -> &[TableAxis] {
        &self.axes
    }

    /// All cosines, for backends that copy the table; `None` if they are f64.
    ///
    /// ```
    /// use fuselane::{AngleTable, DType, View};
    /// let theta = [1.0f32, 0.5];
    /// let table = AngleTable::for_sequence(View::new(&theta, &[1, 2])?, 2, 3..9, DType::BF16)?;
    /// let axis = table.axes()[0];
    /// assert_eq!((axis.start, axis.len, axis.first, axis.width), (3, 6, 0, 2));
    /// let cosines = table.cosines_f32().unwrap_or_default();
    /// assert_eq!(cosines.len(), 12);
    /// // The second angle of position 4, which is 4 * 0.5.
    /// assert!((cosines[axis.width + 1] - 2f32.cos()).abs() < 1e-6);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn cosines_f32(&self) -> Option<&[f32]> {
        match &self.values {
            Values::F32 { cos, .. } => Some(cos),
            Values::F64 { .. } => None,
        }
    }

    /// All sines, in the order of [`AngleTable::cosines_f32`]; `None` if they are f64.
    pub fn sines_f32(&self) -> Option<&[f32]> {
        match &self.values {
            Values::F32 { sin, .. } => Some(sin),
            Values::F64 { .. } => None,
        }
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
    pub(crate) split: AngleSplit,
    /// Whether all heads have the same angles, so that they are made once: theta has one row, or its
    /// rows are the same, as those of the usual schedules are.
    pub(crate) shared: bool,
    placement: Placement<'a>,
    tokens: usize,
    source: Source<'a, R>,
}

enum Source<'a, R: Real> {
    Frequencies(Scratch<R>),
    Table { axes: &'a [TableAxis], cos: &'a [R], sin: &'a [R] },
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

/// Checks the angles of a call with `count` angles for each token and head, and arithmetic in
/// `real`; theta itself is not read.
pub(crate) fn check(
    operator: &'static str,
    angles: Angles<'_>,
    placement: Placement<'_>,
    count: usize,
    real: DType,
    [batch, tokens, heads]: [usize; 3],
) -> Result<AngleSplit> {
    placement.check(operator, batch, tokens)?;
    match angles {
        Angles::Theta(theta) => {
            let split = AngleSplit::new(operator, theta, count, placement.axes())?;
            split.check_heads(operator, "theta", heads)?;
            Ok(split)
        }
        Angles::Table(table) => {
            check_table(operator, table, real, placement, count, heads, tokens)?;
            Ok(table.split)
        }
    }
}

impl Placement<'_> {
    /// The integer coordinate of a token on each axis, of `tokens` in a checked call.
    #[inline(always)]
    pub(crate) fn coordinates(&self, tokens: usize, batch: usize, token: usize) -> [i64; MAX_AXES] {
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
            Positions::PerBatch(given) => at[0] = given[batch * tokens + token],
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
}

impl<'a, R: Real> AnglePlan<'a, R> {
    /// The angles of a call that was checked, with tokens. Reads theta.
    pub(crate) fn new(
        angles: Angles<'a>,
        placement: Placement<'a>,
        split: AngleSplit,
        tokens: usize,
    ) -> Self {
        let source = match angles {
            Angles::Theta(theta) => Source::Frequencies(split.frequencies(theta)),
            Angles::Table(table) => {
                let (cos, sin) = table.values.slices();
                Source::Table { axes: &table.axes, cos, sin }
            }
        };
        let shared = split.theta_heads == 1
            || matches!(&source, Source::Frequencies(all) if split.same_rows(all));
        Self { split, shared, placement, tokens, source }
    }

    /// Whether each batch entry has its own positions.
    pub(crate) fn per_batch(&self) -> bool {
        matches!(self.placement.positions, Positions::PerBatch(_))
    }

    /// The integer coordinate of a token on each axis.
    #[inline(always)]
    fn coordinates(&self, batch: usize, token: usize) -> [i64; MAX_AXES] {
        self.placement.coordinates(self.tokens, batch, token)
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

/// The cosines and sines of a tile of tokens and heads, in register order.
///
/// Each angle has one entry, or two for operators that pair neighbours: then the sine of the
/// first is negated.
pub(crate) struct Tables<R: Real> {
    /// Entries for each angle.
    step: usize,
    /// Entries of one head, in whole blocks.
    width: usize,
    /// Heads with angles of their own in a tile.
    heads: usize,
    cos: Scratch<R>,
    sin: Scratch<R>,
    /// Where the entries begin in the two.
    starts: [usize; 2],
    /// The frequencies as the sines have them, for all rows of theta.
    frequencies: Scratch<R>,
    /// Cosines and sines of one head, in index order, on their way from an [`AngleTable`].
    gathered: Scratch<R>,
    /// What was filled in last: slot, coordinates, first head.
    last: Option<(usize, [i64; MAX_AXES], usize)>,
}

impl<R: Real> Tables<R> {
    /// Room for a tile of `tokens` and `heads`, with `step` entries for each angle.
    pub(crate) fn new<L>(plan: &AnglePlan<'_, R>, step: usize, [tokens, heads]: [usize; 2]) -> Self
    where
        L: Math + Lanes<Real = R> + Memory<R>,
    {
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
                    let to = &mut frequencies[to..to + width];
                    L::enter(LayOut { from, to, step, negated: true, lanes: PhantomData::<L> });
                }
            }
            Source::Table { .. } => gathered = Scratch::new(2 * padded(count)),
        }
        let room = tokens * heads * width + PAGE / size_of::<R>();
        let [cos, sin] = [(); 2].map(|()| Scratch::new(room));
        let starts = [0; 2];
        Self { step, width, heads, cos, sin, starts, frequencies, gathered, last: None }
    }

    /// Moves the tables to where their rows are not taken for those of an output at `address`: a
    /// load waits for stores before it whose addresses have the same last 12 bits, and stores past
    /// the caches take long. Rows of tables and outputs mostly are equally long, so that they keep
    /// their distance. Results do not depend on it.
    #[inline(always)]
    pub(crate) fn keep_off(&mut self, plan: &AnglePlan<'_, R>, address: usize) {
        // Entries of several axes are taken over from token to token, and stay where they are.
        if self.last.is_some() && plan.split.axes > 1 {
            return;
        }
        let starts =
            [start(&self.cos, address + COS_DISTANCE), start(&self.sin, address + SIN_DISTANCE)];
        if starts != self.starts {
            (self.starts, self.last) = (starts, None);
        }
    }

    /// Fills in the angles of neighbouring tokens from slot 0 on.
    #[inline(always)]
    pub(crate) fn fill<L>(
        &mut self,
        plan: &AnglePlan<'_, R>,
        batch: usize,
        tokens: Range<usize>,
        heads: Range<usize>,
    ) where
        L: Math + Lanes<Real = R> + Memory<R>,
    {
        let heads = if plan.shared { 0..1 } else { heads };
        let tables = self;
        L::enter(Fill { tables, plan, batch, tokens, heads, lanes: PhantomData::<L> });
    }

    /// Cosines and sines of a patch: `rows` tokens, from a slot on, and heads.
    #[inline(always)]
    pub(crate) fn rows(
        &self,
        plan: &AnglePlan<'_, R>,
        slot: usize,
        rows: [usize; 2],
    ) -> [Grid<'_, R>; 2] {
        let head = if plan.shared { 0 } else { self.width };
        let steps = [self.heads * self.width, head];
        let first = slot * steps[0];
        let [cos, sin] = self.starts;
        let len = plan.split.count * self.step;
        // One by one: a closure for both would not be inlined.
        let cos = Grid::strided(&self.cos[cos + first..], rows, steps, padded(len));
        let sin = Grid::strided(&self.sin[sin + first..], rows, steps, padded(len));
        [cos, sin]
    }

    /// Where the cosines and sines of a head begin.
    #[inline(always)]
    fn at(&self, slot: usize, head: usize) -> [usize; 2] {
        let at = (slot * self.heads + head) * self.width;
        [self.starts[0] + at, self.starts[1] + at]
    }
}

/// Addresses that differ by a multiple of this are alike to loads that follow stores.
const PAGE: usize = 4096;
/// Where cosines and sines begin, from where outputs do, in bytes: behind the rows that are written,
/// by more than a row, and before those that are still on their way when they come round again.
const COS_DISTANCE: usize = 768;
const SIN_DISTANCE: usize = 1024;

/// The first whole block of scratch whose address is like a given one.
#[inline(always)]
fn start<R: Real>(scratch: &Scratch<R>, like: usize) -> usize {
    let bytes = like.wrapping_sub(scratch.as_ptr() as usize) % PAGE;
    bytes / size_of::<R>() / MAX_LANES * MAX_LANES
}

/// Brings one number for each angle, in index order, into the order of the tables.
struct LayOut<'a, R, L> {
    from: &'a [R],
    to: &'a mut [R],
    step: usize,
    /// Whether the first of two entries is negated.
    negated: bool,
    lanes: PhantomData<L>,
}

impl<R, L> Task for LayOut<'_, R, L>
where
    R: Real,
    L: Lanes<Real = R> + Memory<R>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { from, to, step, negated, .. } = self;
        let zero = R::of(0.0);
        let len = from.len() * step;
        for i in (0..len).step_by(L::N) {
            if step == 1 {
                L::read(from, i, zero).set(to, i);
                continue;
            }
            let mut pairs = [zero; MAX_LANES];
            for (j, entry) in pairs.iter_mut().enumerate().take(L::N.min(len - i)) {
                let value = from[(i + j) / 2];
                *entry = if negated && j % 2 == 0 { -value } else { value };
            }
            L::read(&pairs, 0, zero).set(to, i);
        }
    }
}

/// [`Tables::fill`].
struct Fill<'t, 'p, 'a, R: Real, L> {
    tables: &'t mut Tables<R>,
    plan: &'p AnglePlan<'a, R>,
    batch: usize,
    tokens: Range<usize>,
    heads: Range<usize>,
    lanes: PhantomData<L>,
}

impl<R, L> Task for Fill<'_, '_, '_, R, L>
where
    R: Real,
    L: Math + Lanes<Real = R> + Memory<R>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        for (slot, token) in self.tokens.clone().enumerate() {
            let at = self.plan.coordinates(self.batch, token);
            match self.plan.source {
                Source::Frequencies(_) => self.compute(slot, &at),
                Source::Table { axes, cos, sin } => self.look_up(slot, &at, axes, cos, sin),
            }
            self.tables.last = Some((slot, at, self.heads.start));
        }
    }
}

impl<R, L> Fill<'_, '_, '_, R, L>
where
    R: Real,
    L: Math + Lanes<Real = R> + Memory<R>,
{
    /// TableAxis by axis; blocks with angles of several axes one by one.
    #[inline(always)]
    fn compute(&mut self, slot: usize, at: &[i64; MAX_AXES]) {
        let (split, step) = (self.plan.split, self.tables.step);
        let len = split.count * step;
        let (mut i, mut axis) = (0, 0);
        while i < len {
            while split.range(axis).end * step <= i {
                axis += 1;
            }
            let end = split.range(axis).end * step;
            let whole =
                if end == len { len.next_multiple_of(L::N) } else { i + (end - i) / L::N * L::N };
            let (blocks, coordinates) = if whole == i {
                (i..i + L::N, mixed::<L>(split, i, step, at))
            } else {
                (i..whole, L::splat(R::of_integer(at[axis])))
            };
            i = blocks.end;
            if whole != blocks.end || !self.keep(slot, blocks.clone(), axis, at) {
                self.sin_cos(slot, blocks, coordinates);
            }
        }
    }

    /// Takes over the entries `range`, all of one axis, of the token before, if it stands at
    /// the same coordinate.
    #[inline(always)]
    fn keep(
        &mut self,
        slot: usize,
        range: Range<usize>,
        axis: usize,
        at: &[i64; MAX_AXES],
    ) -> bool {
        let Some((last, before, head)) = self.tables.last else { return false };
        if before[axis] != at[axis] || head != self.heads.start {
            return false;
        }
        if last != slot {
            for head in 0..self.heads.len() {
                let (from, to) = (self.tables.at(last, head), self.tables.at(slot, head));
                let ([cos, sin], [to_cos, to_sin]) = (from, to);
                let (a, b) = (range.start, range.end);
                self.tables.cos.copy_within(cos + a..cos + b, to_cos + a);
                self.tables.sin.copy_within(sin + a..sin + b, to_sin + a);
            }
        }
        true
    }

    /// Cosines and sines of the whole blocks `range` of all heads.
    #[inline(always)]
    fn sin_cos(&mut self, slot: usize, range: Range<usize>, coordinate: L) {
        for head in 0..self.heads.len() {
            let [cos, sin] = self.tables.at(slot, head);
            let from = (self.heads.start + head) * self.tables.width;
            let theta = &self.tables.frequencies[from + range.start..from + range.end];
            let cos = &mut self.tables.cos[cos + range.start..cos + range.end];
            let sin = &mut self.tables.sin[sin + range.start..sin + range.end];
            let (cos, sin) = (cos.chunks_exact_mut(L::N), sin.chunks_exact_mut(L::N));
            for ((theta, cos), sin) in theta.chunks_exact(L::N).zip(cos).zip(sin) {
                let (s, c) = coordinate.mul(L::get(theta, 0)).sin_cos();
                s.set(sin, 0);
                c.set(cos, 0);
            }
        }
    }

    /// From an [`AngleTable`].
    #[inline(always)]
    fn look_up(
        &mut self,
        slot: usize,
        at: &[i64; MAX_AXES],
        axes: &[TableAxis],
        all_cos: &[R],
        all_sin: &[R],
    ) {
        let (split, step, width) = (self.plan.split, self.tables.step, self.tables.width);
        for head in 0..self.heads.len() {
            let [cos_at, sin_at] = self.tables.at(slot, head);
            let (cos, sin) = self.tables.gathered.split_at_mut(padded(split.count));
            let (cos, sin) = (&mut cos[..split.count], &mut sin[..split.count]);
            for (axis, entry) in axes.iter().enumerate() {
                let i = (at[axis] - entry.start) as usize;
                let row = i * split.theta_heads + self.heads.start + head;
                let first = entry.first + row * entry.width;
                let range = split.range(axis);
                cos[range.clone()].copy_from_slice(&all_cos[first..first + entry.width]);
                sin[range].copy_from_slice(&all_sin[first..first + entry.width]);
            }
            let lanes = PhantomData::<L>;
            let to_cos = &mut self.tables.cos[cos_at..cos_at + width];
            L::enter(LayOut { from: cos, to: to_cos, step, negated: false, lanes });
            let to_sin = &mut self.tables.sin[sin_at..sin_at + width];
            L::enter(LayOut { from: sin, to: to_sin, step, negated: true, lanes });
        }
    }
}

/// The coordinates that belong to the entries of the block at `i`.
#[inline(always)]
fn mixed<L>(split: AngleSplit, i: usize, step: usize, at: &[i64; MAX_AXES]) -> L
where
    L: Lanes + Memory<<L as Lanes>::Real>,
{
    let mut coordinates = [Real::of(0.0); MAX_LANES];
    for (j, coordinate) in coordinates.iter_mut().enumerate().take(L::N) {
        let axis = (i + j) / step / split.per_axis;
        *coordinate = Real::of_integer(at[axis.min(MAX_AXES - 1)]);
    }
    L::read(&coordinates, 0, Real::of(0.0))
}

/// A length rounded up to whole blocks of lanes.
pub(crate) const fn padded(len: usize) -> usize {
    len.next_multiple_of(MAX_LANES)
}
