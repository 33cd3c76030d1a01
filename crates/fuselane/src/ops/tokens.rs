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
use std::sync::atomic::{AtomicBool, Ordering};

use crate::dtype::{DType, Element, Real, with_real};
use crate::error::{Error, Result};
use crate::ops::act::{Act, specialized};
use crate::ops::angles::{self, AnglePlan, AngleSplit, Angles, Placement, Tables, padded};
use crate::ops::softmax::{self, NEAR};
use crate::plan::{self, Pairs};
use crate::rows::{
    Grid, GridMut, Named, Operands, Part, Patch, Rows, Run, contiguous_rows, disjoint,
};
use crate::scratch::Scratch;
use crate::simd::{
    Access, Arithmetic, Elements, KernelIn, Lanes, MAX_LANES, Math, Memory, Registers, SHORT_LIMIT,
    Task,
};
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

/// How rows are encoded by their angles, whose cosines and sines come from [`Tables`]. Rows are
/// cut into the pieces of [`Pieces`], whether they are a tensor's or lie in scratch.
pub(crate) trait Encoding: Copy + Sync {
    /// The name of the operator, for errors.
    const OPERATOR: &'static str;

    /// Output features of `features` input features.
    fn output_len(&self, features: usize) -> usize;

    /// Which features turn, where pairs do.
    fn pairs(&self) -> Option<Pairs>;

    /// How rows lie in scratch.
    fn pieces(&self, features: usize) -> Pieces;

    /// Entries for each angle in the tables, and in the sums of `angle_gradients`.
    fn angle_step(&self) -> usize;

    /// Where the features of o are cut into the pieces that `forward` and `backward` know.
    fn output_cuts(&self) -> [usize; 3];

