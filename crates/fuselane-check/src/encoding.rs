//! What the matrices of `rotate` and `cosine` share: placements of tokens, shapes of theta, memory
//! orders, the loops over them, and the run of a case. Only what an operator has for itself is in
//! its own file.

use std::fmt;

use fuselane::reference::angles::{Gradients, Input};
use fuselane::reference::{self, Random};
use fuselane::{
    Act, AngleTable, Angles, Cosine, CosineBackward, DType, FusedAct, Positions, Result, Rotate,
    RotateBackward, TokenLayout, View, ViewMut,
};

use crate::backend::{Backend, Runner};
use crate::outcome::{Call, Expected, Outcomes};
use crate::tensor::Tensor;
use crate::{Bound, Case};

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
const BATCH: usize = 2;

/// Positions of six tokens in two batch entries.
const GIVEN: [i64; 12] = [3, -1, 4, 1, 5, -9, 2, 77, 5, 3, 5, 8];

/// One of each kind.
const PLACEMENTS: [Placement; 14] = {
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
    fn suits(&self, act: FusedAct, order: Order, table: bool) -> bool {
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
            Positions::Grid(grid) => {
                return backend.table(&|| AngleTable::for_grid(theta, count, grid, dtype));
            }
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
        backend.table(&|| AngleTable::for_sequence(theta, count, range.clone(), dtype))
    }
}

/// All activations.
fn fused_acts() -> impl Iterator<Item = FusedAct> {
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
const ORDERS: [Order; 4] = {
    use TokenLayout::{HeadsTokens, TokensHeads};
    [
        Order { name: "bnhd", layout: TokensHeads, memory: TokensHeads },
        Order { name: "bhnd", layout: HeadsTokens, memory: HeadsTokens },
        Order { name: "bnhd by strides", layout: TokensHeads, memory: HeadsTokens },
        Order { name: "bhnd by strides", layout: HeadsTokens, memory: TokensHeads },
    ]
};

/// The dtypes of theta, which the cases go through in turn.
const THETA_DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F64, DType::F16];

/// Elements of (b, n, h, d) in another order of memory, or back: the swap is its own inverse if the
/// dimensions are swapped too.
fn swapped(values: &[f64], [b, n, h, d]: [usize; 4]) -> Vec<f64> {
    let tensor = View::new(values, &[b, n, h, d]).expect("dense");
    tensor.permute(&[0, 2, 1, 3]).expect("four dimensions").to_f64_vec()
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

/// One point of the options that both operators have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tokens {
    pub(crate) act: FusedAct,
    pub(crate) placement: Placement,
    pub(crate) order: Order,
    /// (b, n, h, d)
    pub(crate) dims: [usize; 4],
    /// Whether one frequency serves all angles.
    pub(crate) shared_frequency: bool,
    /// Whether the angles come from a table.
    table: bool,
    theta_dtype: DType,
    /// The number of the case, from which its operands are drawn.
    pub(crate) index: usize,
}

impl fmt::Display for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "positions={} order={} ", self.placement.name, self.order.name)?;
        write!(f, "b n h d={:?}", self.dims)
    }
}

