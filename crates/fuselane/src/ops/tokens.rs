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

mod activation;
mod backward;
mod forward;
mod pieces;
mod statistics;
mod walk;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::atomic::AtomicBool;

use crate::dtype::{DType, Element, Real, with_real};
use crate::error::{Error, Result};
use crate::ops::act::Act;
use crate::ops::angles::{self, AnglePlan, AngleSplit, Angles, Placement, padded};
use crate::plan::{self, Pairs};
use crate::rows::{Grid, GridMut, Named, Operands, Rows, contiguous_rows, disjoint};
use crate::scratch::Scratch;
use crate::simd::{Access, Arithmetic, Lanes, MAX_LANES, Math, Memory};
use crate::view::{View, ViewMut};
use crate::{Isa, isa};
use backward::{Backward, Dots};
use forward::Forward;
use statistics::ColumnStatistics;
use walk::Walk;

pub(crate) use pieces::Pieces;

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

/// How rows are encoded by their angles, whose cosines and sines come from [`angles::Tables`]. Rows are
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
    /// The same, for columns that are all near 0 (see [`crate::ops::softmax::NEAR`]), so that nothing is subtracted.
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