    /// `o = encode(x)` for a patch, in pieces. Gives what [`Access::note`] noted of x.
    fn forward<L, S, D>(
        &self,
        x: [Grid<'_, S::Number>; 4],
        tables: [Grid<'_, L::Real>; 2],
        o: [GridMut<'_, D::Number>; 4],
        stream: bool,
    ) -> L
    where
        S: Access<L>,
        D: Access<L>,
        L: Math;

    /// `dx' = encode^T(grad)` for a patch, in pieces.
    fn backward<L, S, D>(
        &self,
        grad: [Grid<'_, S::Number>; 4],
        tables: [Grid<'_, L::Real>; 2],
        dx: [GridMut<'_, D::Number>; 4],
        stream: bool,
    ) where
        S: Access<L>,
        D: Access<L>,
        L: Math;

    /// Adds the gradients of the angles of one row to `sums`, which are in index order. x' and dx'
    /// lie in scratch, with the starts of their pieces.
    fn angle_gradients<L, T>(
        &self,
        y_and_g: (&[L::Real], &[L::Real], [usize; 4]),
        grad: &[T],
        table: (&[L::Real], &[L::Real]),
        sums: &mut [L::Real],
    ) where
        T: Element<Real = L::Real>,
        L: Math + Memory<T> + Memory<<L as Lanes>::Real>;
}

/// How a row of features lies in scratch, in register order: in pieces that start with a new
/// block wherever the encoding does so.
#[derive(Clone, Copy)]
pub(crate) struct Pieces {
    /// Where the pieces that the encoding knows begin, by feature; some may be empty.
    features: [usize; 4],
    /// Where they begin in scratch.
    starts: [usize; 4],
    /// The same with those joined that follow each other in whole blocks, which mostly are all.
    joined: [Piece; 4],
    count: usize,
    /// Numbers for each row.
    width: usize,
}

#[derive(Clone, Copy, Default)]
struct Piece {
    /// The first feature.
    first: usize,
    len: usize,
    /// Where it starts in scratch.
    at: usize,
}

impl Pieces {
    /// Pieces of these lengths, one after the other.
    pub(crate) fn new(lengths: [usize; 4]) -> Self {
        let (features, starts, joined) = ([0; 4], [0; 4], [Piece::default(); 4]);
        let mut pieces = Self { features, starts, joined, count: 0, width: 0 };
        let mut first = 0;
        for (i, len) in lengths.into_iter().enumerate() {
            (pieces.features[i], pieces.starts[i]) = (first, pieces.width);
            let open = pieces.count.checked_sub(1).map(|last| &mut pieces.joined[last]);
            match open {
                Some(piece) if piece.len % MAX_LANES == 0 => piece.len += len,
                _ if len == 0 => {}
                _ => {
                    pieces.joined[pieces.count] = Piece { first, len, at: pieces.width };
                    pieces.count += 1;
                }
            }
            first += len;
            pieces.width += padded(len);
        }
        pieces
    }

    /// Where a row or scratch is cut into the pieces that the encoding knows.
    #[inline(always)]
    fn cuts<L: Lanes, A: Access<L>>(&self) -> [usize; 3] {
        let [_, a, b, c] = if A::REGISTERS { self.starts } else { self.features };
        [a, b, c]
    }

    /// Whether a row is a single piece of whole blocks.
    #[inline(always)]
    fn whole(&self) -> bool {
        self.count == 1 && self.joined[0].len == self.width
    }

    #[inline(always)]
    fn iter(&self) -> std::slice::Iter<'_, Piece> {
        self.joined[..self.count].iter()
    }
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

    /// Whether a backward looks at x.
    fn needs_x(&self, gradients: &Gradients<'_>) -> bool {
        self.act != FusedAct::default() || gradients.dtheta.is_some()
    }

    /// Checks the angles of a call on activations of `dtype`.
    fn check_angles(
        &self,
        operator: &'static str,
        dtype: DType,
        [b, n, h, _]: [usize; 4],
    ) -> Result<AngleSplit> {
        let &Self { placement, angles, count, .. } = self;
        angles::check(operator, angles, placement, count, dtype.real(), [b, n, h])
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

/// Checks a forward, and tells what it comes to. Nothing is read or written.
pub(crate) fn check_forward<E: Encoding>(
    encoding: E,
    call: &Call<'_>,
    x: View<'_>,
    o: &mut ViewMut<'_>,
) -> Result<plan::Encoding> {
    let dims @ [.., d] = dimensions(E::OPERATOR, "x", &x, call.layout)?;
    let width = encoding.output_len(d);
    check_shape(E::OPERATOR, "o", &o.as_view(), ("x", &x), width)?;
    contiguous_rows(E::OPERATOR, "x", x)?;
    let split = call.check_angles(E::OPERATOR, x.dtype(), dims)?;
    // All of it at once: packed sequences are worked on one after the other.
    disjoint(E::OPERATOR, &[("x", Some(x)), call.theta()], &[("o", o.as_view())])?;
    if !x.is_empty() {
        forward_operands(x, o.reborrow(), width).check(E::OPERATOR)?;
    }
    Ok(planned(encoding, dims, split))
}

fn forward_operands<'a>(x: View<'a>, o: ViewMut<'a>, width: usize) -> Operands<'a, 1, 1, 0, 0> {
    Operands {
        output_len: [Some(width)],
        ..Operands::plain(("x", x), [("x", Some(x))], [("o", Some(o))])
    }
}

fn planned<E: Encoding>(
    encoding: E,
    [batch, tokens, heads, features]: [usize; 4],
    split: AngleSplit,
) -> plan::Encoding {
    let (output_features, pairs) = (encoding.output_len(features), encoding.pairs());
    plan::Encoding { batch, tokens, heads, features, output_features, pairs, split }
}

/// Encodes `x` into `o`.
pub(crate) fn forward<E: Encoding>(
    encoding: E,
    call: &Call<'_>,
    x: View<'_>,
    mut o: ViewMut<'_>,
) -> Result<()> {
    let checked = check_forward(encoding, call, x, &mut o)?;
    if x.is_empty() {
        return Ok(());
    }
    let order = tokens_first(call.layout);
    let isa = isa();
    with_real!(x.dtype(), R => {
        let passes = Passes { backward: false, dtheta: false };
        let plan = Plan::<R>::new(call, &x, checked, encoding, passes);
        let x = x.permute(&order)?;
        for tokens in plan.sequences() {
            let x = x.narrow(0, tokens.start, tokens.len())?;
            let o = o.reborrow().permute(&order)?.narrow(0, tokens.start, tokens.len())?;
            let operands = forward_operands(x, o, checked.output_features);
            let rows = Rows::new(E::OPERATOR, operands)?;
            let columns = plan.column_statistics(E::OPERATOR, isa, Some(&x), false)?;
            let stream = rows.stream();
            rows.for_each_part(plan.group(), |part| {
                let walk = Walk { plan: &plan, encoding, first: tokens.start };
                R::run(isa, rows.dtype(), Forward { walk, part, columns: &columns, stream });
            });
        }
        Ok(())
    })
}

/// A view with the dimensions of a backward, and its name: x where there is one, else dx, whose
/// shape is the same. Without either the call asks for nothing.
fn like<'a>(gradients: &Gradients<'a>) -> Result<Option<Named<View<'a>>>> {
    Ok(match (&gradients.x, &gradients.dx) {
        (Some(x), _) => Some(("x", *x)),
        (None, Some(dx)) => Some(("dx", View::dense_shape(dx.dtype(), dx.shape())?)),
        (None, None) => None,
    })
}

/// Checks a backward, and tells what it comes to: nothing at all, if it asks for nothing. Nothing is
/// read or written.
pub(crate) fn check_backward<E: Encoding>(
    encoding: E,
    call: &Call<'_>,
    gradients: &mut Gradients<'_>,
) -> Result<plan::Encoding> {
    let operator = E::OPERATOR;
    let grad = gradients.grad;
    let needs_x = call.needs_x(gradients);
    if needs_x && gradients.x.is_none() {
        let expected = "it (the backward of an activation and dtheta need it)";
        return Err(Error::new(operator, "x", "is missing", expected));
    }
    let Some(like) = like(gradients)? else {
        return Ok(planned(encoding, [0; 4], AngleSplit::default()));
    };
    let dims @ [.., d] = dimensions(operator, like.0, &like.1, call.layout)?;
    let width = encoding.output_len(d);
    check_shape(operator, "grad", &grad, (like.0, &like.1), width)?;
    if let Some(dx) = &gradients.dx {
        check_shape(operator, "dx", &dx.as_view(), (like.0, &like.1), d)?;
    }
    if let Some(x) = &gradients.x {
        contiguous_rows(operator, "x", *x)?;
    }
    let split = call.check_angles(operator, like.1.dtype(), dims)?;
    if let Some(dtheta) = &gradients.dtheta {
        let expected = [split.theta_heads, split.theta_columns];
        if dtheta.shape() != expected {
            let got = format!("has shape {:?}", dtheta.shape());
            let expected = format!("{expected:?} (shape of theta)");
            return Err(Error::new(operator, "dtheta", got, expected));
        }
    }
    let inputs = [("x", gradients.x), ("grad", Some(grad)), call.theta()];
    let mut written = Vec::with_capacity(2);
    written.extend(gradients.dx.iter().map(|dx| ("dx", dx.as_view())));
    written.extend(gradients.dtheta.iter().map(|dtheta| ("dtheta", dtheta.as_view())));
    disjoint(operator, &inputs, &written)?;
    if !like.1.is_empty() {
        let dx = gradients.dx.as_mut().map(ViewMut::reborrow);
        let x = gradients.x.filter(|_| needs_x);
        backward_operands(like, x, grad, dx, width).check(operator)?;
    }
    Ok(planned(encoding, dims, split))
}

fn backward_operands<'a>(
    like: Named<View<'a>>,
    x: Option<View<'a>>,
    grad: View<'a>,
    dx: Option<ViewMut<'a>>,
    width: usize,
) -> Operands<'a, 2, 1, 0, 0> {
    Operands {
        input_len: [None, Some(width)],
        ..Operands::plain(like, [("x", x), ("grad", Some(grad))], [("dx", dx)])
    }
}

/// Pulls `grad` back through the encoding and the activation.
pub(crate) fn backward<E: Encoding>(
    encoding: E,
    call: &Call<'_>,
    mut gradients: Gradients<'_>,
) -> Result<()> {
    let operator = E::OPERATOR;
    let checked = check_backward(encoding, call, &mut gradients)?;
    let Some(like) = like(&gradients)? else { return Ok(()) };
    if like.1.is_empty() || (gradients.dx.is_none() && gradients.dtheta.is_none()) {
        if let Some(dtheta) = &mut gradients.dtheta {
            dtheta.fill_zero();
        }
        return Ok(());
    }
    let plan::Encoding { batch: b, heads: h, features: d, split, .. } = checked;
    let width = checked.output_features;
    let grad = gradients.grad;
    let x = gradients.x.filter(|_| call.needs_x(&gradients));
    let order = tokens_first(call.layout);
    let isa = isa();
    with_real!(like.1.dtype(), R => {
        let passes = Passes { backward: true, dtheta: gradients.dtheta.is_some() };
        let plan = Plan::<R>::new(call, &like.1, checked, encoding, passes);
        let mut angle_sums = Scratch::<R>::zeros(split.theta_heads * split.count);
        // Sums over all tokens, in dtheta, need a softmax to be exact; dx is to be what it is
        // without dtheta. So the two go apart.
        let softmax = !matches!(call.act, FusedAct::Elementwise(_));
        let apart = softmax && gradients.dx.is_some() && gradients.dtheta.is_some();
        let rounds: &[_] = if apart { &[(true, false), (false, true)] } else { &[(true, true)] };
        let rounds = plan.sequences().into_iter().flat_map(|tokens| {
            rounds.iter().map(move |&(for_x, for_theta)| (tokens.clone(), for_x, for_theta))
        });
        for (tokens, for_x, for_theta) in rounds {
            let for_theta = for_theta && gradients.dtheta.is_some();
            let cut = tokens.start;
            let len = tokens.len();
            let grad = grad.permute(&order)?.narrow(0, cut, len)?;
            let x = match x {
                Some(x) => Some(x.permute(&order)?.narrow(0, cut, len)?),
                None => None,
            };
            let dx = match &mut gradients.dx {
                Some(dx) if for_x => Some(dx.reborrow().permute(&order)?.narrow(0, cut, len)?),
                _ => None,
            };
            let like_part = View::dense_shape(like.1.dtype(), &[len, b, h, d])?;
            let walk = Walk { plan: &plan, encoding, first: cut };
            let columns = plan.column_statistics(operator, isa, x.as_ref(), for_theta)?;
            let mut dots = Scratch::<R>::zeros(0);
            if call.act == FusedAct::SoftmaxSequence {
                let len = b * h * plan.pieces.width;
                dots = Scratch::zeros(len);
                let rows = Rows::new(operator, Operands {
                    input_len: [None, Some(width)],
                    ..Operands::plain((like.0, like_part), [("x", x), ("grad", Some(grad))], [])
                })?;
                rows.sum_over_parts(b * h, &mut dots[..len], |part, sums| {
                    let columns = &columns;
                    R::run(isa, rows.dtype(), Dots { walk, part, columns, sums });
                });
            }
            let like_part = (like.0, like_part);
            let rows = Rows::new(operator, backward_operands(like_part, x, grad, dx, width))?;
            let stream = rows.stream();
            let (columns, dots) = (&columns, &dots);
            if for_theta {
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
    /// How rows lie in scratch.
    pieces: Pieces,
    /// Room for the sums of one head's angles.
    angle_sums: usize,
    /// Tokens and heads whose angles are held at once.
    tile: [usize; 2],
}

/// What a call asks for.
#[derive(Clone, Copy)]
struct Passes {
    backward: bool,
    dtheta: bool,
}

impl Passes {
    /// How many rows of scratch a row takes.
    fn scratch(self, act: FusedAct) -> usize {
        match (act, self.backward) {
            (_, true) if self.dtheta => 2,
            (FusedAct::Elementwise(act), backward) => usize::from(backward && act != Act::None),
            (_, backward) => 1 + usize::from(backward),
        }
    }
}

/// How many tokens are worked on with one set of angles, for one batch entry after the other, where
/// each takes `row_bytes` of x and `kept_bytes` of tables and scratch. The more there are, the better
/// memory streams, as each entry of the batch is another stretch of it; but what is kept has to stay in
/// the first-level cache, of which it may have half. Rows of x have as much, where little is kept.
///
/// Measured on a Zen 4 (32 KiB), of the copy, bf16, two threads, batch 12, 12 heads of 128 features. A
/// token of rotate keeps 6 KiB of tables, and one of cosine 1 KiB for the head at hand:
///
/// | tables, KiB | 6 | 8 | 12 | 16 | 18 | 24 | 32 |
/// |---|---|---|---|---|---|---|---|
/// | rotate, forward / backward | 0.87 / 0.84 | | 0.95 / 0.92 | | 0.98 / 0.96 | 0.94 / 0.91 | |
/// | cosine, forward / backward | | 0.75 / 0.84 | | 0.77 / 0.86 | | 0.76 / 0.82 | 0.76 / 0.79 |
///
/// With softmax over features, whose backward keeps 18 KiB for a token, one at a time is best: 28 GB/s
/// where two have 26 and three 24.
fn tile_tokens(row_bytes: usize, kept_bytes: usize) -> usize {
    let half = crate::machine::first_level_cache_bytes() / 2;
    (half / row_bytes.max(kept_bytes).max(1)).max(1)
}

impl<'a, R: Arithmetic> Plan<'a, R> {
    /// The plan of a checked call that is not empty. Reads theta.
    fn new<E: Encoding>(
        call: &Call<'a>,
        x: &View<'_>,
        checked: plan::Encoding,
        encoding: E,
        passes: Passes,
    ) -> Self {
        let plan::Encoding { batch, tokens, heads, features, split, .. } = checked;
        let angles = AnglePlan::new(call.angles, call.placement, split, tokens);
        let order = tokens_first(call.layout);
        let [token_stride, head_stride] = [0, 2].map(|i| x.strides()[order[i]].unsigned_abs());
        // Neighbours in memory are worked on together. Sums of dtheta are over tokens, then heads.
        let together = head_stride <= token_stride || heads == 1 || passes.dtheta;
        let tile_heads = if together { heads } else { 1 };
        let pieces = encoding.pieces(features);
        let angle_sums = padded(call.count * encoding.angle_step());
        let table_heads = if angles.shared { 1 } else { tile_heads };
        let kept =
            2 * table_heads * angle_sums + passes.scratch(call.act) * tile_heads * pieces.width;
        let row_bytes = tile_heads * features * x.dtype().size();
        let tile = [tile_tokens(row_bytes, kept * size_of::<R>()), tile_heads];
        Self {
            act: call.act,
            angles,
            sequences: call.placement.sequences,
            batch,
            tokens,
            heads,
            pieces,
            angle_sums,
            tile,
        }
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
        let few = self.tokens < 4 * crate::parallel::current_threads();
        (if few { 1 } else { self.batch } * self.heads).max(1)
    }

    /// For a softmax over the sequence: the statistics of each column of x (tokens, batch, heads,
    /// features).
    fn column_statistics(
        &self,
        operator: &'static str,
        isa: Isa,
        x: Option<&View<'_>>,
        exact: bool,
    ) -> Result<Columns<R>> {
        let form = if exact { Form::Exact } else { Form::Near };
        let Some(x) = x.filter(|_| self.act == FusedAct::SoftmaxSequence) else {
            return Ok(Columns { statistics: Scratch::new(0), form });
        };
        let (n, d) = (x.shape()[0], x.shape()[3]);
        // Heads that lie side by side are read together.
        let dense = x.strides()[2] == d as isize;
        let heads = if dense { self.column_heads(d) } else { 1 };
        let len = heads * 2 * self.pieces.width;
        let mut statistics = Scratch::<R>::zeros(self.batch * self.heads * 2 * self.pieces.width);
        let far = AtomicBool::new(false);
        let x = x.permute(&[1, 0, 2, 3])?;
        let rows = Rows::new(operator, Operands::plain(("x", x), [("x", Some(x))], []))?;
        let rows = if dense { rows.widened(1) } else { rows };
        let rows = rows.columns(1, (heads * d).max(1));
        rows.for_each_group(n, &mut statistics, len, |part, statistics| {
            let (pieces, far) = (&self.pieces, &far);
            R::run(isa, rows.dtype(), ColumnStatistics { part, pieces, statistics, exact, far });
        });
        let form = if !exact && far.into_inner() { Form::Short } else { form };
        Ok(Columns { statistics, form })
    }

    /// How many heads of `d` features are worked on together: as many as leave each thread some
    /// work and keep the sums in the first-level cache.
    fn column_heads(&self, d: usize) -> usize {
        let (tasks, most) = (4 * crate::parallel::current_threads(), COLUMNS / d.max(1));
        let fits = |&heads: &usize| {
            self.heads.is_multiple_of(heads)
                && heads <= most
                && self.batch * (self.heads / heads) >= tasks
        };
        (1..=self.heads).rev().find(fits).unwrap_or(1)
    }
}

/// The most columns of a softmax over the sequence that are summed at once.
const COLUMNS: usize = 2048;

/// What a softmax over the sequence keeps of the columns of x: for each batch entry and head the
/// maxima (or what else is subtracted first), then the reciprocals of the sums of exponentials.
struct Columns<R: Real> {
    statistics: Scratch<R>,
    form: Form,
}

/// How exact a softmax has to be, in lanes that have short forms; others are always exact.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Exact,
    /// As exact as 16 bits need.
    Short,
    /// The same, for columns that are all near 0 (see [`NEAR`]), so that nothing is subtracted.
    Near,
}

impl<R: Real> Plan<'_, R> {
    /// Scratch for the rows of a patch, if it is needed, and for one row in whole blocks, or two
    /// blocks for each row.
    fn scratch(&self, needed: bool) -> [Scratch<R>; 2] {
        let width = if needed { self.pieces.width } else { 0 };
        let rows = self.tile[0] * self.tile[1];
        [Scratch::new(rows * width), Scratch::new(width.max(2 * rows * MAX_LANES))]
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

/// A patch: its rows, and its first token's slot in the tile.
#[derive(Clone, Copy)]
struct Place {
    patch: Patch,
    slot: usize,
}

/// What a kernel does with the rows of a tile that are of one batch entry or a few, and with the tokens of
/// a tile when all their rows are done.
trait Visitor<R: Real, const I: usize, const O: usize> {
    fn patch<L, T>(&mut self, place: Place, part: &mut Part<'_, I, O>, tables: &[Grid<'_, R>; 2])
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>;

    #[inline(always)]
    fn tokens_done(&mut self, _place: Place) {}

    /// How many batch entries a patch may have.
    #[inline(always)]
    fn entries<L: Lanes>(&self) -> usize {
        1
    }
}

/// Batch entries whose rows take turns, where there is little arithmetic: so memory is read and written at
/// several places at once, which keeps more of it busy. (Emerald Rapids, loops in C, from memory, cycles for
/// 16 elements: rotate 9.1 one by one, 8.2 with two, 7.8 with four. A Zen 4 is faster straight on, and does
/// not have these lanes. CPUs of AMD's that have them were not measured.)
const TURNS: usize = 4;

/// How many of `batch` entries take turns: at most [`TURNS`], and about as many each time.
#[inline(always)]
fn turns<L: Lanes>(batch: usize) -> usize {
    if L::MANY_REGISTERS { batch.div_ceil(batch.div_ceil(TURNS)) } else { 1 }
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
        let angles = &plan.angles;
        let mut tables = Tables::new::<L>(angles, self.encoding.angle_step(), plan.tile);
        let (range, per_token) = (part.range(), plan.batch * plan.heads);
        let (first, end) = (range.start / per_token, range.end.div_ceil(per_token));
        let (per_batch, shared) = (angles.per_batch(), angles.shared);
        let [tile_tokens, tile_heads] = plan.tile;
        for t0 in (first..end).step_by(tile_tokens) {
            let t1 = (t0 + tile_tokens).min(end);
            let tokens = self.first + t0..self.first + t1;
            for h0 in (0..plan.heads).step_by(tile_heads) {
                let h1 = (h0 + tile_heads).min(plan.heads);
                if !per_batch && (h0 == 0 || !shared) {
                    tables.keep_off(angles, part.output_address([t0, 0, h0]));
                    tables.fill::<L>(angles, 0, tokens.clone(), h0..h1);
                }
                let most = if per_batch { 1 } else { visitor.entries::<L>() };
                let mut batch = 0;
                while batch < plan.batch {
                    // The first and the last token of a part may be shared with others, between
                    // batch entries.
                    let begins = |b: usize| (t0 * plan.batch + b) * plan.heads >= range.start;
                    let ends = |b: usize| ((t1 - 1) * plan.batch + b) * plan.heads < range.end;
                    let (whole_first, whole_last) = (begins(batch), ends(batch));
                    let (from, to) =
                        (t0 + usize::from(!whole_first), t1 - usize::from(!whole_last));
                    let entry = batch;
                    batch += 1;
                    while batch < plan.batch.min(entry + most)
                        && begins(batch) == whole_first
                        && ends(batch) == whole_last
                    {
                        batch += 1;
                    }
                    let entries = batch - entry;
                    if from >= to {
                        continue;
                    }
                    if per_batch {
                        tables.fill::<L>(angles, entry, tokens.clone(), h0..h1);
                    }
                    // One patch ahead is enough: two to four were no faster.
                    let next = if batch < plan.batch {
                        [from, batch, h0]
                    } else if h1 < plan.heads {
                        [t0, 0, h1]
                    } else {
                        [t1, 0, 0]
                    };
                    let (rows, slot) = ([to - from, h1 - h0], from - t0);
                    let patch = Patch { first: [from, entry, h0], rows, entries, next };
                    let place = Place { patch, slot };
                    visitor.patch::<L, T>(place, part, &tables.rows(angles, slot, rows));
                    if per_batch {
                        visitor.tokens_done(place);
                    }
                }
                if !per_batch {
                    let rows = [t1 - t0, h1 - h0];
                    let first = [t0, 0, h0];
                    let patch = Patch { first, rows, entries: 1, next: first };
                    visitor.tokens_done(Place { patch, slot: 0 });
                }
            }
        }
    }

    /// The numbers that were kept for the columns of a patch, `len` for each batch entry and head,
    /// from the patch's first head on; none where there are none.
    #[inline(always)]
    fn columns<'c>(&self, all: &'c [R], patch: &Patch, len: usize) -> &'c [R] {
        let [_, batch, head] = patch.first;
        let at = (batch * self.plan.heads + head) * len;
        all.get(at..at + patch.rows[1] * len).unwrap_or_default()
    }
}

/// `o = encode(x)` for a patch, or back with `BACK`. Gives what [`Access::note`] noted of x, forward.
struct Encode<'p, 'o, E, L: Lanes, S: Access<L>, D: Access<L>, const BACK: bool> {
    encoding: E,
    pieces: &'p Pieces,
    tables: &'p [Grid<'p, L::Real>; 2],
    x: &'p Grid<'p, S::Number>,
    o: GridMut<'o, D::Number>,
    stream: bool,
}

impl<E, L, S, D, const BACK: bool> Task for Encode<'_, '_, E, L, S, D, BACK>
where
    E: Encoding,
    S: Access<L>,
    D: Access<L>,
    L: Math,
{
    type Output = L;
    #[inline(always)]
    fn run(self) -> L {
        let Self { encoding, pieces, tables: &tables, x: &x, o, stream } = self;
        let output = encoding.output_cuts();
        if BACK {
            let (x, o) = (x.cut(output), o.cut(pieces.cuts::<L, D>()));
            encoding.backward::<L, S, D>(x, tables, o, stream);
            L::splat(Real::of(0.0))
        } else {
            let (x, o) = (x.cut(pieces.cuts::<L, S>()), o.cut(output));
            encoding.forward::<L, S, D>(x, tables, o, stream)
        }
    }
}

/// Whether softmaxes are in their short form, which there is for rows of whole blocks.
#[inline(always)]
fn is_short<L: Math>(pieces: &Pieces, form: Form) -> bool {
    L::HAS_SHORT && form != Form::Exact && pieces.whole()
}

/// x' of a patch, into scratch; tells whether it is approximate. `columns` are the statistics of its
/// columns, and the form of softmaxes; `e` is scratch for one row, or for a block for each.
#[inline(always)]
fn activate<L, T>(
    act: FusedAct,
    pieces: &Pieces,
    x: Grid<'_, T>,
    (columns, form): (&[T::Real], Form),
    y: &mut [T::Real],
    e: &mut [T::Real],
) -> bool
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    let (lanes, short) = (PhantomData::<L>, is_short::<L>(pieces, form));
    let mut far_only = false;
    if short && act == FusedAct::SoftmaxFeatures {
        let y = GridMut::dense(y, x.rows(), pieces.width);
        far_only = true;
        if !L::enter(NearRowSoftmax { x, y, sums: e, lanes }) {
            return true;
        }
    }
    let y = GridMut::dense(y, x.rows(), pieces.width);
    match act {
        FusedAct::Elementwise(act) => {
            L::enter(Values { act, pieces, x, y, lanes });
            return false;
        }
        FusedAct::SoftmaxFeatures => L::enter(RowSoftmax { pieces, x, y, e, far_only, lanes }),
        FusedAct::SoftmaxSequence if short && form == Form::Near => {
            L::enter(NearColumnSoftmax { x, columns, y, lanes });
        }
        FusedAct::SoftmaxSequence => {
            L::enter(ColumnSoftmax { pieces, x, columns, y, short, lanes });
        }
    }
    short
}

/// An elementwise activation that has short forms.
trait Short {
    fn value<L: Math, const NEAR: bool>(x: L) -> L;
    fn slope<L: Math, const NEAR: bool>(x: L) -> L;
}

struct Sigmoid;
struct Silu;

impl Short for Sigmoid {
    #[inline(always)]
    fn value<L: Math, const NEAR: bool>(x: L) -> L {
        x.sigmoid_for_store::<NEAR>()
    }
    #[inline(always)]
    fn slope<L: Math, const NEAR: bool>(x: L) -> L {
        x.sigmoid_and_slope_for_store::<NEAR>().1
    }
}

impl Short for Silu {
    #[inline(always)]
    fn value<L: Math, const NEAR: bool>(x: L) -> L {
        x.silu_for_store::<NEAR>()
    }
    #[inline(always)]
    fn slope<L: Math, const NEAR: bool>(x: L) -> L {
        x.silu_and_slope_for_store::<NEAR>().1
    }
}

/// Elements whose rounding on the way out is that of approximate results; see
/// [`Memory::nearest`].
struct Rounded<T>(PhantomData<T>);

impl<L: Memory<T>, T: Element<Real = L::Real>> Access<L> for Rounded<T> {
    const REGISTERS: bool = false;
    type Number = T;
    #[inline(always)]
    fn read(run: &[T], i: usize) -> L {
        L::read(run, i, Real::of(0.0))
    }
    #[inline(always)]
    fn write(block: L, run: &mut [T], i: usize, stream: bool) {
        block.nearest().write_exact(run, i, stream);
    }
    #[inline(always)]
    fn write_blocks<const K: usize>(blocks: [L; K], run: &mut [T], i: usize, stream: bool) {
        write_nearest::<L, T, K>(blocks, run, i, stream);
    }
}

/// Writes the blocks from `i` on of a row, which has to hold them, rounded as approximate results are.
#[inline(always)]
fn write_nearest<L, T, const K: usize>(blocks: [L; K], row: &mut [T], i: usize, stream: bool)
where
    T: Element<Real = L::Real>,
    L: Memory<T>,
{
    // A loop, as a closure would not be inlined.
    let mut packed = [blocks[0].nearest().pack_exact(); K];
    for k in 1..K {
        packed[k] = blocks[k].nearest().pack_exact();
    }
    L::write_packed(packed, row, i, stream);
}

/// Elements that go through the short form of an activation on the way in.
struct Through<T, G, const NEAR: bool>(PhantomData<(T, G)>);

impl<L, T, G, const NEAR: bool> Access<L> for Through<T, G, NEAR>
where
    T: Element<Real = L::Real>,
    G: Short,
    L: Math + Memory<T>,
{
    const REGISTERS: bool = false;
    type Number = T;
    #[inline(always)]
    fn read(run: &[T], i: usize) -> L {
        G::value::<L, NEAR>(L::read(run, i, Real::of(0.0)))
    }
    #[inline(always)]
    fn write(block: L, run: &mut [T], i: usize, stream: bool) {
        block.nearest().write_exact(run, i, stream);
    }
    #[inline(always)]
    fn write_blocks<const K: usize>(blocks: [L; K], run: &mut [T], i: usize, stream: bool) {
        write_nearest::<L, T, K>(blocks, run, i, stream);
    }
    #[inline(always)]
    fn note(run: &[T], i: usize, so_far: L) -> L {
        if NEAR { <L as Memory<T>>::note(run, i, so_far) } else { so_far }
    }
}

/// `o = encode(act(x))` for a patch, with the short form of the activation.
#[inline(always)]
fn through<E, L, T, G>(
    encoding: E,
    pieces: &Pieces,
    tables: &[Grid<'_, L::Real>; 2],
    x: &Grid<'_, T>,
    mut o: GridMut<'_, T>,
    stream: bool,
) where
    E: Encoding,
    T: Element<Real = L::Real>,
    G: Short,
    L: Math + Memory<T>,
{
    type Activated<'p, 'o, E, L, T, G, const NEAR: bool> =
        Encode<'p, 'o, E, L, Through<T, G, NEAR>, Rounded<T>, false>;
    let near = o.reborrow();
    let noted =
        L::enter(Activated::<_, L, T, G, true> { encoding, pieces, tables, x, o: near, stream });
    // Once more, if some arguments are beyond the short form. That is rare, and to look at all of them
    // first took 4 % longer.
    if L::is_far(noted, SHORT_LIMIT) {
        L::enter(Activated::<_, L, T, G, false> { encoding, pieces, tables, x, o, stream });
    }
}

/// [`Memory::note`] for a row.
#[inline(always)]
fn note_row<L, T>(row: &[T], mut noted: L) -> L
where
    T: Element<Real = L::Real>,
    L: Lanes + Memory<T>,
{
    let (blocks, rest) = row.as_chunks::<MAX_LANES>();
    for block in blocks {
        noted = L::note(block, 0, noted);
    }
    if rest.is_empty() { noted } else { L::note(rest, 0, noted) }
}

/// An elementwise activation of a patch.
struct Values<'p, 'y, L, T: Element> {
    act: Act,
    pieces: &'p Pieces,
    x: Grid<'p, T>,
    y: GridMut<'y, T::Real>,
    lanes: PhantomData<L>,
}

impl<L, T> Task for Values<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.x.rows();
        for i in 0..tokens {
            for j in 0..heads {
                self.x.prefetch_next::<L>(i, j);
                let (x, y) = (self.x.row(i, j), self.y.row(i, j));
                for piece in self.pieces.iter() {
                    let (act, x) = (self.act, piece.of_row(x));
                    specialized!(act => for k in (0..x.len()).step_by(L::N) {
                        act.value(L::read(x, k, Real::of(0.0))).set(y, piece.at + k);
                    });
                }
            }
        }
    }
}