/// A call of either operator, with the options that only one has.
#[derive(Debug, Clone)]
pub(crate) enum Encoding {
    Rotate(Rotate<'static>),
    Cosine(Cosine<'static>),
}

/// What an operator makes of [`Tokens`] and of a variant of its own options.
pub(crate) struct Variant {
    pub(crate) encoding: Encoding,
    /// The options that only this operator has, in words.
    pub(crate) name: String,
    /// Frequencies in a row of theta, and the angles of each token and head that come of them.
    pub(crate) frequencies: usize,
    pub(crate) angles: usize,
}

/// The matrix of an operator: everything that both have, times `variants`, of which `build` makes a
/// call. The cases go through the numbers of `features` in turn.
pub(crate) fn cases<V: Copy>(
    variants: &[V],
    features: &[usize],
    bounds: &'static [Bound],
    build: impl Fn(V, &Tokens) -> Variant,
) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let mut add = |act, placement: Placement, variant, shared: [bool; 2], order: Order, table| {
        if !placement.suits(act, order, table) {
            return;
        }
        let [shared_head, shared_frequency] = shared;
        let index = cases.len();
        let heads = 1 + index % 3;
        let dims = [BATCH, placement.tokens, heads, features[index % features.len()]];
        let theta_dtype = THETA_DTYPES[index / 3 % 4];
        let tokens =
            Tokens { act, placement, order, dims, shared_frequency, table, theta_dtype, index };
        let variant = build(variant, &tokens);
        let theta_dims = [if shared_head { 1 } else { heads }, variant.frequencies];
        cases.push(Box::new(EncodingCase { tokens, variant, theta_dims, bounds }));
    };
    for act in fused_acts() {
        for placement in PLACEMENTS {
            for &variant in variants {
                for shared in [[false, false], [false, true], [true, false], [true, true]] {
                    for order in ORDERS {
                        for table in [false, true] {
                            add(act, placement, variant, shared, order, table);
                        }
                    }
                }
            }
        }
    }
    cases
}

/// A case of either operator.
struct EncodingCase {
    tokens: Tokens,
    variant: Variant,
    /// (1 or h, frequencies)
    theta_dims: [usize; 2],
    bounds: &'static [Bound],
}

impl fmt::Display for EncodingCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, variant: Variant { encoding, name, .. }, theta_dims, .. } = self;
        let operator = match encoding {
            Encoding::Rotate(_) => "rotate",
            Encoding::Cosine(_) => "cosine",
        };
        let source = if tokens.table { "table of " } else { "" };
        write!(f, "{operator} act={}{name} {tokens} ", tokens.act)?;
        write!(f, "angles={source}{}{theta_dims:?}", tokens.theta_dtype)
    }
}

/// Whether an activation has a short form for bf16, which gives other bounds to o and dx.
fn has_short_forms(act: FusedAct) -> bool {
    !matches!(act, FusedAct::Elementwise(act) if !matches!(act, Act::Sigmoid | Act::Silu))
}

impl Encoding {
    /// Output features of d features.
    fn width(&self, d: usize) -> usize {
        match self {
            Self::Rotate(_) => d,
            Self::Cosine(_) => 2 * d,
        }
    }

    fn forward(&self, backend: &dyn Backend, x: View, angles: Angles, o: ViewMut) -> Result<()> {
        match self {
            Self::Rotate(options) => backend.rotate_forward(options, x, angles, o),
            Self::Cosine(options) => backend.cosine_forward(options, x, angles, o),
        }
    }

    fn backward<'a>(
        &self,
        backend: &dyn Backend,
        (x, grad): (Option<View<'a>>, View<'a>),
        angles: Angles<'a>,
        (dx, dtheta): (Option<ViewMut<'a>>, Option<ViewMut<'a>>),
    ) -> Result<()> {
        match self {
            Self::Rotate(options) => {
                backend.rotate_backward(options, RotateBackward { x, grad, angles, dx, dtheta })
            }
            Self::Cosine(options) => {
                backend.cosine_backward(options, CosineBackward { x, grad, angles, dx, dtheta })
            }
        }
    }

    /// o and its magnitudes.
    fn reference(&self, input: &Input) -> [Vec<f64>; 2] {
        use reference::{cosine, rotate};
        match self {
            Self::Rotate(of) => [rotate::forward(of, input), rotate::forward_magnitude(of, input)],
            Self::Cosine(of) => [cosine::forward(of, input), cosine::forward_magnitude(of, input)],
        }
    }

    /// The gradients and their magnitudes.
    fn reference_gradients(&self, input: &Input, grad: &[f64]) -> [Gradients; 2] {
        use reference::{cosine, rotate};
        match self {
            Self::Rotate(of) => {
                [rotate::backward(of, input, grad), rotate::backward_magnitude(of, input, grad)]
            }
            Self::Cosine(of) => {
                [cosine::backward(of, input, grad), cosine::backward_magnitude(of, input, grad)]
            }
        }
    }
}

/// The operands of a case and what should come of them.
struct Operands {
    x: Tensor,
    theta: Tensor,
    grad: Tensor,
    /// o, and its shape in (b, n, h, features).
    o: [Vec<f64>; 2],
    o_dims: [usize; 4],
    gradients: [Gradients; 2],
}

