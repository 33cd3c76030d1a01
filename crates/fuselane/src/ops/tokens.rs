//! What `rotate` and `cosine` share: an activation, then an encoding by the token's angles.
//!
//! Tensors are walked token by token with the batch inside, so that the sines and cosines of a
//! token, a few kilobytes, are made once and stay in the first-level cache for the whole batch.
//! Where tokens and not heads are neighbours in memory (b h n d), a tile of tokens of one head
//! takes the place of all heads of one token.
//!
//! ```text
//! x' = act(x)                    elementwise, or softmax over features, or over the sequence
//! o  = encode(x', A)             the operator's own formula, row by row
//! dx' = encode^T(do, A),  dx = act backward,  dtheta = sum of coordinate * dA
//! ```

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::str::FromStr;

use crate::dtype::{Element, Real, with_real};
use crate::error::{Error, Result};
use crate::ops::act::{self, Act};
use crate::ops::angles::{AnglePlan, Angles, Placement, TokenAngles, padded};
use crate::ops::softmax;
use crate::rows::{Named, Operands, Part, Row, Rows, contiguous_rows, disjoint};
use crate::scratch::Scratch;
use crate::simd::{Arithmetic, KernelIn, Lanes, Math, Memory, Task};
use crate::view::{View, ViewMut};
use crate::{Isa, isa};

/// The activation that `rotate` and `cosine` apply to their input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FusedAct {
    /// An elementwise one.
    Elementwise(Act),
    /// Softmax over the features of each token and head.
    SoftmaxFeatures,
    /// Softmax over the tokens of each sequence, for each head and feature.
    SoftmaxSequence,
}

impl Default for FusedAct {
    fn default() -> Self {
        Self::Elementwise(Act::None)
    }
}

impl From<Act> for FusedAct {
    fn from(act: Act) -> Self {
        Self::Elementwise(act)
    }
}

impl fmt::Display for FusedAct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elementwise(act) => act.fmt(f),
            Self::SoftmaxFeatures => f.pad("softmax_features"),
            Self::SoftmaxSequence => f.pad("softmax_sequence"),
        }
    }
}

impl FromStr for FusedAct {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        match name {
            "softmax_features" => Ok(Self::SoftmaxFeatures),
            "softmax_sequence" => Ok(Self::SoftmaxSequence),
            _ => name.parse().map(Self::Elementwise),
        }
    }
}

/// The order of a tensor's dimensions. Any strides go with either.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TokenLayout {
    /// (batch, tokens, heads, features)
    #[default]
    TokensHeads,
    /// (batch, heads, tokens, features)
    HeadsTokens,
}

/// How a row is encoded by its angles. All functions are for one token and head; `cos` and `sin`
/// are what [`Encoding::lay_out`] made of them, in register order.
pub(crate) trait Encoding: Copy + Sync {
    /// The name of the operator, for errors.
    const OPERATOR: &'static str;

    /// Output features of `features` input features.
    fn output_len(&self, features: usize) -> usize;

    /// How many numbers `lay_out` makes of a head's cosines.
    fn table_len(&self) -> usize;

    /// Brings the cosines and sines of a head's angles, given in index order, into the order that
    /// the other functions use them in.
    fn lay_out<L>(&self, angles: (&[L::Real], &[L::Real]), table: (&mut [L::Real], &mut [L::Real]))
    where
        L: Lanes + Memory<<L as Lanes>::Real>;

    /// `o = encode(x)`.
    fn forward<L, S, T>(&self, x: &[S], table: (&[L::Real], &[L::Real]), o: &mut [T], stream: bool)
    where
        S: Element<Real = L::Real>,
        T: Element<Real = L::Real>,
        L: Math + Memory<S> + Memory<T>;

    /// `dx' = encode^T(grad)`.
    fn backward<L, T, D>(
        &self,
        grad: &[T],
        table: (&[L::Real], &[L::Real]),
        dx: &mut [D],
        stream: bool,
    ) where
        T: Element<Real = L::Real>,
        D: Element<Real = L::Real>,
        L: Math + Memory<T> + Memory<D>;

    /// Adds the gradients of the angles to `sums`, where angle j has index `j * angle_step()`:
    /// `y` is x', `g` is dx'.
    fn angle_gradients<L, T>(
        &self,
        y: &[L::Real],
        g: &[L::Real],
        grad: &[T],
        table: (&[L::Real], &[L::Real]),
        sums: &mut [L::Real],
    ) where
        T: Element<Real = L::Real>,
        L: Math + Memory<T> + Memory<<L as Lanes>::Real>;