/// The softmax of each row of a patch.
struct RowSoftmax<'p, 'y, L, T: Element> {
    pieces: &'p Pieces,
    x: Grid<'p, T>,
    y: GridMut<'y, T::Real>,
    e: &'y mut [T::Real],
    /// Whether only rows with elements that are not near 0 are wanted.
    far_only: bool,
    lanes: PhantomData<L>,
}

impl<L, T> Task for RowSoftmax<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.x.rows();
        for i in 0..tokens {
            for j in 0..heads {
                self.x.prefetch_next::<L>(i, j);
                let (x, y) = (self.x.row(i, j), self.y.row(i, j));
                if self.far_only && is_near_row::<L, T>(x) {
                    continue;
                }
                let inverse = L::splat(softmax::exp_row::<L, T>(x, self.e));
                let blocks = x.len().next_multiple_of(L::N);
                let from = self.e[..blocks].chunks_exact(L::N);
                if self.pieces.count == 1 {
                    for (e, y) in from.zip(y[..blocks].chunks_exact_mut(L::N)) {
                        L::get(e, 0).mul(inverse).set(y, 0);
                    }
                    continue;
                }
                // The blocks of the pieces are other ones than those of the row.
                for i in (0..blocks).step_by(L::N) {
                    let e = L::get(self.e, i).mul(inverse);
                    e.write(self.e, i, false);
                }
                self.pieces.gather::<L>(self.e, y);
            }
        }
    }
}

