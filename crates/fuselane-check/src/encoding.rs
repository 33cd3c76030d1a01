//! What the matrices of `rotate` and `cosine` share: placements of tokens, shapes of theta, memory
//! orders, and the run of a case.

use std::fmt;

use fuselane::reference::Random;
use fuselane::reference::angles::{Gradients, Input};
use fuselane::{
    Act, AngleTable, Angles, DType, FusedAct, Positions, Result, TokenLayout, View, ViewMut,
};

use crate::Bound;
use crate::backend::{Backend, Runner};
use crate::outcome::{Call, Expected, Outcomes};
use crate::tensor::Tensor;

/// Where the tokens of a case stand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placement {
    pub(crate) name: &'static str,
    pub(crate) tokens: usize,
    pub(crate) positions: Positions<'static>,
    pub(crate) extra_tokens: usize,
    pub(crate) sequences: Option<&'static [usize]>,
}

/// Batch entries: enough for positions per batch entry to differ.
pub(crate) const BATCH: usize = 2;

/// Positions of six tokens in two batch entries.
const GIVEN: [i64; 12] = [3, -1, 4, 1, 5, -9, 2, 77, 5, 3, 5, 8];

/// One of each kind.
pub(crate) const PLACEMENTS: [Placement; 14] = {
    const fn place(
        name: &'static str,
        tokens: usize,
        positions: Positions<'static>,
        extra_tokens: usize,
        sequences: Option<&'static [usize]>,
    ) -> Placement {
        Placement { name, tokens, positions, extra_tokens, sequences }
    }
    let (given, one) = (Positions::PerBatch(&GIVEN), Positions::PerToken(GIVEN.split_at(6).0));
    let packed: Option<&[usize]> = Some(&[0, 2, 2, 6]);
    [
        place("from 0", 5, Positions::From(0), 0, None),
        place("from 0, many", 33, Positions::From(0), 0, None),
        place("from 0, a thousand", 1000, Positions::From(0), 0, None),
        place("from -3", 6, Positions::From(-3), 0, None),
        place("from 2^20", 3, Positions::From(1 << 20), 0, None),
        place("from 2, 2 extra", 6, Positions::From(2), 2, None),
        place("from 7, packed", 6, Positions::From(7), 0, packed),
        place("per token", 6, one, 0, None),
        place("per token, packed", 6, one, 0, packed),
        place("per batch", 6, given, 0, None),
        place("per batch, packed", 6, given, 0, packed),
        place("grid 5, 1 extra", 6, Positions::Grid(&[5]), 1, None),
        place("grid 2x3", 6, Positions::Grid(&[2, 3]), 0, None),
        place("grid 2x1x2, 2 extra", 6, Positions::Grid(&[2, 1, 2]), 2, None),
    ]
};

impl Placement {
    /// Whether a case is worth its time: a thousand tokens, which test how dtheta is summed, are run
    /// with the plainest of the other options only.
    pub(crate) fn suits(&self, act: FusedAct, order: Order, table: bool) -> bool {
        let plain = act == FusedAct::default() && order.name == "bnhd" && !table;
        self.tokens < 500 || plain
    }

    pub(crate) fn axes(&self) -> usize {
        match self.positions {
            Positions::Grid(grid) => grid.len(),
            _ => 1,
        }
    }

    /// A table with the angles of all tokens.
    fn table(
        &self,
        backend: &dyn Backend,
        theta: View<'_>,
        count: usize,
        dtype: DType,
    ) -> Result<AngleTable> {
        let range = match self.positions {
            Positions::Grid(grid) => return backend.table_for_grid(theta, count, grid, dtype),
            // Extra tokens stand at 0.
            Positions::From(offset) if self.extra_tokens > 0 => {
                offset.min(0)..offset + self.tokens as i64
            }
            Positions::From(offset) => offset..offset + self.tokens as i64,
            Positions::PerToken(given) | Positions::PerBatch(given) => {
                given.iter().copied().min().unwrap_or(0)
                    ..given.iter().copied().max().unwrap_or(0) + 1
            }
        };
        backend.table_for_sequence(theta, count, range, dtype)
    }
}

/// All activations.
pub(crate) fn fused_acts() -> impl Iterator<Item = FusedAct> {
    let elementwise = Act::ALL.into_iter().map(FusedAct::Elementwise);
    elementwise.chain([FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence])
}