    /// The step from angle to angle in the sums of `angle_gradients`.
    fn angle_step(&self) -> usize;
}

/// The arguments that the two operators have in common.
pub(crate) struct Call<'a> {
    pub(crate) act: FusedAct,
    pub(crate) layout: TokenLayout,
    pub(crate) placement: Placement<'a>,
    pub(crate) angles: Angles<'a>,
    /// Angles per token and head.
    pub(crate) count: usize,
}

impl<'a> Call<'a> {
    /// Theta, as an input that no output may overlap.
    fn theta(&self) -> Named<Option<View<'a>>> {
        match self.angles {
            Angles::Theta(theta) => ("theta", Some(theta)),
            Angles::Table(_) => ("theta", None),
        }
    }
}

/// Tensors of a backward call.
pub(crate) struct Gradients<'a> {
    pub(crate) x: Option<View<'a>>,
    pub(crate) grad: View<'a>,
    pub(crate) dx: Option<ViewMut<'a>>,
    pub(crate) dtheta: Option<ViewMut<'a>>,
}

/// Batch, tokens, heads and features of a tensor.
pub(crate) fn dimensions(
    operator: &'static str,
    name: &'static str,
    view: &View<'_>,
    layout: TokenLayout,
) -> Result<[usize; 4]> {
    match (view.shape(), layout) {
        (&[b, n, h, d], TokenLayout::TokensHeads) => Ok([b, n, h, d]),
        (&[b, h, n, d], TokenLayout::HeadsTokens) => Ok([b, n, h, d]),
        (shape, _) => Err(Error::new(
            operator,
            name,
            format!("has shape {shape:?}"),
            match layout {
                TokenLayout::TokensHeads => "(batch, tokens, heads, features)",
                TokenLayout::HeadsTokens => "(batch, heads, tokens, features)",
            },
        )),
    }
}

/// The order of dimensions that makes (tokens, batch, heads, features) of a layout.
fn tokens_first(layout: TokenLayout) -> [usize; 4] {
    match layout {
        TokenLayout::TokensHeads => [1, 0, 2, 3],
        TokenLayout::HeadsTokens => [2, 0, 1, 3],
    }
}

fn check_shape(
    operator: &'static str,
    name: &'static str,
    view: &View<'_>,
    like: (&'static str, &View<'_>),
    features: usize,
) -> Result<()> {
    let expected = [&like.1.shape()[..3], &[features]].concat();
    if view.shape() != expected {
        return Err(Error::new(
            operator,
            name,
            format!("has shape {:?}", view.shape()),
            format!("{expected:?} (from {} {:?})", like.0, like.1.shape()),
        ));
    }
    contiguous_rows(operator, name, *view)
}

/// Encodes `x` into `o`.
pub(crate) fn forward<E: Encoding>(
    encoding: E,
    call: &Call<'_>,
    x: View<'_>,
    mut o: ViewMut<'_>,
) -> Result<()> {
    let [b, n, h, d] = dimensions(E::OPERATOR, "x", &x, call.layout)?;
    let width = encoding.output_len(d);
    check_shape(E::OPERATOR, "o", &o.as_view(), ("x", &x), width)?;
    contiguous_rows(E::OPERATOR, "x", x)?;
    let order = tokens_first(call.layout);
    let isa = isa();
    with_real!(x.dtype(), R => {
        let plan = Plan::<R>::new(E::OPERATOR, call, &x, [b, n, h, d], encoding.table_len())?;
        // All of it at once: packed sequences are worked on one after the other.
        disjoint(E::OPERATOR, &[("x", Some(x)), call.theta()], &[("o", o.as_view())])?;
        if x.is_empty() {
            return Ok(());
        }
        let x = x.permute(&order)?;
        for tokens in plan.sequences() {
            let x = x.narrow(0, tokens.start, tokens.len())?;
            let o = o.reborrow().permute(&order)?.narrow(0, tokens.start, tokens.len())?;
            let rows = Rows::new(E::OPERATOR, Operands {
                output_len: [Some(width)],
                ..Operands::plain(("x", x), [("x", Some(x))], [("o", Some(o))])
            })?;
            let columns = plan.column_statistics(E::OPERATOR, isa, &x)?;
            let stream = rows.stream();
            rows.for_each_part(plan.group(), |part| {
                let walk = Walk { plan: &plan, encoding, first: tokens.start };
                R::run(isa, rows.dtype(), Forward { walk, part, columns: &columns, stream });
            });
        }
        Ok(())
    })
}