/// Whether a row's softmax needs no maximum.
#[inline(always)]
fn is_near_row<L, T>(x: &[T]) -> bool
where
    T: Element<Real = L::Real>,
    L: Lanes + Memory<T>,
{
    !L::is_far(note_row::<L, T>(x, L::splat(Real::of(0.0))), NEAR)
}

/// The softmax of each row of a patch, by the short form and without a maximum. Tells whether some
/// rows have elements that are not near 0, and are to be done again.
struct NearRowSoftmax<'p, 'y, L, T: Element> {
    x: Grid<'p, T>,
    y: GridMut<'y, T::Real>,
    /// Room for a block for each row.
    sums: &'y mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T> Task for NearRowSoftmax<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(mut self) -> bool {
        let [tokens, heads] = self.x.rows();
        let zero = L::splat(Real::of(0.0));
        let mut noted = zero;
        for i in 0..tokens {
            for j in 0..heads {
                let mut sum = zero;
                for (x, y) in self.x.blocks(i, j).iter().zip(self.y.blocks(i, j)) {
                    self.x.prefetch_block::<L>(x);
                    let e = L::read_whole(x, 0).exp_for_store::<true>();
                    noted = L::note(x, 0, noted);
                    e.set(y, 0);
                    sum = sum.add(e);
                }
                sum.set(self.sums, (i * heads + j) * L::N);
            }
        }
        // Apart, so that no row waits for its own sum.
        for i in 0..tokens {
            for j in 0..heads {
                let sum = L::get(self.sums, (i * heads + j) * L::N).reduce_add();
                let inverse = L::splat(Real::of(1.0 / sum.to_f64()));
                for y in self.y.blocks(i, j) {
                    L::get(y, 0).mul(inverse).set(y, 0);
                }
            }
        }
        L::is_far(noted, NEAR)
    }
}