/// The order of dimensions that a call names, and the one that its tensors have in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    pub(crate) name: &'static str,
    pub(crate) layout: TokenLayout,
    pub(crate) memory: TokenLayout,
}

/// Both layouts, dense and as permuted views of the other.
pub(crate) const ORDERS: [Order; 4] = {
    use TokenLayout::{HeadsTokens, TokensHeads};
    [
        Order { name: "bnhd", layout: TokensHeads, memory: TokensHeads },
        Order { name: "bhnd", layout: HeadsTokens, memory: HeadsTokens },
        Order { name: "bnhd by strides", layout: TokensHeads, memory: HeadsTokens },
        Order { name: "bhnd by strides", layout: HeadsTokens, memory: TokensHeads },
    ]
};

/// The dtypes of theta, which the cases go through in turn.
pub(crate) const THETA_DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F64, DType::F16];

/// Elements of (b, n, h, d) in another order of memory, or back: the swap is its own inverse if the
/// dimensions are swapped too.
fn swapped(values: &[f64], [b, n, h, d]: [usize; 4]) -> Vec<f64> {
    let mut swapped = Vec::with_capacity(values.len());
    for batch in 0..b {
        for head in 0..h {
            for token in 0..n {
                let row = ((batch * n + token) * h + head) * d;
                swapped.extend_from_slice(&values[row..row + d]);
            }
        }
    }
    swapped
}

impl Order {
    /// Memory for (b, n, h, d).
    fn shape(self, [b, n, h, d]: [usize; 4]) -> [usize; 4] {
        match self.memory {
            TokenLayout::TokensHeads => [b, n, h, d],
            TokenLayout::HeadsTokens => [b, h, n, d],
        }
    }

    fn tensor(self, dtype: DType, values: &[f64], dims: [usize; 4]) -> Tensor {
        match self.memory {
            TokenLayout::TokensHeads => Tensor::rounded(dtype, values, &dims),
            TokenLayout::HeadsTokens => {
                Tensor::rounded(dtype, &swapped(values, dims), &self.shape(dims))
            }
        }
    }

    /// The values of a tensor of this order, as (b, n, h, d).
    fn values(self, tensor: &Tensor, [b, n, h, d]: [usize; 4]) -> Vec<f64> {
        match self.memory {
            TokenLayout::TokensHeads => tensor.values(),
            TokenLayout::HeadsTokens => swapped(&tensor.values(), [b, h, n, d]),
        }
    }

    fn permutation(self) -> [usize; 4] {
        if self.layout == self.memory { [0, 1, 2, 3] } else { [0, 2, 1, 3] }
    }

    fn view(self, tensor: &Tensor) -> Result<View<'_>> {
        tensor.view().permute(&self.permutation())
    }

    fn view_mut(self, tensor: &mut Tensor) -> Result<ViewMut<'_>> {
        tensor.view_mut().permute(&self.permutation())
    }
}

/// A case of either operator, without the options that only one has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tokens {
    pub(crate) placement: Placement,
    pub(crate) order: Order,
    /// (b, n, h, d)
    pub(crate) dims: [usize; 4],
    /// (1 or h, e)
    pub(crate) theta_dims: [usize; 2],
    pub(crate) theta_dtype: DType,
    /// Angles per token and head.
    pub(crate) count: usize,
    /// Whether the angles come from a table.
    pub(crate) table: bool,
    /// Whether the backward gets x where it needs none.
    pub(crate) with_x: bool,
    pub(crate) seed: u64,
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { placement, order, dims, theta_dims, theta_dtype, table, .. } = self;
        let source = if *table { "table of " } else { "" };
        write!(f, "positions={} order={} b n h d={dims:?} ", placement.name, order.name)?;
        write!(f, "angles={source}{theta_dtype}{theta_dims:?}")
    }
}

/// Whether an activation has a short form for bf16, which gives other bounds to o and dx.
fn has_short_forms(act: FusedAct) -> bool {
    !matches!(act, FusedAct::Elementwise(act) if !matches!(act, Act::Sigmoid | Act::Silu))
}