/// Pulls `grad` back through the encoding and the activation.
pub(crate) fn backward<E: Encoding>(
    encoding: E,
    call: &Call<'_>,
    mut gradients: Gradients<'_>,
) -> Result<()> {
    let operator = E::OPERATOR;
    let grad = gradients.grad;
    let needs_x = call.act != FusedAct::default() || gradients.dtheta.is_some();
    if needs_x && gradients.x.is_none() {
        let expected = "it (the backward of an activation and dtheta need it)";
        return Err(Error::new(operator, "x", "is missing", expected));
    }
    // The dimensions come from x where there is one, else from dx, whose shape is the same.
    let like = match (&gradients.x, &gradients.dx) {
        (Some(x), _) => ("x", *x),
        (None, Some(dx)) => ("dx", View::dense_shape(dx.dtype(), dx.shape())?),
        (None, None) => return Ok(()),
    };
    let [b, n, h, d] = dimensions(operator, like.0, &like.1, call.layout)?;
    let width = encoding.output_len(d);
    check_shape(operator, "grad", &grad, (like.0, &like.1), width)?;
    if let Some(dx) = &gradients.dx {
        check_shape(operator, "dx", &dx.as_view(), (like.0, &like.1), d)?;
    }
    if let Some(x) = &gradients.x {
        contiguous_rows(operator, "x", *x)?;
    }
    let x = gradients.x.filter(|_| needs_x);
    let order = tokens_first(call.layout);
    let isa = isa();
    with_real!(like.1.dtype(), R => {
        let mut plan = Plan::<R>::new(operator, call, &like.1, [b, n, h, d], encoding.table_len())?;
        let split = plan.angles.split;
        if gradients.dtheta.is_some() {
            // The order of tokens and heads is that of the sums in dtheta.
            plan.tile = all_heads(&like.1, h, d);
        }
        if let Some(dtheta) = &gradients.dtheta {
            let expected = [split.theta_heads, split.theta_columns];
            if dtheta.shape() != expected {
                let got = format!("has shape {:?}", dtheta.shape());
                return Err(Error::new(
                    operator, "dtheta", got, format!("{expected:?} (shape of theta)"),
                ));
            }
        }
        let inputs = [("x", gradients.x), ("grad", Some(grad)), call.theta()];
        let mut written = Vec::with_capacity(2);
        written.extend(gradients.dx.iter().map(|dx| ("dx", dx.as_view())));
        written.extend(gradients.dtheta.iter().map(|dtheta| ("dtheta", dtheta.as_view())));
        disjoint(operator, &inputs, &written)?;
        if like.1.is_empty() {
            if let Some(dtheta) = &mut gradients.dtheta {
                dtheta.fill_zero();
            }
            return Ok(());
        }
        let mut angle_sums = Scratch::<R>::zeros(split.theta_heads * split.count);
        for tokens in plan.sequences() {
            let cut = tokens.start;
            let len = tokens.len();
            let grad = grad.permute(&order)?.narrow(0, cut, len)?;
            let x = match x {
                Some(x) => Some(x.permute(&order)?.narrow(0, cut, len)?),
                None => None,
            };
            let dx = match &mut gradients.dx {
                Some(dx) => Some(dx.reborrow().permute(&order)?.narrow(0, cut, len)?),
                None => None,
            };
            let like_part = View::dense_shape(like.1.dtype(), &[len, b, h, d])?;
            let walk = Walk { plan: &plan, encoding, first: cut };
            let columns = match &x {
                Some(x) => plan.column_statistics(operator, isa, x)?,
                None => Scratch::new(0),
            };
            let mut dots = Scratch::<R>::zeros(0);
            if call.act == FusedAct::SoftmaxSequence {
                dots = Scratch::zeros(b * h * d);
                let rows = Rows::new(operator, Operands {
                    input_len: [None, Some(width)],
                    ..Operands::plain((like.0, like_part), [("x", x), ("grad", Some(grad))], [])
                })?;
                rows.sum_over_parts(b * h, &mut dots[..b * h * d], |part, sums| {
                    let columns = &columns;
                    R::run(isa, rows.dtype(), Dots { walk, part, columns, sums });
                });
            }
            let rows = Rows::new(operator, Operands {
                input_len: [None, Some(width)],
                ..Operands::plain(
                    (like.0, like_part),
                    [("x", x), ("grad", Some(grad))],
                    [("dx", dx)],
                )
            })?;
            let stream = rows.stream();
            let (columns, dots) = (&columns, &dots);
            if gradients.dtheta.is_some() {
                let total = &mut angle_sums[..split.theta_heads * split.count];
                rows.sum_over_parts(b * h, total, |part, sums| {
                    let sums = Some(sums);
                    let kernel = Backward { walk, part, columns, dots, sums, stream };
                    R::run(isa, rows.dtype(), kernel);
                });
            } else {
                rows.for_each_part(plan.group(), |part| {
                    let kernel = Backward { walk, part, columns, dots, sums: None, stream };
                    R::run(isa, rows.dtype(), kernel);
                });
            }
        }
        if let Some(dtheta) = &mut gradients.dtheta {
            split.gather(&angle_sums, dtheta);
        }
        Ok(())
    })
}