/// A softmax over the sequence by the short form, from the reciprocal sums of the columns, all of
/// which are near 0.
struct NearColumnSoftmax<'p, 'y, L, T: Element> {
    x: Grid<'p, T>,
    columns: &'p [T::Real],
    y: GridMut<'y, T::Real>,
    lanes: PhantomData<L>,
}

impl<L, T> Task for NearColumnSoftmax<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.x.rows();
        let d = self.x.len();
        for i in 0..tokens {
            for j in 0..heads {
                let inverse = &self.columns[(2 * j + 1) * d..][..d];
                let (x, y) = (self.x.blocks(i, j), self.y.blocks(i, j));
                let blocks = x.iter().zip(inverse.as_chunks::<MAX_LANES>().0).zip(y);
                for ((x, inverse), y) in blocks {
                    self.x.prefetch_block::<L>(x);
                    let e = L::read_whole(x, 0).exp_for_store::<true>();
                    e.mul(L::get(inverse, 0)).set(y, 0);
                }
            }
        }
    }
}

/// A softmax over the sequence, from the maxima and reciprocal sums of the columns.
struct ColumnSoftmax<'p, 'y, L, T: Element> {
    pieces: &'p Pieces,
    x: Grid<'p, T>,
    columns: &'p [T::Real],
    y: GridMut<'y, T::Real>,
    short: bool,
    lanes: PhantomData<L>,
}

impl<L, T> Task for ColumnSoftmax<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.x.rows();
        let width = self.pieces.width;
        for i in 0..tokens {
            for j in 0..heads {
                self.x.prefetch_next::<L>(i, j);
                let (x, y) = (self.x.row(i, j), self.y.row(i, j));
                let (max, inverse) = self.columns[2 * width * j..][..2 * width].split_at(width);
                for piece in self.pieces.iter() {
                    let x = piece.of_row(x);
                    for i in (0..x.len()).step_by(L::N) {
                        let at = piece.at + i;
                        let max: L = L::get(max, at);
                        let x = L::read(x, i, Real::of(0.0)).sub(max);
                        let mut e = x.exp();
                        if self.short {
                            // As the sums are: exact for columns that are not near.
                            let far = L::splat(Real::of(0.0)).lt(max.abs());
                            e = L::select(far, e, x.exp_for_store::<false>());
                        }
                        e.mul(L::get(inverse, at)).set(y, at);
                    }
                }
            }
        }
    }
}

impl Piece {
    /// The elements of a row that are in this piece.
    #[inline(always)]
    fn of_row<T>(self, row: &[T]) -> &[T] {
        &row[self.first..self.first + self.len]
    }
}

impl Pieces {
    /// Brings a row in index order into scratch.
    #[inline(always)]
    fn gather<L>(&self, row: &[L::Real], to: &mut [L::Real])
    where
        L: Lanes + Memory<<L as Lanes>::Real>,
    {
        for piece in self.iter() {
            let row = piece.of_row(row);
            for i in (0..row.len()).step_by(L::N) {
                L::read(row, i, Real::of(0.0)).set(to, piece.at + i);
            }
        }
    }

    /// The sum of products of two rows of scratch: lanes within a chunk, f64 across chunks.
    #[inline(always)]
    fn dot<L: Lanes>(&self, a: &[L::Real], b: &[L::Real]) -> L::Real {
        let mut total = 0.0;
        for piece in self.iter() {
            let end = piece.at + piece.len.next_multiple_of(L::N);
            let (a, b) = (&a[piece.at..end], &b[piece.at..end]);
            for (a, b) in a.chunks(64 * L::N).zip(b.chunks(64 * L::N)) {
                let mut sum = L::splat(Real::of(0.0));
                for (a, b) in a.chunks_exact(L::N).zip(b.chunks_exact(L::N)) {
                    sum = L::get(a, 0).mul_add(L::get(b, 0), sum);
                }
                total += sum.reduce_add().to_f64();
            }
        }
        Real::of(total)
    }
}

/// The statistics of some columns, for all heads that they are of; see [`Columns`].
struct ColumnStatistics<'k, 'r, R> {
    part: Part<'r, 1, 0>,
    pieces: &'k Pieces,
    statistics: &'k mut [R],
    exact: bool,
    /// Set where columns are not near.
    far: &'k AtomicBool,
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
        let ([x], rows, width) = (&run.inputs, run.rows, self.pieces.width);
        let columns = x.len();
        let heads = self.statistics.chunks_exact_mut(2 * width);
        let d = columns / heads.len().max(1);
        let short = L::HAS_SHORT && !self.exact && self.pieces.whole();
        let mut sums = Scratch::<R>::zeros(columns);
        if short {
            let lanes = PhantomData::<L>;
            let far = L::enter(NearColumnSums { x, rows, sums: &mut sums, lanes });
            if !far {
                let one = L::splat(Real::of(1.0));
                for (head, sums) in heads.zip(sums.chunks_exact(d)) {
                    for k in (0..d).step_by(L::N) {
                        one.div(L::get(sums, k)).set(head, width + k);
                    }
                }
                return;
            }
        }
        self.far.store(true, Ordering::Relaxed);
        let blocks = columns.next_multiple_of(L::N);
        let (mut max, mut inverse) = (Scratch::<R>::new(columns), Scratch::<R>::new(columns));
        let (max, inverse) = (&mut max[..blocks], &mut inverse[..blocks]);
        softmax::column_statistics::<L, T>(x, 0..rows, false, max, inverse);
        for k in (0..columns).step_by(L::N) {
            if short {
                // Near columns are what they are among near ones.
                let (mut largest, zero) = (L::splat(Real::of(0.0)), Real::of(0.0));
                for r in 0..rows {
                    largest = largest.max_nan(L::read(x.row(r), k, zero).abs());
                }
                let near = largest.le(L::splat(Real::of(f64::from(NEAR))));
                let one = L::splat(Real::of(1.0));
                // 0 stands for near: a maximum of 0 is replaced by one that subtracts nothing.
                let (zero, tiny) =
                    (L::splat(zero), L::splat(Real::of(f64::from(f32::MIN_POSITIVE))));
                let found: L = L::get(max, k);
                let found = L::select(zero.lt(found.abs()), found, tiny);
                L::select(near, zero, found).set(max, k);
                let sum = one.div(L::get(&sums, k));
                L::select(near, sum, L::get(inverse, k)).set(inverse, k);
            }
            L::get(max, k).write(max, k, false);
            L::get(inverse, k).write(inverse, k, false);
        }
        for (i, head) in heads.enumerate() {
            let (to_max, to_inverse) = head.split_at_mut(width);
            self.pieces.gather::<L>(&max[i * d..(i + 1) * d], to_max);
            self.pieces.gather::<L>(&inverse[i * d..(i + 1) * d], to_inverse);
        }
    }
}