/// The operator, as the run of a case sees it.
pub(crate) trait Encode {
    /// Output features of d features.
    fn width(&self, d: usize) -> usize;
    /// The activation that comes first.
    fn act(&self) -> FusedAct;
    fn forward(
        &self,
        backend: &dyn Backend,
        x: View<'_>,
        angles: Angles<'_>,
        o: ViewMut<'_>,
    ) -> Result<()>;
    fn backward(
        &self,
        backend: &dyn Backend,
        x: Option<View<'_>>,
        grad: View<'_>,
        angles: Angles<'_>,
        dx: Option<ViewMut<'_>>,
        dtheta: Option<ViewMut<'_>>,
    ) -> Result<()>;
    /// o and its magnitudes.
    fn reference(&self, input: &Input<'_>) -> [Vec<f64>; 2];
    /// The gradients and their magnitudes.
    fn reference_gradients(&self, input: &Input<'_>, grad: &[f64]) -> [Gradients; 2];
}

/// Runs one case and compares o, dx and dtheta.
pub(crate) fn run(
    (case, tokens, bounds): (&dyn fmt::Display, &Tokens, &[Bound]),
    encode: &impl Encode,
    dtype: DType,
    runners: &[Runner<'_>],
    outcomes: &mut Outcomes,
) {
    let &Tokens { placement, order, dims, theta_dims, theta_dtype, count, .. } = tokens;
    let [b, n, h, d] = dims;
    let o_dims = [b, n, h, encode.width(d)];
    let mut random = Random::new(tokens.seed);
    let draw = |random: &mut Random, dims: [usize; 4]| {
        order.tensor(dtype, &random.normals(dims.iter().product()), dims)
    };
    let (x, grad) = (draw(&mut random, dims), draw(&mut random, o_dims));
    let frequencies = random.uniforms(theta_dims.iter().product(), 0.01, 1.5);
    let theta = Tensor::rounded(theta_dtype, &frequencies, &theta_dims);
    let (x_values, theta_values) = (order.values(&x, dims), theta.values());
    let input = Input { x: &x_values, dims, theta: &theta_values, theta_dims, dtype };
    let [o_truth, o_magnitude] = encode.reference(&input);
    let [truth, magnitude] = encode.reference_gradients(&input, &order.values(&grad, o_dims));
    let o_expected = Expected { truth: &o_truth, magnitude: &o_magnitude };
    let dx_expected = Expected { truth: &truth.dx, magnitude: &magnitude.dx };
    let dtheta_expected = Expected { truth: &truth.dtheta, magnitude: &magnitude.dtheta };
    let (o_name, dx_name) = match has_short_forms(encode.act()) {
        true => ("o of short forms", "dx of short forms"),
        false => ("o", "dx"),
    };
    for &runner in runners {
        let (backend, call) = (runner.backend, Call { case, bounds, dtype, runner });
        let mut run = || -> Result<()> {
            let table = match tokens.table {
                true => Some(placement.table(backend, theta.view(), count, dtype)?),
                false => None,
            };
            let angles = table.as_ref().map_or(theta.view().into(), Angles::from);
            let (x, grad) = (order.view(&x)?, order.view(&grad)?);

            let mut o = Tensor::unwritten(dtype, &order.shape(o_dims));
            encode.forward(backend, x, angles, order.view_mut(&mut o)?)?;
            outcomes.compare_values(call, o_name, &o, &order.values(&o, o_dims), o_expected);

            // Both gradients, and each by itself.
            let x_for_dx = Some(x).filter(|_| encode.act() != FusedAct::default() || tokens.with_x);
            for (x, with_dx, with_dtheta) in
                [(Some(x), true, true), (x_for_dx, true, false), (Some(x), false, true)]
            {
                let mut dx = Tensor::unwritten(dtype, &order.shape(dims));
                let mut dtheta = Tensor::unwritten(theta_dtype, &theta_dims);
                let dx_view = if with_dx { Some(order.view_mut(&mut dx)?) } else { None };
                let dtheta_view = with_dtheta.then(|| dtheta.view_mut());
                encode.backward(backend, x, grad, angles, dx_view, dtheta_view)?;
                if with_dx {
                    let values = order.values(&dx, dims);
                    outcomes.compare_values(call, dx_name, &dx, &values, dx_expected);
                }
                if with_dtheta {
                    outcomes.compare(call, "dtheta", &dtheta, dtheta_expected);
                }
            }
            Ok(())
        };
        if let Err(error) = run() {
            outcomes.fault(call, o_name, &error.to_string());
        }
    }
}