/// A checked call.
struct Plan<'a, R: Real> {
    act: FusedAct,
    angles: AnglePlan<'a, R>,
    sequences: Option<&'a [usize]>,
    batch: usize,
    tokens: usize,
    heads: usize,
    features: usize,
    /// Numbers in the laid-out table of one head, in whole blocks.
    table: usize,
    /// Tokens and heads whose angles are held at once.
    tile: [usize; 2],
}

/// Bytes of one batch entry that are worked on with one set of angles: enough for the hardware to
/// stream, little enough that the angles stay in the first-level cache.
const TILE_BYTES: usize = 4096;

/// A tile of tokens with all their heads.
fn all_heads(x: &View<'_>, heads: usize, features: usize) -> [usize; 2] {
    let token = heads.max(1) * (features * x.dtype().size()).max(1);
    [(TILE_BYTES / token).max(1), heads]
}

impl<'a, R: Arithmetic> Plan<'a, R> {
    fn new(
        operator: &'static str,
        call: &Call<'a>,
        x: &View<'_>,
        [b, n, h, d]: [usize; 4],
        table: usize,
    ) -> Result<Self> {
        let angles = AnglePlan::new(operator, call.angles, call.placement, call.count, [b, n, h])?;
        let order = tokens_first(call.layout);
        let [token_stride, head_stride] = [0, 2].map(|i| x.strides()[order[i]].unsigned_abs());
        let tile = if head_stride <= token_stride || h == 1 {
            all_heads(x, h, d)
        } else {
            [(TILE_BYTES / (d * x.dtype().size()).max(1)).max(1), 1]
        };
        Ok(Self {
            act: call.act,
            angles,
            sequences: call.placement.sequences,
            batch: b,
            tokens: n,
            heads: h,
            features: d,
            table: padded(table),
            tile,
        })
    }

    /// The token ranges that are worked on one after the other: packed sequences where the
    /// activation runs over them, else all tokens at once.
    fn sequences(&self) -> Vec<Range<usize>> {
        match (self.act, self.sequences) {
            (FusedAct::SoftmaxSequence, Some(ends)) => {
                ends.windows(2).map(|pair| pair[0]..pair[1]).collect()
            }
            _ => std::iter::once(0..self.tokens).collect(),
        }
    }

    /// Rows that stay on one thread: all of a token, so that its angles are made once, unless there
    /// are too few tokens to share out.
    fn group(&self) -> usize {
        let few = self.tokens < 4 * rayon::current_num_threads();
        (if few { 1 } else { self.batch } * self.heads).max(1)
    }

    /// For a softmax over the sequence: the maximum of each column of x (tokens, batch, heads,
    /// features) and the reciprocal of its sum of exponentials.
    fn column_statistics(
        &self,
        operator: &'static str,
        isa: Isa,
        x: &View<'_>,
    ) -> Result<Scratch<R>> {
        if self.act != FusedAct::SoftmaxSequence {
            return Ok(Scratch::new(0));
        }
        let (n, columns) = (x.shape()[0], 2 * self.features);
        let mut statistics = Scratch::<R>::zeros(self.batch * self.heads * columns);
        let x = x.permute(&[1, 2, 0, 3])?;
        let rows = Rows::new(operator, Operands::plain(("x", x), [("x", Some(x))], []))?;
        rows.for_each_group(n, &mut statistics, columns, |part, statistics| {
            R::run(isa, rows.dtype(), ColumnStatistics { part, statistics });
        });
        Ok(statistics)
    }
}

/// A walk over the rows of a call, by tiles of tokens and heads.
struct Walk<'k, 'a, E, R: Real> {
    plan: &'k Plan<'a, R>,
    encoding: E,
    /// The token that row 0 of the operands stands for.
    first: usize,
}

impl<E: Copy, R: Real> Clone for Walk<'_, '_, E, R> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E: Copy, R: Real> Copy for Walk<'_, '_, E, R> {}

/// The laid-out sines and cosines of a tile, and the way through it.
struct Tables<R: Real> {
    angles: TokenAngles<R>,
    cos: Scratch<R>,
    sin: Scratch<R>,
}