/// Rows whose exponentials are added to the sums of columns at once.
const ROWS: usize = 4;
/// Rows whose exponentials are summed before these sums are added up.
const CHUNK_ROWS: usize = 64 * ROWS;

/// The sums of the columns' exponentials, by the short form and without a maximum. Tells whether
/// some elements are not near 0.
struct NearColumnSums<'k, 'r, L, T: Element> {
    x: &'k Run<'r, T>,
    rows: usize,
    /// Zeros so far.
    sums: &'k mut [T::Real],
    lanes: PhantomData<L>,
}

impl<L, T> Task for NearColumnSums<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let Self { x, rows, sums, .. } = self;
        let mut noted = L::splat(Real::of(0.0));
        let mut chunk = Scratch::<T::Real>::new(sums.len());
        let (sums, _) = sums.as_chunks_mut::<MAX_LANES>();
        let (chunk, _) = chunk.as_chunks_mut::<MAX_LANES>();
        let ahead = x.ahead();
        for start in (0..rows).step_by(CHUNK_ROWS) {
            let end = rows.min(start + CHUNK_ROWS);
            chunk.as_flattened_mut().fill(Real::of(0.0));
            let mut r = start;
            while r + ROWS <= end {
                let (a, b) = (x.row(r).as_chunks().0, x.row(r + 1).as_chunks().0);
                let (c, d) = (x.row(r + 2).as_chunks().0, x.row(r + 3).as_chunks().0);
                let rows = a.iter().zip(b).zip(c.iter().zip(d));
                for (((a, b), (c, d)), sum) in rows.zip(&mut *chunk) {
                    let mut e = L::get(sum, 0);
                    let rows: [&[T; MAX_LANES]; ROWS] = [a, b, c, d];
                    for x in rows {
                        L::prefetch(x.as_ptr().wrapping_byte_offset(ahead));
                        noted = L::note(x, 0, noted);
                        e = e.add(L::read_whole(x, 0).exp_for_store::<true>());
                    }
                    e.set(sum, 0);
                }
                r += ROWS;
            }
            for r in r..end {
                for (x, sum) in x.row(r).as_chunks::<MAX_LANES>().0.iter().zip(&mut *chunk) {
                    noted = L::note(x, 0, noted);
                    L::get(sum, 0).add(L::read_whole(x, 0).exp_for_store::<true>()).set(sum, 0);
                }
            }
            for (sum, chunk) in sums.iter_mut().zip(&*chunk) {
                L::get(sum, 0).add(L::get(chunk, 0)).set(sum, 0);
            }
        }
        L::is_far(noted, NEAR)
    }
}

struct Forward<'k, 'a, 'r, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    part: Part<'r, 1, 1>,
    columns: &'k Columns<R>,
    stream: bool,
}

struct ForwardPatches<'k, 'a, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    columns: &'k Columns<R>,
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
        let plain = walk.plan.act == FusedAct::default();
        let [y, e] = walk.plan.scratch(!plain);
        let mut patches = ForwardPatches { walk, columns, y, e, stream };
        walk.visit::<L, T, _, 1, 1>(&mut self.part, &mut patches);
    }
}

impl<E: Encoding, R: Real> Visitor<R, 1, 1> for ForwardPatches<'_, '_, E, R> {
    #[inline(always)]
    fn patch<L, T>(&mut self, place: Place, part: &mut Part<'_, 1, 1>, tables: &[Grid<'_, R>; 2])
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let patch = &place.patch;
        let x = part.input::<T>(0, patch);
        let o = part.output::<T>(0, patch);
        let Walk { plan, encoding, .. } = self.walk;
        let (pieces, stream) = (&plan.pieces, self.stream && o.streams(encoding.output_cuts()));
        if plan.act == FusedAct::default() {
            type Plain<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Elements<T>, Elements<T>, false>;
            L::enter(Plain::<_, L, T> { encoding, pieces, tables, x: &x, o, stream });
            return;
        }
        assert!(patch.entries == 1); // what follows knows of one only
        if L::HAS_SHORT {
            match plan.act {
                FusedAct::Elementwise(Act::Sigmoid) => {
                    return through::<_, L, T, Sigmoid>(encoding, pieces, tables, &x, o, stream);
                }
                FusedAct::Elementwise(Act::Silu) => {
                    return through::<_, L, T, Silu>(encoding, pieces, tables, &x, o, stream);
                }
                _ => {}
            }
        }
        let columns = self.walk.columns(&self.columns.statistics, patch, 2 * pieces.width);
        let columns = (columns, self.columns.form);
        let short = activate::<L, T>(plan.act, pieces, x, columns, &mut self.y, &mut self.e);
        let x = &Grid::dense(&self.y, patch.rows, pieces.width);
        if short {
            type Short<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Registers, Rounded<T>, false>;
            L::enter(Short::<_, L, T> { encoding, pieces, tables, x, o, stream });
            return;
        }
        type Activated<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Registers, Elements<T>, false>;
        L::enter(Activated::<_, L, T> { encoding, pieces, tables, x, o, stream });
    }

    #[inline(always)]
    fn entries<L: Lanes>(&self) -> usize {
        let plan = self.walk.plan;
        if plan.act == FusedAct::default() { turns::<L>(plan.batch) } else { 1 }
    }
}

/// For the backward of a softmax over the sequence: sum over tokens of x' * dx', for each column.
struct Dots<'k, 'a, 'r, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    part: Part<'r, 2, 0>,
    columns: &'k Columns<R>,
    sums: &'k mut [R],
}

struct DotPatches<'k, 'a, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    columns: &'k Columns<R>,
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
        let ([y, e], [g, _]) = (walk.plan.scratch(true), walk.plan.scratch(true));
        let mut patches = DotPatches { walk, columns, sums, y, g, e };
        walk.visit::<L, T, _, 2, 0>(&mut self.part, &mut patches);
    }
}

impl<E: Encoding, R: Real> Visitor<R, 2, 0> for DotPatches<'_, '_, E, R> {
    #[inline(always)]
    fn patch<L, T>(&mut self, place: Place, part: &mut Part<'_, 2, 0>, tables: &[Grid<'_, R>; 2])
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let patch = &place.patch;
        let (x, grad) = (part.input::<T>(0, patch), part.input::<T>(1, patch));
        let Walk { plan, encoding, .. } = self.walk;
        let (pieces, width, stream) = (&plan.pieces, plan.pieces.width, false);
        let columns = self.walk.columns(&self.columns.statistics, patch, 2 * width);
        let columns = (columns, self.columns.form);
        activate::<L, T>(plan.act, pieces, x, columns, &mut self.y, &mut self.e);
        let o = GridMut::dense(&mut self.g, patch.rows, width);
        type Back<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Elements<T>, Registers, true>;
        L::enter(Back::<_, L, T> { encoding, pieces, tables, x: &grad, o, stream });
        let [_, batch, head] = patch.first;
        let at = (batch * plan.heads + head) * width;
        let row = patch.rows[1] * width;
        let sums = &mut self.sums[at..at + row];
        for (y, g) in self.y.chunks_exact(row).zip(self.g.chunks_exact(row)).take(patch.rows[0]) {
            for i in (0..row).step_by(L::N) {
                L::get(y, i).mul_add(L::get(g, i), L::get(sums, i)).set(sums, i);
            }
        }
    }
}

struct Backward<'k, 'a, 'r, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    part: Part<'r, 2, 1>,
    columns: &'k Columns<R>,
    dots: &'k [R],
    /// Sums of the angles' gradients, if asked for.
    sums: Option<&'k mut [R]>,
    stream: bool,
}

struct BackwardPatches<'k, 'a, E, R: Real> {
    walk: Walk<'k, 'a, E, R>,
    columns: &'k Columns<R>,
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
        let tile = plan.tile[0] * plan.tile[1] * plan.angle_sums;
        let angles = Scratch::zeros(if sums.is_some() { tile } else { 0 });
        let plain = plan.act == FusedAct::default() && sums.is_none();
        let ([y, e], [g, _]) = (plan.scratch(!plain), plan.scratch(!plain));
        let mut patches = BackwardPatches { walk, columns, dots, sums, angles, y, g, e, stream };
        walk.visit::<L, T, _, 2, 1>(&mut self.part, &mut patches);
    }
}

