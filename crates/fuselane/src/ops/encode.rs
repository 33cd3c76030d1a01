//! What `rotate` and `cosine` share: an activation, then an encoding by the token's angles.
//!
//! ```text
//! x' = act(x)                    elementwise, or softmax over features, or over the sequence
//! o  = encode(x', A)             the operator's own formula, row by row
//! dx' = encode^T(do, A),  dx = act backward,  dtheta = sum of coordinate * dA
//! ```

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::act::Act;
use super::angles::{self, AngleSplit, Angles, Placement};
use super::double;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::exec::operands::{Named, Operands, check_shape, contiguous_rows, disjoint, wrong_shape};
use crate::exec::parallel::current_threads;
use crate::exec::rows::Rows;
use crate::exec::scratch::Scratch;
use crate::isa;
use crate::kernels::encode::{
    Backward, ColumnStatistics, Columns, Dots, Encoding, Forward, Passes, Plan, Walk,
};
use crate::kernels::lanes::Lane;
use crate::plan;
use crate::reference::{self, angles::Input};
use crate::simd::dispatch;
use crate::view::{View, ViewMut};

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

/// The tensors of a backward call of `rotate` or `cosine`. Outputs that are `None` are not computed.
pub struct EncodingBackward<'a> {
    /// What the forward got; needed where there is an activation, and for `dtheta`.
    pub x: Option<View<'a>>,
    /// The gradient that arrives at the output, in its shape.
    pub grad: View<'a>,
    /// The frequencies or the table that the forward used.
    pub angles: Angles<'a>,
    /// The gradient of x.
    pub dx: Option<ViewMut<'a>>,
    /// The gradient of theta, in theta's shape.
    pub dtheta: Option<ViewMut<'a>>,
}

impl<'a> EncodingBackward<'a> {
    /// A view with the dimensions of x, and its name: x where there is one, else dx, whose shape is the
    /// same. Without either the call asks for nothing.
    fn like(&self) -> Result<Option<Named<View<'a>>>> {
        Ok(match (&self.x, &self.dx) {
            (Some(x), _) => Some(("x", *x)),
            (None, Some(dx)) => Some(("dx", View::dense_shape(dx.dtype(), dx.shape())?)),
            (None, None) => None,
        })
    }
}

/// Options that `rotate` and `cosine` have in common.
pub(crate) struct Common<'a> {
    pub(crate) act: FusedAct,
    pub(crate) layout: TokenLayout,
    pub(crate) placement: Placement<'a>,
}

/// The options of `rotate` or of `cosine`.
pub(crate) trait Options {
    type Encoding: Encoding;

    fn common(&self) -> Common<'_>;

