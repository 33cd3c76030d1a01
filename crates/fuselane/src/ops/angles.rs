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

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::exec::operands::wrong_shape;
use crate::exec::scratch::Scratch;
use crate::isa;
use crate::kernels::encode::SinCos;
use crate::simd::dispatch;
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
    /// The type of arithmetic. In f64 there is only theta, from which the reference makes sines and
    /// cosines anew, with the same bits.
    real: DType,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// The columns of theta in use.
    theta: Vec<f64>,
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

impl AngleSplit {
    /// Checks theta's shape and spreads `count` angles over it.
    pub(crate) fn new(
        operator: &'static str,
        theta: View<'_>,
        count: usize,
        axes: usize,
    ) -> Result<Self> {
        let &[theta_heads, theta_columns] = theta.shape() else {
            let expected = "(heads, frequencies), (1, frequencies) or (heads, 1)";
            return Err(wrong_shape(operator, "theta", theta, expected));
        };
        let per_axis = if theta_columns == 1 { count.div_ceil(axes.max(1)) } else { theta_columns };
        if per_axis.saturating_mul(axes) < count {
            let got = format!("has {theta_columns} frequencies for each of {axes} axes");
            return Err(Error::new(
                operator,
                "theta",
                got,
                format!("at least {count} angles in all"),
            ));
        }
        Ok(Self { theta_heads, theta_columns, count, per_axis, axes })
    }

    /// Heads have to be the call's, or one for all.
    fn check_heads(&self, operator: &'static str, name: &'static str, heads: usize) -> Result<()> {
        if self.theta_heads != 1 && self.theta_heads != heads {
            let got = format!("has {} heads", self.theta_heads);
            return Err(Error::new(operator, name, got, format!("1 or {heads} (heads of x)")));
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

    /// The columns of theta that angles come from.
    pub(crate) fn used_columns(&self) -> usize {
        self.theta_columns.min(self.count)
    }

    /// Only the columns in use: theta may be a broadcast view, longer than any memory.
    pub(crate) fn used<'t>(&self, theta: View<'t>) -> Result<View<'t>> {
        theta.narrow(1, 0, self.used_columns())
    }

    /// The frequency of each angle: `theta_heads` rows of `count`.
    pub(crate) fn frequencies(&self, theta: View<'_>) -> Scratch<f32> {
        let columns = self.used_columns();
        let theta = self.used(theta).unwrap_or(theta);
        let mut given = Scratch::<f32>::new(theta.len());
        theta.widen(&mut given);
        let mut spread = Scratch::<f32>::zeros(self.theta_heads * self.count);
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
    pub(crate) fn same_rows(&self, frequencies: &[f32]) -> bool {
        let (first, others) = frequencies[..self.theta_heads * self.count].split_at(self.count);
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        others.iter().zip(first.iter().cycle()).all(same)
    }

    /// Gathers the gradients of the angles (`theta_heads` rows of `count`) into theta's shape.
    pub(crate) fn gather(&self, angles: &[f32], dtheta: &mut ViewMut<'_>) {
        let len = self.theta_heads * self.theta_columns;
        let mut sums = Scratch::<f64>::zeros(len);
        for row in 0..self.theta_heads {
            for angle in 0..self.count {
                sums[row * self.theta_columns + self.column(angle)] +=
                    f64::from(angles[row * self.count + angle]);
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
        let mut table = Self {
            split,
            axes: entries,
            real: dtype.real(),
            cos: Vec::new(),
            sin: Vec::new(),
            theta: Vec::new(),
        };
        if dtype == DType::F64 {
            // What is too large for other dtypes is refused here, too. Without the black box the
            // compiler may leave memory out that nobody uses.
            std::hint::black_box(room::<f64>(OPERATOR, total)?);
            table.theta = split.used(theta)?.to_f64_vec();
            return Ok(table);
        }
        let [mut cos, mut sin] = room::<f32>(OPERATOR, total)?;
        cos.resize(total, 0.0);
        sin.resize(total, 0.0);
        let frequencies = split.frequencies(theta);
        for (axis, entry) in table.axes.iter().enumerate() {
            // Without angles there may be any number of coordinates.
            let len = if entry.width == 0 || split.theta_heads == 0 { 0 } else { entry.len };
            for (i, head) in (0..len).flat_map(|i| (0..split.theta_heads).map(move |j| (i, j))) {
                let coordinate = (entry.start + i as i64) as f32;
                let at = entry.first + (i * split.theta_heads + head) * entry.width;
                let theta = &frequencies[head * count..][split.range(axis)];
                let (cos, sin) = (&mut cos[at..][..entry.width], &mut sin[at..][..entry.width]);
                dispatch(isa(), DType::F32, SinCos { coordinate, theta, cos, sin });
            }
        }
        Ok(Self { cos, sin, ..table })
    }

    /// Bytes that the table takes.
    pub fn bytes(&self) -> usize {
        (self.cos.len() + self.theta.len()) * 8
    }

    /// Angles per token and head.
    pub fn count(&self) -> usize {
        self.split.count
    }

    /// The columns of theta in use, of a table for f64.
    pub(crate) fn theta_f64(&self) -> &[f64] {
        &self.theta
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
        (self.real == DType::F32).then_some(&self.cos[..])
    }

    /// All sines, in the order of [`AngleTable::cosines_f32`]; `None` if they are f64.
    pub fn sines_f32(&self) -> Option<&[f32]> {
        (self.real == DType::F32).then_some(&self.sin[..])
    }
}

/// Room for all cosines and sines, if there is memory for them.
fn room<R>(operator: &'static str, total: usize) -> Result<[Vec<R>; 2]> {
    let [mut cos, mut sin] = [const { Vec::new() }; 2];
    if cos.try_reserve_exact(total).is_err() || sin.try_reserve_exact(total).is_err() {
        let got = format!("need a table of {} bytes", 2 * total * size_of::<R>());
        return Err(Error::new(operator, "positions", got, "memory for it"));
    }
    Ok([cos, sin])
}

/// The most axes of a grid.
pub(crate) const MAX_AXES: usize = 16;

/// A token's integer coordinate on each axis.
pub(crate) type Coordinates = [i64; MAX_AXES];

/// Where the tokens of a call stand, before it is known how the angles are made.
#[derive(Clone, Copy)]
pub(crate) struct Placement<'a> {
    pub(crate) positions: Positions<'a>,
    pub(crate) extra_tokens: usize,
    pub(crate) sequences: Option<&'a [usize]>,
}

impl Placement<'_> {
    /// Whether each batch entry has its own positions.
    pub(crate) fn per_batch(&self) -> bool {
        matches!(self.positions, Positions::PerBatch(_))
    }

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

    /// The integer coordinate of a token on each axis, of `tokens` in a checked call.
    #[inline(always)]
    pub(crate) fn coordinates(&self, tokens: usize, batch: usize, token: usize) -> Coordinates {
        let mut at: Coordinates = [0; MAX_AXES];
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
    [batch, tokens, heads, _]: [usize; 4],
) -> Result<AngleSplit> {
    placement.check(operator, batch, tokens)?;
    let table = match angles {
        Angles::Table(table) => table,
        Angles::Theta(theta) => {
            let split = AngleSplit::new(operator, theta, count, placement.axes())?;
            split.check_heads(operator, "theta", heads)?;
            return Ok(split);
        }
    };
    let fail =
        |got: String, expected: String| Err(Error::new(operator, "angle table", got, expected));
    table.split.check_heads(operator, "angle table", heads)?;
    if table.real != real {
        return fail(format!("is of {}", table.real), format!("{real} (arithmetic type of x)"));
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
    Ok(table.split)
}