impl<E: Encoding, R: Real> Walk<'_, '_, E, R> {
    fn tables(&self) -> Tables<R> {
        let [tokens, heads] = self.plan.tile;
        let heads = if self.plan.angles.split.theta_heads == 1 { 1 } else { heads };
        let len = tokens * heads * self.plan.table;
        Tables {
            angles: TokenAngles::new(&self.plan.angles.split, heads),
            cos: Scratch::zeros(len),
            sin: Scratch::zeros(len),
        }
    }

    /// Makes the angles of a token for the heads of a tile, at place `slot` of the tables.
    #[inline(always)]
    fn fill<L>(&self, tables: &mut Tables<R>, slot: usize, at: [usize; 2], heads: Range<usize>)
    where
        L: Math + Lanes<Real = R> + Memory<R>,
    {
        L::enter(Fill { walk: *self, tables, slot, at, heads, lanes: PhantomData::<L> });
    }

    /// The laid-out cosines and sines of a head (by its place in the tile) of a slot.
    #[inline(always)]
    fn table<'t>(
        &self,
        tables: &'t Tables<R>,
        slot: usize,
        head: usize,
        heads: usize,
    ) -> (&'t [R], &'t [R]) {
        let shared = self.plan.angles.split.theta_heads == 1;
        let place = if shared { slot } else { slot * heads + head };
        let len = self.plan.table;
        let at = place * len..(place + 1) * len;
        (&tables.cos[at.clone()], &tables.sin[at])
    }
}

struct Fill<'k, 'a, 't, E, R: Real, L> {
    walk: Walk<'k, 'a, E, R>,
    tables: &'t mut Tables<R>,
    slot: usize,
    at: [usize; 2],
    heads: Range<usize>,
    lanes: PhantomData<L>,
}

impl<E, R, L> Task for Fill<'_, '_, '_, E, R, L>
where
    E: Encoding,
    R: Real,
    L: Math + Lanes<Real = R> + Memory<R>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { walk, tables, slot, at: [batch, token], heads, .. } = self;
        let (split, len) = (&walk.plan.angles.split, walk.plan.table);
        let heads = if split.theta_heads == 1 { 0..1 } else { heads };
        let angles = &mut tables.angles;
        angles.fill::<L>(&walk.plan.angles, [batch, walk.first + token], heads.clone());
        for head in 0..heads.len() {
            let at = (slot * heads.len() + head) * len;
            let table = (&mut tables.cos[at..at + len], &mut tables.sin[at..at + len]);
            walk.encoding.lay_out::<L>(angles.head(split, head), table);
        }
    }
}

/// A row's place: token and batch entry, head, and the token's slot in the tile.
#[derive(Clone, Copy)]
struct Place {
    token: usize,
    batch: usize,
    head: usize,
    slot: usize,
}