    /// What is done to rows of `features` features of x.
    fn encoding(&self, angles: Angles<'_>, features: usize) -> Result<Self::Encoding>;

    /// `o` of a call that came to `plan`, in f64.
    fn reference_forward(&self, plan: &plan::Encoding, input: &Input<'_>) -> Vec<f64>;

    /// The gradients of a call that came to `plan`, in f64.
    fn reference_backward(
        &self,
        plan: &plan::Encoding,
        input: &Input<'_>,
        grad: &[f64],
    ) -> reference::angles::Gradients;
}

impl<'a> Common<'a> {
    /// Whether a backward looks at x.
    fn needs_x(&self, call: &EncodingBackward<'_>) -> bool {
        self.act != FusedAct::default() || call.dtheta.is_some()
    }

    /// What kernels need of a call that was checked and is not empty. Reads theta.
    fn plan<E: Encoding>(
        &self,
        encoding: E,
        angles: Angles<'a>,
        x: &View<'_>,
        checked: plan::Encoding,
        passes: Passes,
    ) -> Plan<'a> {
        let order = tokens_first(self.layout);
        let strides = [0, 2].map(|i| x.strides()[order[i]].unsigned_abs());
        let angles = (angles, self.placement);
        Plan::new(encoding, self.act, angles, checked, (x.dtype().size(), strides), passes)
    }

    /// The token ranges that are worked on one after the other: packed sequences where the activation
    /// runs over them, else all tokens at once.
    fn sequences(&self, tokens: usize) -> Vec<Range<usize>> {
        match (self.act, self.placement.sequences) {
            (FusedAct::SoftmaxSequence, Some(ends)) => {
                ends.windows(2).map(|pair| pair[0]..pair[1]).collect()
            }
            _ => std::iter::once(0..tokens).collect(),
        }
    }
}

/// Theta, as an input that no output may overlap.
fn theta(angles: Angles<'_>) -> Named<Option<View<'_>>> {
    match angles {
        Angles::Theta(theta) => ("theta", Some(theta)),
        Angles::Table(_) => ("theta", None),
    }
}

/// Batch, tokens, heads and features of a tensor.
pub(crate) fn dimensions(
    operator: &'static str,
    name: &'static str,
    view: View<'_>,
    layout: TokenLayout,
) -> Result<[usize; 4]> {
    match (view.shape(), layout) {
        (&[b, n, h, d], TokenLayout::TokensHeads) => Ok([b, n, h, d]),
        (&[b, h, n, d], TokenLayout::HeadsTokens) => Ok([b, n, h, d]),
        (_, TokenLayout::TokensHeads) => {
            Err(wrong_shape(operator, name, view, "(batch, tokens, heads, features)"))
        }
        (_, TokenLayout::HeadsTokens) => {
            Err(wrong_shape(operator, name, view, "(batch, heads, tokens, features)"))
        }
    }
}

/// The order of dimensions that makes (tokens, batch, heads, features) of a layout.
fn tokens_first(layout: TokenLayout) -> [usize; 4] {
    match layout {
        TokenLayout::TokensHeads => [1, 0, 2, 3],
        TokenLayout::HeadsTokens => [2, 0, 1, 3],
    }
}

/// Checks a forward, and tells what it comes to. Nothing is read or written.
pub(crate) fn check_forward<O: Options>(
    options: &O,
    x: View<'_>,
    angles: Angles<'_>,
    o: &mut ViewMut<'_>,
) -> Result<(O::Encoding, plan::Encoding)> {
    let (operator, common) = (O::Encoding::OPERATOR, options.common());
    let dims @ [.., d] = dimensions(operator, "x", x, common.layout)?;
    let encoding = options.encoding(angles, d)?;
    let width = O::Encoding::OUTPUTS * d;
    check_shape(operator, ("o", o.as_view()), ("x", x), width)?;
    contiguous_rows(operator, "o", o.as_view())?;
    contiguous_rows(operator, "x", x)?;
    let (count, real) = (encoding.angles(), x.dtype().real());
    let split = angles::check(operator, angles, common.placement, count, real, dims)?;
    // All of it at once: packed sequences are worked on one after the other.
    disjoint(operator, &[("x", Some(x)), theta(angles)], &[("o", o.as_view())])?;
    if !x.is_empty() {
        forward_operands(x, o.reborrow(), width).check(operator)?;
    }
    Ok((encoding, planned(encoding, dims, split)))
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
    let (output_features, pairs) = (E::OUTPUTS * features, encoding.pairs());
    plan::Encoding { batch, tokens, heads, features, output_features, pairs, split }
}

/// Encodes `x` into `o`.
pub(crate) fn forward<O: Options>(
    options: &O,
    x: View<'_>,
    angles: Angles<'_>,
    mut o: ViewMut<'_>,
) -> Result<()> {
    let (encoding, checked) = check_forward(options, x, angles, &mut o)?;
    if x.is_empty() {
        return Ok(());
    }
    if x.dtype() == DType::F64 {
        return double::encode(options, &checked, x, angles, o);
    }
    let (operator, common) = (O::Encoding::OPERATOR, options.common());
    let order = tokens_first(common.layout);
    let isa = isa();
    let passes = Passes { backward: false, dtheta: false };
    let plan = common.plan(encoding, angles, &x, checked, passes);
    let x = x.permute(&order)?;
    for tokens in common.sequences(x.shape()[0]) {
        let x = x.narrow(0, tokens.start, tokens.len())?;
        let o = o.reborrow().permute(&order)?.narrow(0, tokens.start, tokens.len())?;
        let rows = Rows::new(operator, forward_operands(x, o, checked.output_features))?;
        let columns = column_statistics(operator, &plan, Some(&x), false)?;
        let (columns, non_temporal) = (&columns, rows.non_temporal());
        rows.for_each_task(group(&checked), |part| {
            let walk = Walk { plan: &plan, encoding, first: tokens.start };
            dispatch(isa, rows.dtype(), Forward { walk, rows: part, columns, non_temporal });
        });
    }
    Ok(())
}

/// Checks a backward, and tells what it comes to: nothing at all, if it asks for nothing. Nothing is
/// read or written.
pub(crate) fn check_backward<O: Options>(
    options: &O,
    call: &mut EncodingBackward<'_>,
) -> Result<(O::Encoding, plan::Encoding)> {
    let (operator, common) = (O::Encoding::OPERATOR, options.common());
    // Where x and grad differ, grad is at fault, and not theta.
    let [.., width] = dimensions(operator, "grad", call.grad, common.layout)?;
    let d = match call.x {
        Some(x) => dimensions(operator, "x", x, common.layout)?[3],
        None => width / O::Encoding::OUTPUTS,
    };
    let encoding = options.encoding(call.angles, d)?;
    let (grad, needs_x) = (call.grad, common.needs_x(call));
    if needs_x && call.x.is_none() {
        let expected = "it (the backward of an activation and dtheta need it)";
        return Err(Error::new(operator, "x", "is missing", expected));
    }
    let Some(like) = call.like()? else {
        return Ok((encoding, planned(encoding, [0; 4], AngleSplit::default())));
    };
    let dims @ [.., d] = dimensions(operator, like.0, like.1, common.layout)?;
    let width = O::Encoding::OUTPUTS * d;
    let dx = call.dx.as_ref().map(ViewMut::as_view);
    for (name, view, len) in [("grad", Some(grad), width), ("dx", dx, d), ("x", call.x, d)] {
        if let Some(view) = view {
            check_shape(operator, (name, view), like, len)?;
            contiguous_rows(operator, name, view)?;
        }
    }
    let (count, real) = (encoding.angles(), like.1.dtype().real());
    let split = angles::check(operator, call.angles, common.placement, count, real, dims)?;
    if let Some(dtheta) = &call.dtheta {
        let expected = [split.theta_heads, split.theta_columns];
        if dtheta.shape() != expected {
            let expected = format!("{expected:?} (shape of theta)");
            return Err(wrong_shape(operator, "dtheta", dtheta.as_view(), expected));
        }
    }
    let inputs = [("x", call.x), ("grad", Some(grad)), theta(call.angles)];
    let mut written = Vec::with_capacity(2);
    written.extend(call.dx.iter().map(|dx| ("dx", dx.as_view())));
    written.extend(call.dtheta.iter().map(|dtheta| ("dtheta", dtheta.as_view())));
    disjoint(operator, &inputs, &written)?;
    if !like.1.is_empty() {
        let dx = call.dx.as_mut().map(ViewMut::reborrow);
        let x = call.x.filter(|_| needs_x);
        backward_operands(like, x, grad, [("dx", dx)], width).check(operator)?;
    }
    Ok((encoding, planned(encoding, dims, split)))
}

fn backward_operands<'a, const K: usize>(
    like: Named<View<'a>>,
    x: Option<View<'a>>,
    grad: View<'a>,
    outputs: [Named<Option<ViewMut<'a>>>; K],
    width: usize,
) -> Operands<'a, 2, K, 0, 0> {
    Operands {
        input_len: [None, Some(width)],
        ..Operands::plain(like, [("x", x), ("grad", Some(grad))], outputs)
    }
}

/// Pulls `grad` back through the encoding and the activation.
pub(crate) fn backward<O: Options>(options: &O, mut call: EncodingBackward<'_>) -> Result<()> {
    let (operator, common) = (O::Encoding::OPERATOR, options.common());
    let (encoding, checked) = check_backward(options, &mut call)?;
    let Some(like) = call.like()? else { return Ok(()) };
    if like.1.is_empty() || (call.dx.is_none() && call.dtheta.is_none()) {
        if let Some(dtheta) = &mut call.dtheta {
            dtheta.fill_zero();
        }
        return Ok(());
    }
    if call.grad.dtype() == DType::F64 {
        return double::encode_backward(options, &checked, call);
    }
    let plan::Encoding { batch: b, heads: h, features: d, split, .. } = checked;
    let width = checked.output_features;
    let (grad, dtype) = (call.grad, like.1.dtype());
    let x = call.x.filter(|_| common.needs_x(&call));
    let order = tokens_first(common.layout);
    let isa = isa();
    let passes = Passes { backward: true, dtheta: call.dtheta.is_some() };
    let plan = common.plan(encoding, call.angles, &like.1, checked, passes);
    let mut angle_sums = Scratch::<f32>::zeros(split.theta_heads * split.count);
    // Sums over all tokens, in dtheta, need a softmax to be exact; dx is to be what it is without
    // dtheta. So the two go apart.
    let softmax = !matches!(common.act, FusedAct::Elementwise(_));
    let apart = softmax && call.dx.is_some() && call.dtheta.is_some();
    let rounds: &[_] = if apart { &[(true, false), (false, true)] } else { &[(true, true)] };
    let rounds = common.sequences(checked.tokens).into_iter().flat_map(|tokens| {
        rounds.iter().map(move |&(for_x, for_theta)| (tokens.clone(), for_x, for_theta))
    });
    for (tokens, for_x, for_theta) in rounds {
        let for_theta = for_theta && call.dtheta.is_some();
        let (first, len) = (tokens.start, tokens.len());
        let grad = grad.permute(&order)?.narrow(0, first, len)?;
        let x = match x {
            Some(x) => Some(x.permute(&order)?.narrow(0, first, len)?),
            None => None,
        };
        let dx = match &mut call.dx {
            Some(dx) if for_x => Some(dx.reborrow().permute(&order)?.narrow(0, first, len)?),
            _ => None,
        };
        let like = (like.0, View::dense_shape(like.1.dtype(), &[len, b, h, d])?);
        let walk = Walk { plan: &plan, encoding, first };
        let columns = column_statistics(operator, &plan, x.as_ref(), for_theta)?;
        let columns = &columns;
        let mut dots = Scratch::<Lane>::zeros(0);
        if common.act == FusedAct::SoftmaxSequence {
            let sums = b * h * plan.segments.width();
            dots = Scratch::zeros(sums);
            let rows = Rows::new(operator, backward_operands(like, x, grad, [], width))?;
            rows.sum_over_tasks(b * h, &mut dots[..sums], |part, sums| {
                dispatch(isa, rows.dtype(), Dots { walk, rows: part, columns, sums });
            });
        }
        let rows = Rows::new(operator, backward_operands(like, x, grad, [("dx", dx)], width))?;
        let (dots, non_temporal) = (&dots, rows.non_temporal());
        if for_theta {
            let total = &mut angle_sums[..split.theta_heads * split.count];
            rows.sum_over_tasks(b * h, total, |rows_of_task, sums| {
                let (rows, sums) = (rows_of_task, Some(sums));
                let kernel = Backward { walk, rows, columns, dots, sums, non_temporal };
                dispatch(isa, dtype, kernel);
            });
        } else {
            rows.for_each_task(group(&checked), |rows| {
                let kernel = Backward { walk, rows, columns, dots, sums: None, non_temporal };
                dispatch(isa, dtype, kernel);
            });
        }
    }
    if let Some(dtheta) = &mut call.dtheta {
        split.gather(&angle_sums, dtheta);
    }
    Ok(())
}

/// Rows that stay on one thread: all of a token, so that its angles are made once, unless there are too
/// few tokens to share out.
fn group(checked: &plan::Encoding) -> usize {
    let few = checked.tokens < 4 * current_threads();
    (if few { 1 } else { checked.batch } * checked.heads).max(1)
}

/// For a softmax over the sequence: the statistics of each column of x (tokens, batch, heads, features).
fn column_statistics(
    operator: &'static str,
    plan: &Plan<'_>,
    x: Option<&View<'_>>,
    exact: bool,
) -> Result<Columns> {
    let Some(x) = x.filter(|_| plan.act == FusedAct::SoftmaxSequence) else {
        return Ok(Columns::none(exact));
    };
    let segments = &plan.segments;
    let (n, d) = (x.shape()[0], x.shape()[3]);
    // Sums are exact, too, where rows of scratch are not rows of x.
    let exact = exact || !segments.is_whole();
    // Heads that lie side by side are read together.
    let dense = x.strides()[2] == d as isize && segments.is_whole();
    let heads = if dense { column_heads(plan, d) } else { 1 };
    let mut columns = Columns::new(plan.batch * plan.heads, heads, segments.width(), exact);
    let len = columns.len();
    let x = x.permute(&[1, 0, 2, 3])?;
    let rows = Rows::new(operator, Operands::plain(("x", x), [("x", Some(x))], []))?;
    let rows = if dense { rows.widened(1) } else { rows };
    let rows = rows.column_tiles(1, (heads * d).max(1));
    let isa = isa();
    rows.for_each_group(n, columns.statistics(), len, |part, statistics| {
        let kernel = ColumnStatistics { rows: part, segments, statistics, exact };
        dispatch(isa, rows.dtype(), kernel);
    });
    columns.finish();
    Ok(columns)
}

/// The most columns of a softmax over the sequence that are summed at once.
const COLUMNS: usize = 2048;

/// How many heads of `d` features are worked on together: as many as leave each thread some work and
/// keep the sums in the first-level cache.
fn column_heads(plan: &Plan<'_>, d: usize) -> usize {
    let (tasks, most) = (4 * current_threads(), COLUMNS / d.max(1));
    let fits = |&heads: &usize| {
        plan.heads.is_multiple_of(heads)
            && heads <= most
            && plan.batch * (plan.heads / heads) >= tasks
    };
    (1..=plan.heads).rev().find(fits).unwrap_or(1)
}