impl<E: Encoding, R: Real> Visitor<R, 2, 1> for BackwardPatches<'_, '_, E, R> {
    #[inline(always)]
    fn patch<L, T>(&mut self, place: Place, part: &mut Part<'_, 2, 1>, tables: &[Grid<'_, R>; 2])
    where
        T: Element<Real = R>,
        L: Math + Lanes<Real = R> + Memory<T> + Memory<R>,
    {
        let patch = &place.patch;
        let (x, grad) = (part.input::<T>(0, patch), part.input::<T>(1, patch));
        let dx = part.output::<T>(0, patch);
        let Walk { plan, encoding, .. } = self.walk;
        let stream = self.stream && dx.streams(plan.pieces.cuts::<L, Elements<T>>());
        let (pieces, width, lanes) = (&plan.pieces, plan.pieces.width, PhantomData::<L>);
        if plan.act == FusedAct::default() && self.sums.is_none() {
            type Plain<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Elements<T>, Elements<T>, true>;
            L::enter(Plain::<_, L, T> { encoding, pieces, tables, x: &grad, o: dx, stream });
            return;
        }
        assert!(patch.entries == 1); // as above
        let o = GridMut::dense(&mut self.g, patch.rows, width);
        type Back<'p, 'o, E, L, T> = Encode<'p, 'o, E, L, Elements<T>, Registers, true>;
        L::enter(Back::<_, L, T> { encoding, pieces, tables, x: &grad, o, stream: false });
        let statistics = &self.columns.statistics;
        let columns = (self.walk.columns(statistics, patch, 2 * width), self.columns.form);
        let g = Grid::dense(&self.g, patch.rows, width);
        if plan.act == FusedAct::SoftmaxFeatures && is_short::<L>(pieces, self.columns.form) {
            let (y, sums) = (&mut self.y, &mut self.e);
            pull_back_rows::<L, T>(pieces, x, g, y, sums, dx, stream);
            return;
        }
        if self.sums.is_some() || !matches!(plan.act, FusedAct::Elementwise(_)) {
            activate::<L, T>(plan.act, pieces, x, columns, &mut self.y, &mut self.e);
        }
        let y = Grid::dense(&self.y, patch.rows, width);
        if self.sums.is_some() {
            let at = place.slot * plan.tile[1] * plan.angle_sums;
            let (sums, len) = (&mut self.angles[at..], plan.angle_sums);
            L::enter(AngleGradients { encoding, pieces, tables, y, g, grad, sums, len, lanes });
        }
        if dx.len() == 0 {
            return;
        }
        match plan.act {
            FusedAct::Elementwise(Act::Sigmoid) if L::HAS_SHORT => {
                pull_back_short::<L, T, Sigmoid>(pieces, x, g, dx, stream);
            }
            FusedAct::Elementwise(Act::Silu) if L::HAS_SHORT => {
                pull_back_short::<L, T, Silu>(pieces, x, g, dx, stream);
            }
            FusedAct::Elementwise(act) => {
                L::enter(PullBack { act, pieces, x, g, dx, stream, lanes });
            }
            _ => {
                let columns = self.walk.columns(self.dots, patch, width);
                L::enter(PullBackSoftmax::<L, T> { pieces, y, g, columns, dx, stream });
            }
        }
    }

    #[inline(always)]
    fn entries<L: Lanes>(&self) -> usize {
        let plan = self.walk.plan;
        let plain = plan.act == FusedAct::default() && self.sums.is_none();
        if plain { turns::<L>(plan.batch) } else { 1 }
    }

    #[inline(always)]
    fn tokens_done(&mut self, place: Place) {
        let Some(sums) = &mut self.sums else { return };
        let (plan, encoding) = (self.walk.plan, self.walk.encoding);
        let split = &plan.angles.split;
        let Patch { first: [token, batch, head], rows, .. } = place.patch;
        for i in 0..rows[0] {
            let token = self.walk.first + token + i;
            for j in 0..rows[1] {
                let at = ((place.slot + i) * plan.tile[1] + j) * plan.angle_sums;
                let angles = &mut self.angles[at..at + plan.angle_sums];
                let row = if split.theta_heads == 1 { 0 } else { head + j };
                let sums = &mut sums[row * split.count..(row + 1) * split.count];
                let step = encoding.angle_step();
                plan.angles.add_gradients([batch, token], angles, step, sums);
                angles.fill(R::of(0.0));
            }
        }
    }
}

/// Adds the gradients of a patch's angles to the sums of its tile.
struct AngleGradients<'p, 's, E, L: Lanes, T: Element> {
    encoding: E,
    pieces: &'p Pieces,
    tables: &'p [Grid<'p, L::Real>; 2],
    y: Grid<'p, L::Real>,
    g: Grid<'p, L::Real>,
    grad: Grid<'p, T>,
    sums: &'s mut [L::Real],
    /// Numbers for each head in the sums.
    len: usize,
    lanes: PhantomData<L>,
}

impl<E, L, T> Task for AngleGradients<'_, '_, E, L, T>
where
    E: Encoding,
    T: Element<Real = L::Real>,
    L: Math + Memory<T> + Memory<<L as Lanes>::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let [tokens, heads] = self.grad.rows();
        for i in 0..tokens {
            for j in 0..heads {
                let (y, g) = (self.y.row(i, j), self.g.row(i, j));
                let grad = self.grad.row(i, j);
                let table = (self.tables[0].row(i, j), self.tables[1].row(i, j));
                let at = (i * heads + j) * self.len;
                let sums = &mut self.sums[at..at + self.len];
                let y_and_g = (y, g, self.pieces.starts);
                self.encoding.angle_gradients::<L, T>(y_and_g, grad, table, sums);
            }
        }
    }
}

/// `dx = dx' * f'(x)` for a patch.
struct PullBack<'p, 'o, L, T: Element> {
    act: Act,
    pieces: &'p Pieces,
    x: Grid<'p, T>,
    g: Grid<'p, T::Real>,
    dx: GridMut<'o, T>,
    stream: bool,
    lanes: PhantomData<L>,
}

impl<L, T> Task for PullBack<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.x.rows();
        for i in 0..tokens {
            for j in 0..heads {
                self.x.prefetch_next::<L>(i, j);
                let (x, g, dx) = (self.x.row(i, j), self.g.row(i, j), self.dx.row(i, j));
                for piece in self.pieces.iter() {
                    let (act, x) = (self.act, piece.of_row(x));
                    let dx = &mut dx[piece.first..piece.first + piece.len];
                    specialized!(act => for k in (0..x.len()).step_by(L::N) {
                        let (x, g) = (L::read(x, k, Real::of(0.0)), L::get(g, piece.at + k));
                        act.pull_back(x, g).write(dx, k, self.stream);
                    });
                }
            }
        }
    }
}

/// `dx = dx' * f'(x)` for a patch, with the short form of the slope.
#[inline(always)]
fn pull_back_short<L, T, G>(
    pieces: &Pieces,
    x: Grid<'_, T>,
    g: Grid<'_, T::Real>,
    mut dx: GridMut<'_, T>,
    stream: bool,
) where
    T: Element,
    G: Short,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    let lanes = PhantomData::<(L, G)>;
    // The choice is made outside of the loop, which then needs no more registers than there are.
    let far = if L::MANY_REGISTERS && stream && pieces.whole() && dx.has_lines() {
        L::enter(PullBackShort::<_, _, _, true, true, 2> { pieces, x, g, dx: &mut dx, lanes })
    } else if stream && pieces.whole() && dx.is_aligned() {
        L::enter(PullBackShort::<_, _, _, true, true, 1> { pieces, x, g, dx: &mut dx, lanes })
    } else {
        L::enter(PullBackShort::<_, _, _, true, false, 1> { pieces, x, g, dx: &mut dx, lanes })
    };
    if far {
        L::enter(PullBackShort::<_, _, _, false, false, 1> { pieces, x, g, dx: &mut dx, lanes });
    }
}

/// [`pull_back_short`]; tells whether there are arguments that are not near, and only right without
/// them if `NEAR`. With `STREAM`, rows are whole and aligned, in groups of `K` blocks.
struct PullBackShort<'p, 'o, L, G, T: Element, const NEAR: bool, const STREAM: bool, const K: usize>
{
    pieces: &'p Pieces,
    x: Grid<'p, T>,
    g: Grid<'p, T::Real>,
    dx: &'p mut GridMut<'o, T>,
    lanes: PhantomData<(L, G)>,
}

impl<L, G, T, const NEAR: bool, const STREAM: bool, const K: usize> Task
    for PullBackShort<'_, '_, L, G, T, NEAR, STREAM, K>