/// What a kernel does with each row, and with each token when all its rows are done.
trait Visitor<R: Real, const I: usize, const O: usize> {
    fn row<L, T>(&mut self, place: Place, row: Row<'_, T, I, O>, table: (&[R], &[R]))
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>;

    #[inline(always)]
    fn token_done(&mut self, _place: Place, _heads: Range<usize>) {}
}

impl<E: Encoding, R: Real> Walk<'_, '_, E, R> {
    /// Shows every row of a part to a visitor, tile by tile, the batch inside.
    #[inline(always)]
    fn visit<L, T, V, const I: usize, const O: usize>(
        &self,
        part: &mut Part<'_, I, O>,
        visitor: &mut V,
    ) where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
        V: Visitor<R, I, O>,
    {
        let plan = self.plan;
        let mut tables = self.tables();
        let per_token = plan.batch * plan.heads;
        let range = part.range();
        let (first, end) = (range.start / per_token, range.end.div_ceil(per_token));
        let per_batch = plan.angles.per_batch();
        let shared = plan.angles.split.theta_heads == 1;
        for t0 in (first..end).step_by(plan.tile[0]) {
            let tile = t0..(t0 + plan.tile[0]).min(end);
            for h0 in (0..plan.heads).step_by(plan.tile[1]) {
                let heads = h0..(h0 + plan.tile[1]).min(plan.heads);
                if !per_batch && (h0 == 0 || !shared) {
                    for token in tile.clone() {
                        self.fill::<L>(&mut tables, token - t0, [0, token], heads.clone());
                    }
                }
                for batch in 0..plan.batch {
                    for token in tile.clone() {
                        let slot = if per_batch { 0 } else { token - t0 };
                        let row = (token * plan.batch + batch) * plan.heads + h0;
                        if row >= range.end || row + heads.len() <= range.start {
                            continue; // another part's
                        }
                        if per_batch {
                            self.fill::<L>(&mut tables, 0, [batch, token], heads.clone());
                        }
                        for head in heads.clone() {
                            for input in 0..I {
                                part.prefetch::<L>(input, [token, batch + 1, head]);
                            }
                            let Some(row) = part.at::<T>([token, batch, head]) else { continue };
                            let table = self.table(&tables, slot, head - h0, heads.len());
                            visitor.row::<L, T>(Place { token, batch, head, slot }, row, table);
                        }
                        if per_batch {
                            let place = Place { token, batch, head: h0, slot };
                            visitor.token_done(place, heads.clone());
                        }
                    }
                }
                if !per_batch {
                    for token in tile.clone() {
                        let place = Place { token, batch: 0, head: h0, slot: token - t0 };
                        visitor.token_done(place, heads.clone());
                    }
                }
            }
        }
    }
}

/// x' of a row, in index order. `e` is scratch of as many whole blocks.
#[inline(always)]
fn activate<L, T>(
    act: FusedAct,
    x: &[T],
    (max, inverse): (&[T::Real], &[T::Real]),
    y: &mut [T::Real],
    e: &mut [T::Real],
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    match act {
        FusedAct::Elementwise(act) => act::values::<L, T>(act, x, y),
        FusedAct::SoftmaxFeatures => L::enter(RowSoftmax { x, y, e, lanes: PhantomData::<L> }),
        FusedAct::SoftmaxSequence => {
            L::enter(ColumnSoftmax { x, max, inverse, y, lanes: PhantomData::<L> });
        }
    }
}

/// The softmax of a row.
struct RowSoftmax<'a, L, T: Element> {
    x: &'a [T],
    y: &'a mut [T::Real],
    e: &'a mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T> Task for RowSoftmax<'_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let inverse = L::splat(softmax::exp_row::<L, T>(self.x, self.e));
        for i in (0..self.x.len()).step_by(L::N) {
            L::get(self.e, i).mul(inverse).write(self.y, i, false);
        }
    }
}

/// A row of a softmax over the sequence, from its columns' maxima and reciprocal sums.
struct ColumnSoftmax<'a, L, T: Element> {
    x: &'a [T],
    max: &'a [T::Real],
    inverse: &'a [T::Real],
    y: &'a mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T> Task for ColumnSoftmax<'_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let zero = Real::of(0.0);
        for i in (0..self.x.len()).step_by(L::N) {
            let x: L = L::read(self.x, i, zero);
            let e = x.sub(L::read(self.max, i, zero)).exp();
            e.mul(L::read(self.inverse, i, zero)).write(self.y, i, false);
        }
    }
}

/// The sum of products of two rows in index order: lanes within a chunk, f64 across chunks.
#[inline(always)]
fn dot<L>(a: &[L::Real], b: &[L::Real]) -> L::Real
where
    L: Lanes + Memory<<L as Lanes>::Real>,
{
    let chunk = 64 * L::N;
    let (zero, mut total) = (Real::of(0.0), 0.0);
    for (a, b) in a.chunks(chunk).zip(b.chunks(chunk)) {
        let mut sum = L::splat(zero);
        for i in (0..a.len()).step_by(L::N) {
            sum = L::read(a, i, zero).mul_add(L::read(b, i, zero), sum);
        }
        total += sum.reduce_add().to_f64();
    }
    Real::of(total)
}

/// Maxima and reciprocal sums of all columns of a batch entry and head, in index order.
struct ColumnStatistics<'k, 'r, R> {
    part: Part<'r, 1, 0>,
    statistics: &'k mut [R],
}

impl<R: Real> KernelIn<R> for ColumnStatistics<'_, '_, R> {
    #[inline(always)]
    fn run_in<L, T>(mut self)
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let n = self.part.range().len();
        let Some(run) = self.part.next_run::<T>(n) else { return };
        let [x] = &run.inputs;
        let d = x.len();
        let (mut max, mut inverse) = (Scratch::<R>::new(d), Scratch::<R>::new(d));
        let blocks = d.next_multiple_of(L::N);
        let (max, inverse) = (&mut max[..blocks], &mut inverse[..blocks]);
        softmax::column_statistics::<L, T>(x, 0..run.rows, false, max, inverse);
        let (to_max, to_inverse) = self.statistics[..2 * d].split_at_mut(d);
        for i in (0..d).step_by(L::N) {
            L::get(max, i).write(to_max, i, false);
            L::get(inverse, i).write(to_inverse, i, false);
        }
    }
}