impl EncodingCase {
    fn draw(&self, dtype: DType) -> Operands {
        let Self { tokens: Tokens { order, dims, .. }, theta_dims, .. } = *self;
        let encoding = &self.variant.encoding;
        let [b, n, h, d] = dims;
        let o_dims = [b, n, h, encoding.width(d)];
        let mut random = Random::new(self.tokens.index as u64);
        let draw = |random: &mut Random, dims: [usize; 4]| {
            order.tensor(dtype, &random.normals(dims.iter().product()), dims)
        };
        let (x, grad) = (draw(&mut random, dims), draw(&mut random, o_dims));
        let frequencies = random.uniforms(theta_dims.iter().product(), 0.01, 1.5);
        let theta = Tensor::rounded(self.tokens.theta_dtype, &frequencies, &theta_dims);
        let (x_values, theta_values) = (order.values(&x, dims), theta.values());
        let input = Input { x: &x_values, dims, theta: &theta_values, theta_dims, dtype };
        let o = encoding.reference(&input);
        let gradients = encoding.reference_gradients(&input, &order.values(&grad, o_dims));
        Operands { x, theta, grad, o, o_dims, gradients }
    }

    /// Compares o, dx and dtheta, with the names of the first two.
    fn call(
        &self,
        operands: &Operands,
        [o_name, dx_name]: [&'static str; 2],
        call: Call<'_>,
        outcomes: &mut Outcomes,
    ) -> Result<()> {
        let Self { tokens, variant: Variant { encoding, angles: count, .. }, .. } = self;
        let &Tokens { placement, order, dims, theta_dtype, index, .. } = tokens;
        let Operands { theta, o_dims, gradients: [truth, magnitude], .. } = operands;
        let (backend, dtype) = (call.runner.backend, call.dtype);
        let table = match tokens.table {
            true => Some(placement.table(backend, theta.view(), *count, dtype)?),
            false => None,
        };
        let angles = table.as_ref().map_or(theta.view().into(), Angles::from);
        let (x, grad) = (order.view(&operands.x)?, order.view(&operands.grad)?);

        let mut o = Tensor::unwritten(dtype, &order.shape(*o_dims));
        encoding.forward(backend, x, angles, order.view_mut(&mut o)?)?;
        let expected = Expected { truth: &operands.o[0], magnitude: &operands.o[1] };
        outcomes.compare_values(call, o_name, &o, &order.values(&o, *o_dims), expected);

        // Both gradients, and each by itself. Now and then dx gets an x that it does not need.
        let needs_x = tokens.act != FusedAct::default();
        let x_for_dx = Some(x).filter(|_| needs_x || index.is_multiple_of(5));
        for (x, with_dx, with_dtheta) in
            [(Some(x), true, true), (x_for_dx, true, false), (Some(x), false, true)]
        {
            let mut dx = Tensor::unwritten(dtype, &order.shape(dims));
            let mut dtheta = Tensor::unwritten(theta_dtype, &self.theta_dims);
            let dx_view = if with_dx { Some(order.view_mut(&mut dx)?) } else { None };
            let dtheta_view = with_dtheta.then(|| dtheta.view_mut());
            encoding.backward(backend, (x, grad), angles, (dx_view, dtheta_view))?;
            if with_dx {
                let expected = Expected { truth: &truth.dx, magnitude: &magnitude.dx };
                outcomes.compare_values(call, dx_name, &dx, &order.values(&dx, dims), expected);
            }
            if with_dtheta {
                let expected = Expected { truth: &truth.dtheta, magnitude: &magnitude.dtheta };
                outcomes.compare(call, "dtheta", &dtheta, expected);
            }
        }
        Ok(())
    }
}

impl Case for EncodingCase {
    fn parameter_dtypes(&self) -> Vec<DType> {
        vec![self.tokens.theta_dtype]
    }

    fn run(&self, dtype: DType, runners: &[Runner<'_>], outcomes: &mut Outcomes) {
        let operands = self.draw(dtype);
        let names = match has_short_forms(self.tokens.act) {
            true => ["o of short forms", "dx of short forms"],
            false => ["o", "dx"],
        };
        outcomes.run((self, self.bounds, dtype), names[0], runners, |outcomes, call| {
            self.call(&operands, names, call, outcomes)
        });
    }
}