where
    T: Element,
    G: Short,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(self) -> bool {
        let [tokens, heads] = self.x.rows();
        let zero = Real::of(0.0);
        let mut noted = L::splat(zero);
        for i in 0..tokens {
            for j in 0..heads {
                if STREAM {
                    let groups = self.x.groups::<K>(i, j).iter().zip(self.g.groups::<K>(i, j));
                    for ((x, g), dx) in groups.zip(self.dx.groups::<true, K>(i, j)) {
                        self.x.prefetch_block::<L>(&x[0]);
                        let mut blocks = [L::splat(zero); K];
                        for k in 0..K {
                            noted = L::note(&x[k], 0, noted);
                            let slope = G::slope::<L, NEAR>(L::read_whole(&x[k], 0));
                            blocks[k] = L::get(&g[k], 0).mul(slope);
                        }
                        write_nearest::<L, T, K>(blocks, dx.as_flattened_mut(), 0, true);
                    }
                    continue;
                }
                let (x, g, dx) = (self.x.row(i, j), self.g.row(i, j), self.dx.row(i, j));
                for piece in self.pieces.iter() {
                    let (x, x_end) = piece.of_row(x).as_chunks::<MAX_LANES>();
                    let dx = &mut dx[piece.first..piece.first + piece.len];
                    let (dx, dx_end) = dx.as_chunks_mut::<MAX_LANES>();
                    let g = g[piece.at..].as_chunks::<MAX_LANES>().0;
                    for ((x, g), dx) in x.iter().zip(g).zip(dx) {
                        self.x.prefetch_block::<L>(x);
                        noted = L::note(x, 0, noted);
                        let slope = G::slope::<L, NEAR>(L::read_whole(x, 0));
                        L::get(g, 0).mul(slope).nearest().write_exact_whole(dx, 0, false);
                    }
                    if !x_end.is_empty() {
                        let slope = G::slope::<L, false>(L::read(x_end, 0, zero));
                        let g = L::get(&g[x.len()], 0);
                        g.mul(slope).nearest().write_exact(dx_end, 0, false);
                    }
                }
            }
        }
        L::is_far(noted, SHORT_LIMIT)
    }
}

/// `dx = x' * (dx' - sum of x' * dx')` for a patch, for softmaxes of rows in their short form.
/// `y` is scratch for all rows, `sums` has room for two blocks for each.
#[inline(always)]
fn pull_back_rows<L, T>(
    pieces: &Pieces,
    x: Grid<'_, T>,
    g: Grid<'_, T::Real>,
    y: &mut [T::Real],
    sums: &mut [T::Real],
    mut dx: GridMut<'_, T>,
    stream: bool,
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    let lanes = PhantomData::<L>;
    let rows = x.rows();
    let to = GridMut::dense(y, rows, pieces.width);
    let far = if L::MANY_REGISTERS && stream && dx.has_lines() {
        L::enter(PullBackNearRows::<_, _, true, 2> { x, g, y: to, sums, dx: &mut dx, lanes })
    } else if stream && dx.is_aligned() {
        L::enter(PullBackNearRows::<_, _, true, 1> { x, g, y: to, sums, dx: &mut dx, lanes })
    } else {
        L::enter(PullBackNearRows::<_, _, false, 1> { x, g, y: to, sums, dx: &mut dx, lanes })
    };
    if !far {
        return;
    }
    for i in 0..rows[0] {
        for j in 0..rows[1] {
            let x = x.row(i, j);
            if is_near_row::<L, T>(x) {
                continue;
            }
            let (g, dx) = (g.row(i, j), dx.row(i, j));
            let inverse = L::splat(softmax::exp_row::<L, T>(x, y));
            for k in (0..x.len()).step_by(L::N) {
                L::get(y, k).mul(inverse).set(y, k);
            }
            let dot = L::splat(pieces.dot::<L>(&y[..x.len()], g));
            for k in (0..x.len()).step_by(L::N) {
                L::get(y, k).mul(L::get(g, k).sub(dot)).write(dx, k, stream);
            }
        }
    }
}

/// [`pull_back_rows`] where all elements are near 0; tells whether some are not. With `STREAM`, rows
/// are aligned, in groups of `K` blocks.
struct PullBackNearRows<'p, 'o, 'y, L, T: Element, const STREAM: bool, const K: usize> {
    x: Grid<'p, T>,
    g: Grid<'p, T::Real>,
    y: GridMut<'y, T::Real>,
    sums: &'y mut [T::Real],
    dx: &'p mut GridMut<'o, T>,
    lanes: PhantomData<L>,
}

impl<L, T, const STREAM: bool, const K: usize> Task
    for PullBackNearRows<'_, '_, '_, L, T, STREAM, K>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = bool;
    #[inline(always)]
    fn run(mut self) -> bool {
        let [tokens, heads] = self.x.rows();
        let zero = L::splat(Real::of(0.0));
        let mut noted = zero;
        for i in 0..tokens {
            for j in 0..heads {
                let (mut sum, mut dot) = (zero, zero);
                let blocks = self.x.blocks(i, j).iter().zip(self.g.blocks(i, j));
                for ((x, g), y) in blocks.zip(self.y.blocks(i, j)) {
                    self.x.prefetch_block::<L>(x);
                    let e = L::read_whole(x, 0).exp_for_store::<true>();
                    noted = L::note(x, 0, noted);
                    e.set(y, 0);
                    sum = sum.add(e);
                    dot = e.mul_add(L::get(g, 0), dot);
                }
                let at = 2 * (i * heads + j) * L::N;
                sum.set(self.sums, at);
                dot.set(self.sums, at + L::N);
            }
        }
        // Apart, so that no row waits for its own sums.
        for i in 0..tokens {
            for j in 0..heads {
                let at = 2 * (i * heads + j) * L::N;
                let inverse = 1.0 / L::get(self.sums, at).reduce_add().to_f64();
                let dot = L::get(self.sums, at + L::N).reduce_add().to_f64() * inverse;
                let (inverse, dot) = (L::splat(Real::of(inverse)), L::splat(Real::of(dot)));
                let (y, g) = (self.y.groups::<false, K>(i, j), self.g.groups::<K>(i, j));
                for ((y, g), dx) in y.iter().zip(g).zip(self.dx.groups::<STREAM, K>(i, j)) {
                    let mut blocks = [zero; K];
                    for k in 0..K {
                        let difference = L::get(&g[k], 0).sub(dot);
                        blocks[k] = L::get(&y[k], 0).mul(inverse).mul(difference);
                    }
                    write_nearest::<L, T, K>(blocks, dx.as_flattened_mut(), 0, STREAM);
                }
            }
        }
        L::is_far(noted, NEAR)
    }
}

/// `dx = x' * (dx' - sum of x' * dx')` for a patch; with the sums of `columns`, if there are some,
/// else with those of rows.
struct PullBackSoftmax<'p, 'o, L: Lanes, T: Element> {
    pieces: &'p Pieces,
    y: Grid<'p, L::Real>,
    g: Grid<'p, L::Real>,
    columns: &'p [L::Real],
    dx: GridMut<'o, T>,
    stream: bool,
}

impl<L, T> Task for PullBackSoftmax<'_, '_, L, T>
where
    T: Element<Real = L::Real>,
    L: Math + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(mut self) {
        let [tokens, heads] = self.y.rows();
        let width = self.pieces.width;
        // Loops that only stream, where they can: see [`GridMut::aligned_blocks`].
        let aligned = self.stream && self.pieces.whole() && self.dx.is_aligned();
        if L::N == MAX_LANES && aligned && !self.columns.is_empty() {
            let (dots, _) = self.columns.as_chunks::<MAX_LANES>();
            for i in 0..tokens {
                for j in 0..heads {
                    let dots = &dots[j * width / MAX_LANES..][..width / MAX_LANES];
                    let blocks = self.y.blocks(i, j).iter().zip(self.g.blocks(i, j)).zip(dots);
                    for (((y, g), dot), dx) in blocks.zip(self.dx.aligned_blocks(i, j)) {
                        let difference = L::get(g, 0).sub(L::get(dot, 0));
                        L::get(y, 0).mul(difference).write_whole(dx, 0, true);
                    }
                }
            }
            return;
        }
        for i in 0..tokens {
            for j in 0..heads {
                let (y, g, dx) = (self.y.row(i, j), self.g.row(i, j), self.dx.row(i, j));
                let rows = self.columns.is_empty();
                let dots = if rows { y } else { &self.columns[j * width..][..width] };
                let dot = if rows { self.pieces.dot::<L>(y, g) } else { Real::of(0.0) };
                for piece in self.pieces.iter() {
                    let dx = &mut dx[piece.first..piece.first + piece.len];
                    for k in (0..piece.len).step_by(L::N) {
                        let at = piece.at + k;
                        let dot = if rows { L::splat(dot) } else { L::get(dots, at) };
                        L::get(y, at).mul(L::get(g, at).sub(dot)).write(dx, k, self.stream);
                    }
                }
            }
        }
    }
}