struct Forward<'k, 'a, 'r, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    part: Part<'r, 1, 1>,
    columns: &'k [R],
    stream: bool,
}

struct ForwardRows<'k, 'a, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    act: FusedAct,
    columns: &'k [R],
    y: Scratch<R>,
    e: Scratch<R>,
    stream: bool,
}

impl<E: Encoding, R: Real> KernelIn<R> for Forward<'_, '_, '_, E, R> {
    #[inline(always)]
    fn run_in<L, T>(mut self)
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let Self { walk, columns, stream, .. } = self;
        let (act, y) = (walk.plan.act, Scratch::new(walk.plan.features));
        if act == FusedAct::Elementwise(Act::None) {
            let mut rows = PlainRows { walk, stream };
            walk.visit::<L, T, _, 1, 1>(&mut self.part, &mut rows);
        } else {
            let e = Scratch::new(walk.plan.features);
            let mut rows = ForwardRows { walk, act, columns, y, e, stream };
            walk.visit::<L, T, _, 1, 1>(&mut self.part, &mut rows);
        }
    }
}

/// Without an activation.
struct PlainRows<'k, 'a, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    stream: bool,
}

impl<E: Encoding, R: Real> Visitor<R, 1, 1> for PlainRows<'_, '_, E, R> {
    #[inline(always)]
    fn row<L, T>(&mut self, _place: Place, row: Row<'_, T, 1, 1>, table: (&[R], &[R]))
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let ([x], [o]) = (row.inputs, row.outputs);
        self.walk.encoding.forward::<L, T, T>(x, table, o, self.stream);
    }
}

impl<E: Encoding, R: Real> Visitor<R, 1, 1> for ForwardRows<'_, '_, E, R> {
    #[inline(always)]
    fn row<L, T>(&mut self, place: Place, row: Row<'_, T, 1, 1>, table: (&[R], &[R]))
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let ([x], [o]) = (row.inputs, row.outputs);
        let columns = self.walk.columns(self.columns, place);
        let y = &mut self.y[..x.len()];
        activate::<L, T>(self.act, x, columns, y, &mut self.e);
        self.walk.encoding.forward::<L, R, T>(y, table, o, self.stream);
    }
}

impl<E, R: Real> Walk<'_, '_, E, R> {
    /// The maxima and reciprocal sums of a row's columns; empty where there are none.
    #[inline(always)]
    fn columns<'c>(&self, all: &'c [R], place: Place) -> (&'c [R], &'c [R]) {
        if self.plan.act != FusedAct::SoftmaxSequence {
            return (&[], &[]);
        }
        let len = self.plan.features;
        let at = (place.batch * self.plan.heads + place.head) * 2 * len;
        (&all[at..at + len], &all[at + len..at + 2 * len])
    }
}

/// For the backward of a softmax over the sequence: sum over tokens of x' * dx', for each column.
struct Dots<'k, 'a, 'r, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    part: Part<'r, 2, 0>,
    columns: &'k [R],
    sums: &'k mut [R],
}

struct DotRows<'k, 'a, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    columns: &'k [R],
    sums: &'k mut [R],
    y: Scratch<R>,
    g: Scratch<R>,
    e: Scratch<R>,
}

impl<E: Encoding, R: Real> KernelIn<R> for Dots<'_, '_, '_, E, R> {
    #[inline(always)]
    fn run_in<L, T>(mut self)
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let Self { walk, columns, sums, .. } = self;
        let d = walk.plan.features;
        let [y, g, e] = [Scratch::new(d), Scratch::new(d), Scratch::new(d)];
        let mut rows = DotRows { walk, columns, sums, y, g, e };
        walk.visit::<L, T, _, 2, 0>(&mut self.part, &mut rows);
    }
}

impl<E: Encoding, R: Real> Visitor<R, 2, 0> for DotRows<'_, '_, E, R> {
    #[inline(always)]
    fn row<L, T>(&mut self, place: Place, row: Row<'_, T, 2, 0>, table: (&[R], &[R]))
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let [x, grad] = row.inputs;
        let (d, zero) = (x.len(), R::of(0.0));
        let (y, g) = (&mut self.y[..d], &mut self.g[..d]);
        let columns = self.walk.columns(self.columns, place);
        activate::<L, T>(self.walk.plan.act, x, columns, y, &mut self.e);
        self.walk.encoding.backward::<L, T, R>(grad, table, g, false);
        let at = (place.batch * self.walk.plan.heads + place.head) * d;
        let sums = &mut self.sums[at..at + d];
        for i in (0..d).step_by(L::N) {
            let sum: L = L::read(sums, i, zero);
            L::read(y, i, zero).mul_add(L::read(g, i, zero), sum).write(sums, i, false);
        }
    }
}

struct Backward<'k, 'a, 'r, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    part: Part<'r, 2, 1>,
    columns: &'k [R],
    dots: &'k [R],
    /// Sums of the angles' gradients, if asked for.
    sums: Option<&'k mut [R]>,
    stream: bool,
}

struct BackwardRows<'k, 'a, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    act: FusedAct,
    columns: &'k [R],
    dots: &'k [R],
    sums: Option<&'k mut [R]>,
    /// Gradients of a tile's angles, summed over the batch: by slot and head.
    angles: Scratch<R>,
    y: Scratch<R>,
    g: Scratch<R>,
    e: Scratch<R>,
    stream: bool,
}

impl<E: Encoding, R: Real> KernelIn<R> for Backward<'_, '_, '_, E, R> {
    #[inline(always)]
    fn run_in<L, T>(mut self)
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let Self { walk, columns, dots, sums, stream, .. } = self;
        let plan = walk.plan;
        let tile = plan.tile[0] * plan.tile[1] * plan.table;
        let angles = Scratch::zeros(if sums.is_some() { tile } else { 0 });
        let d = plan.features;
        let [y, g, e] = [Scratch::new(d), Scratch::new(d), Scratch::new(d)];
        let act = plan.act;
        let mut rows = BackwardRows { walk, act, columns, dots, sums, angles, y, g, e, stream };
        walk.visit::<L, T, _, 2, 1>(&mut self.part, &mut rows);
    }
}

impl<E: Encoding, R: Real> Visitor<R, 2, 1> for BackwardRows<'_, '_, E, R> {
    #[inline(always)]
    fn row<L, T>(&mut self, place: Place, row: Row<'_, T, 2, 1>, table: (&[R], &[R]))
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let ([x, grad], [dx]) = (row.inputs, row.outputs);
        let (plan, encoding, zero) = (self.walk.plan, self.walk.encoding, R::of(0.0));
        let d = plan.features;
        if self.act == FusedAct::Elementwise(Act::None) && self.sums.is_none() {
            encoding.backward::<L, T, T>(grad, table, dx, self.stream);
            return;
        }
        let (y, g) = (&mut self.y[..d], &mut self.g[..d]);
        encoding.backward::<L, T, R>(grad, table, g, false);
        if self.sums.is_some() || !matches!(self.act, FusedAct::Elementwise(_)) {
            let columns = self.walk.columns(self.columns, place);
            activate::<L, T>(self.act, x, columns, y, &mut self.e);
        }
        if self.sums.is_some() {
            let head = place.slot * plan.tile[1] + place.head % plan.tile[1];
            let at = head * plan.table;
            let sums = &mut self.angles[at..at + encoding.table_len()];
            encoding.angle_gradients::<L, T>(y, g, grad, table, sums);
        }
        if dx.is_empty() {
            return;
        }
        match self.act {
            FusedAct::Elementwise(act) => act::pull_back::<L, T>(act, x, g, dx, self.stream),
            FusedAct::SoftmaxFeatures => {
                let dot = L::splat(dot::<L>(y, g));
                for i in (0..d).step_by(L::N) {
                    let (y, g): (L, L) = (L::read(y, i, zero), L::read(g, i, zero));
                    y.mul(g.sub(dot)).write(dx, i, self.stream);
                }
            }
            FusedAct::SoftmaxSequence => {
                let at = (place.batch * plan.heads + place.head) * d;
                let dots = &self.dots[at..at + d];
                for i in (0..d).step_by(L::N) {
                    let (y, g): (L, L) = (L::read(y, i, zero), L::read(g, i, zero));
                    y.mul(g.sub(L::read(dots, i, zero))).write(dx, i, self.stream);
                }
            }
        }
    }

    #[inline(always)]
    fn token_done(&mut self, place: Place, heads: Range<usize>) {
        let Some(sums) = &mut self.sums else { return };
        let (plan, encoding) = (self.walk.plan, self.walk.encoding);
        let split = &plan.angles.split;
        for head in heads {
            let at = (place.slot * plan.tile[1] + head % plan.tile[1]) * plan.table;
            let angles = &mut self.angles[at..at + plan.table];
            let row = if split.theta_heads == 1 { 0 } else { head };
            let sums = &mut sums[row * split.count..(row + 1) * split.count];
            let token = self.walk.first + place.token;
            plan.angles.add_gradients([place.batch, token], angles, encoding.angle_step(), sums);
            angles.fill(R::of(0.0));
        }
    }
}
