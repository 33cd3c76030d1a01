//! Elementwise activations: `o = f(x)`, and backward, from x, `dx = do * f'(x)`.
//!
//! | name | f(x) | f'(x) |
//! |---|---|---|
//! | none | x | 1 |
//! | relu | max(x, 0) | 1 where x > 0, else 0 |
//! | sigmoid | s(x) = 1 / (1 + exp(-x)) | s(x) s(-x) |
//! | silu | x s(x) | s(x) (1 + x s(-x)) |
//! | tanh | tanh x | 1 - tanh^2 x |
//! | gelu | x P(x), P the normal distribution | P(x) + x P'(x) |
//! | gelu_tanh | x s(2u), u = sqrt(2/pi) (x + 0.044715 x^3) | s(2u) (1 + 2 x u' s(-2u)) |
//! | softplus | ln(1 + exp x) | s(x) |
//! | relu_squared | max(x, 0)^2 | 2 max(x, 0) |
//!
//! NaN gives NaN, as it does in PyTorch; the gradients of relu
//! and relu_squared are 0 where x <= 0, whatever arrives.
//! Any shape works, and any strides as long as one dimension is contiguous in all tensors of
//! the call.

use std::fmt;
use std::str::FromStr;

use super::contiguous_last;
use crate::error::{Error, Result};
use crate::pool::Buffer;
use crate::rows::{Named, Operands, Part, Rows};
use crate::simd::{self, Kernel, Lanes, MAX_LANES, Math, Memory, SHORT_LIMIT};
use crate::view::{View, ViewMut};
use crate::{Element, Real, isa};

/// An elementwise activation `f`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Act {
    /// x
    #[default]
    None,
    /// max(x, 0)
    Relu,
    /// 1 / (1 + exp(-x))
    Sigmoid,
    /// x * sigmoid(x)
    Silu,
    /// tanh(x)
    Tanh,
    /// x * (1 + erf(x / sqrt 2)) / 2
    Gelu,
    /// x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
    GeluTanh,
    /// ln(1 + exp(x))
    Softplus,
    /// max(x, 0)^2
    ReluSquared,
}

impl Act {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::None,
        Self::Relu,
        Self::Sigmoid,
        Self::Silu,
        Self::Tanh,
        Self::Gelu,
        Self::GeluTanh,
        Self::Softplus,
        Self::ReluSquared,
    ];

    /// The name used on command lines and in Python, as in `"gelu_tanh"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Relu => "relu",
            Self::Sigmoid => "sigmoid",
            Self::Silu => "silu",
            Self::Tanh => "tanh",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
            Self::Softplus => "softplus",
            Self::ReluSquared => "relu_squared",
        }
    }
}

/// Elements that a thread works on between looks at its row: a few vectors' worth of overhead is
/// lost in it, and it stays in the first-level cache.
const TILE: usize = 9216;

/// The rows of a call whose operands all look like the first input. Nothing is read or written.
fn checked<'a, const I: usize>(
    inputs: [Named<View<'a>>; I],
    (name, output): Named<ViewMut<'a>>,
) -> Result<Rows<'a, I, 1>> {
    let names = inputs.map(|(name, _)| name);
    let (views, output, _) = contiguous_last(inputs.map(|(_, view)| view), output)?;
    let inputs = std::array::from_fn(|i| (names[i], Some(views[i])));
    let operands = Operands::plain((names[0], views[0]), inputs, [(name, Some(output))]);
    Ok(Rows::new("act", operands)?.merged(true).tiled(TILE))
}

/// The rows of a call that replaces x. Nothing is read or written.
fn checked_in_place(x: ViewMut<'_>) -> Result<Rows<'_, 0, 1>> {
    let ([], x, _) = contiguous_last([], x)?;
    let like = View::dense_shape(x.dtype(), x.shape())?;
    let operands = Operands::plain(("x", like), [], [("x", Some(x))]);
    Ok(Rows::new("act", operands)?.merged(true).tiled(TILE))
}

impl Act {
    /// Writes `f(x)` into `o`.
    ///
    /// ```
    /// use fuselane::{Act, View, ViewMut};
    /// let (x, mut o) = ([-1.0f32, 0.0, 2.0], [0.0f32; 3]);
    /// Act::ReluSquared.forward_into(View::new(&x, &[3])?, ViewMut::new(&mut o, &[3])?)?;
    /// assert_eq!(o, [0.0, 0.0, 4.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn forward_into(self, x: View<'_>, o: ViewMut<'_>) -> Result<()> {
        let rows = checked([("x", x)], ("o", o))?;
        let (isa, stream) = (isa(), rows.stream());
        rows.for_each_part(1, |part| {
            simd::run(isa, rows.dtype(), Forward { act: self, part, stream });
        });
        Ok(())
    }

    /// The checks of [`Act::forward_into`], without the call: no element is read or written, so
    /// that the views may stand for memory that only another device can reach.
    ///
    /// ```
    /// use fuselane::{Act, DType, View, ViewMut};
    /// // Addresses that mean nothing here.
    /// let (x, o) = (0x1000 as *const u8, 0x2000 as *mut u8);
    /// // SAFETY: the check reads and writes no element.
    /// let (x, o) = unsafe {
    ///     (View::from_raw(x, DType::F32, &[2, 3], &[3, 1])?,
    ///      ViewMut::from_raw(o, DType::F32, &[3, 2], &[2, 1])?)
    /// };
    /// let error = Act::Silu.check_forward(x, o).unwrap_err();
    /// assert_eq!(error.to_string(), "act: o has shape [3, 2], expected [2, 3] (from x [2, 3])");
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn check_forward(self, x: View<'_>, o: ViewMut<'_>) -> Result<()> {
        checked([("x", x)], ("o", o)).map(drop)
    }

    /// `f(x)` in a buffer from the pool.
    ///
    /// ```
    /// use fuselane::{Act, View};
    /// let o = Act::Relu.forward(View::new(&[-1.0f32, 2.0], &[2])?)?;
    /// assert_eq!(o.as_slice::<f32>()?, [0.0, 2.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn forward(self, x: View<'_>) -> Result<Buffer> {
        let mut o = Buffer::unfilled(x.dtype(), x.shape())?;
        self.forward_into(x, o.view_mut())?;
        Ok(o)
    }

    /// Replaces x by `f(x)`. For [`Act::None`] this touches nothing.
    ///
    /// ```
    /// use fuselane::{Act, ViewMut};
    /// let mut x = [-3.0f64, 3.0];
    /// Act::Relu.forward_in_place(ViewMut::new(&mut x, &[2])?)?;
    /// assert_eq!(x, [0.0, 3.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn forward_in_place(self, x: ViewMut<'_>) -> Result<()> {
        if self == Self::None {
            return Ok(());
        }
        let rows = checked_in_place(x)?;
        let isa = isa();
        rows.for_each_part(1, |part| simd::run(isa, rows.dtype(), InPlace { act: self, part }));
        Ok(())
    }

    /// The checks of [`Act::forward_in_place`], without the call; see [`Act::check_forward`].
    pub fn check_in_place(self, x: ViewMut<'_>) -> Result<()> {
        if self == Self::None {
            return Ok(());
        }
        checked_in_place(x).map(drop)
    }

    /// Writes `dx = grad * f'(x)`, where `grad` is the gradient that arrives at the output.
    ///
    /// ```
    /// use fuselane::{Act, View, ViewMut};
    /// let (x, grad, mut dx) = ([-1.0f32, 3.0], [5.0f32, 5.0], [0.0f32; 2]);
    /// let [x, grad] = [View::new(&x, &[2])?, View::new(&grad, &[2])?];
    /// Act::ReluSquared.backward_into(x, grad, ViewMut::new(&mut dx, &[2])?)?;
    /// assert_eq!(dx, [0.0, 30.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn backward_into(self, x: View<'_>, grad: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let rows = checked([("x", x), ("grad", grad)], ("dx", dx))?;
        let (isa, stream) = (isa(), rows.stream());
        rows.for_each_part(1, |part| {
            simd::run(isa, rows.dtype(), Backward::<false> { act: self, part, stream });
        });
        Ok(())
    }

    /// The checks of [`Act::backward_into`], without the call; see [`Act::check_forward`].
    pub fn check_backward(self, x: View<'_>, grad: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        checked([("x", x), ("grad", grad)], ("dx", dx)).map(drop)
    }

    /// `dx` of [`Act::backward_into`] in a buffer from the pool.
    pub fn backward(self, x: View<'_>, grad: View<'_>) -> Result<Buffer> {
        let mut dx = Buffer::unfilled(x.dtype(), x.shape())?;
        self.backward_into(x, grad, dx.view_mut())?;
        Ok(dx)
    }

    /// Whether [`Act::backward_from_output_into`] can do without x.
    pub const fn has_slope_from_output(self) -> bool {
        matches!(self, Self::None | Self::Relu | Self::Sigmoid | Self::Tanh)
    }

    /// Writes `dx` from the output `o` of the forward, where that was kept and x was not: for none,
    /// relu, sigmoid (o (1 - o)) and tanh (1 - o²). It needs no exponential, so it is the faster
    /// form; but where o is close to 1, its rounding is most of what is left of the slope. That is
    /// what PyTorch does for sigmoid and tanh.
    ///
    /// ```
    /// use fuselane::{Act, View, ViewMut};
    /// let (o, grad, mut dx) = ([0.5f32, 0.75], [4.0f32, 4.0], [0.0f32; 2]);
    /// let [o, grad] = [View::new(&o, &[2])?, View::new(&grad, &[2])?];
    /// Act::Sigmoid.backward_from_output_into(o, grad, ViewMut::new(&mut dx, &[2])?)?;
    /// assert_eq!(dx, [1.0, 0.75]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn backward_from_output_into(
        self,
        o: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let rows = self.checked_from_output(o, grad, dx)?;
        let (isa, stream) = (isa(), rows.stream());
        rows.for_each_part(1, |part| {
            simd::run(isa, rows.dtype(), Backward::<true> { act: self, part, stream });
        });
        Ok(())
    }

    /// The checks of [`Act::backward_from_output_into`], without the call; see
    /// [`Act::check_forward`].
    pub fn check_backward_from_output(
        self,
        o: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        self.checked_from_output(o, grad, dx).map(drop)
    }

    fn checked_from_output<'a>(
        self,
        o: View<'a>,
        grad: View<'a>,
        dx: ViewMut<'a>,
    ) -> Result<Rows<'a, 2, 1>> {
        if !self.has_slope_from_output() {
            let expected = "none, relu, sigmoid or tanh (others need x, see backward_into)";
            return Err(Error::new("act", "name", format!("is {self}"), expected));
        }
        checked([("o", o), ("grad", grad)], ("dx", dx))
    }

    /// `dx` of [`Act::backward_from_output_into`] in a buffer from the pool.
    pub fn backward_from_output(self, o: View<'_>, grad: View<'_>) -> Result<Buffer> {
        let mut dx = Buffer::unfilled(o.dtype(), o.shape())?;
        self.backward_from_output_into(o, grad, dx.view_mut())?;
        Ok(dx)
    }

    /// Whether f has a short form in some lanes, for which large arguments have to be looked for.
    #[inline(always)]
    pub(crate) fn has_short_form(self) -> bool {
        matches!(self, Self::Sigmoid | Self::Silu)
    }

    /// Whether f takes next to no arithmetic.
    #[inline(always)]
    fn is_cheap(self) -> bool {
        matches!(self, Self::None | Self::Relu | Self::ReluSquared)
    }

    /// f(x) to be stored as it is: as exact as the stored type needs. `NEAR` is as for
    /// [`Math::exp_for_store`].
    #[inline(always)]
    pub(crate) fn stored_value<L: Math, const NEAR: bool>(self, x: L) -> L {
        match self {
            Self::Sigmoid => x.sigmoid_for_store::<NEAR>(),
            Self::Silu => x.silu_for_store::<NEAR>(),
            _ => self.value(x),
        }
    }

    /// [`Act::stored_value`] and f'(x), sharing what they have in common.
    #[inline(always)]
    pub(crate) fn stored_value_and_slope<L: Math, const NEAR: bool>(self, x: L) -> (L, L) {
        match self {
            Self::Sigmoid => x.sigmoid_and_slope_for_store::<NEAR>(),
            Self::Silu => x.silu_and_slope_for_store::<NEAR>(),
            _ => self.value_and_slope(x),
        }
    }

    /// grad * f'(x) to be stored as it is.
    #[inline(always)]
    fn stored_pull_back<L: Math, const NEAR: bool>(self, x: L, grad: L) -> L {
        match self {
            Self::Sigmoid => grad.mul(x.sigmoid_and_slope_for_store::<NEAR>().1),
            Self::Silu => grad.mul(x.silu_and_slope_for_store::<NEAR>().1),
            _ => self.pull_back(x, grad),
        }
    }

    /// A result as it is stored. Those of relu are exact, all others approximate but for the ends.
    #[inline(always)]
    fn packed<L, T>(self, value: L) -> <L as Memory<T>>::Packed
    where
        T: Element,
        L: Lanes<Real = T::Real> + Memory<T>,
    {
        match self {
            Self::None | Self::Relu => value.pack_exact(),
            _ => value.nearest().pack_exact(),
        }
    }

    /// f(x).
    #[inline(always)]
    pub(crate) fn value<L: Math>(self, x: L) -> L {
        match self {
            Self::None => x,
            Self::Relu => L::splat(Real::of(0.0)).max(x),
            Self::Sigmoid => x.sigmoid(),
            Self::Silu => x.silu(),
            Self::Tanh => x.tanh(),
            Self::Gelu => x.gelu(),
            Self::GeluTanh => x.gelu_tanh(),
            Self::Softplus => x.softplus(),
            Self::ReluSquared => {
                let positive = L::splat(Real::of(0.0)).max(x);
                positive.mul(positive)
            }
        }
    }

    /// grad * f'(x), from o = f(x).
    #[inline(always)]
    fn pull_back_from_output<L: Math>(self, o: L, grad: L) -> L {
        match self {
            Self::Relu => self.pull_back(o, grad),
            Self::Sigmoid => grad.mul(o.neg_mul_add(o, o)),
            Self::Tanh => grad.mul(o.neg_mul_add(o, L::splat(Real::of(1.0)))),
            _ => grad,
        }
    }

    /// f(x), within a rounding of [`Act::value`], and f'(x), sharing what they have in common.
    #[inline(always)]
    pub(crate) fn value_and_slope<L: Math>(self, x: L) -> (L, L) {
        match self {
            Self::Sigmoid => x.sigmoid_and_slope(),
            Self::Silu => x.silu_and_slope(),
            Self::Tanh => x.tanh_and_slope(),
            Self::Gelu => x.gelu_and_slope(),
            Self::GeluTanh => x.gelu_tanh_and_slope(),
            Self::None | Self::Relu | Self::Softplus | Self::ReluSquared => {
                (self.value(x), self.slope(x))
            }
        }
    }

    /// f'(x).
    #[inline(always)]
    fn slope<L: Math>(self, x: L) -> L {
        let (zero, one) = (L::splat(Real::of(0.0)), L::splat(Real::of(1.0)));
        match self {
            Self::None => one,
            Self::Relu => L::select(x.le(zero), zero, one),
            Self::Sigmoid => x.sigmoid_and_slope().1,
            Self::Silu => x.silu_and_slope().1,
            Self::Tanh => x.tanh_and_slope().1,
            Self::Gelu => x.gelu_and_slope().1,
            Self::GeluTanh => x.gelu_tanh_and_slope().1,
            Self::Softplus => x.sigmoid(),
            Self::ReluSquared => {
                let positive = zero.max(x);
                positive.add(positive)
            }
        }
    }

    /// grad * f'(x), where relu and its square cut `grad` off whatever it is.
    #[inline(always)]
    pub(crate) fn pull_back<L: Math>(self, x: L, grad: L) -> L {
        match self {
            Self::None => grad,
            Self::Relu => {
                let zero = L::splat(Real::of(0.0));
                L::select(x.le(zero), zero, grad)
            }
            Self::ReluSquared => {
                // The product is doubled last: twice x or twice the gradient may overflow where
                // the result does not.
                let (zero, half) = (L::splat(Real::of(0.0)), grad.mul(x));
                L::select(x.le(zero), zero, half.add(half))
            }
            _ => grad.mul(self.slope(x)),
        }
    }
}

/// Runs `$body` once for each activation with `$act` a constant, so that the choice is made
/// outside the loops of `$body`.
macro_rules! specialized {
    ($act:ident => $body:expr) => {
        match $act {
            Act::None => {
                let $act = Act::None;
                $body
            }
            Act::Relu => {
                let $act = Act::Relu;
                $body
            }
            Act::Sigmoid => {
                let $act = Act::Sigmoid;
                $body
            }
            Act::Silu => {
                let $act = Act::Silu;
                $body
            }
            Act::Tanh => {
                let $act = Act::Tanh;
                $body
            }
            Act::Gelu => {
                let $act = Act::Gelu;
                $body
            }
            Act::GeluTanh => {
                let $act = Act::GeluTanh;
                $body
            }
            Act::Softplus => {
                let $act = Act::Softplus;
                $body
            }
            Act::ReluSquared => {
                let $act = Act::ReluSquared;
                $body
            }
        }
    };
}
pub(crate) use specialized;

/// Blocks that are written together.
const BLOCKS: usize = 4;

/// Elements of a loop's step, in arrays of known length: so that no step has a bound to check. A
/// multiple of every [`Lanes::N`] times [`BLOCKS`].
const STEP: usize = BLOCKS * MAX_LANES;

/// How far ahead memory is asked for, in bytes: where there is little arithmetic, into the second-level
/// cache; elsewhere, less far, into the first. (Emerald Rapids, ns for 16 elements from memory, so and so:
/// relu 2.8 and 2.9, silu 3.5 and 3.3, backward 5.4 and 5.1. On a Zen 4, both are the same.)
const FAR_AHEAD: usize = 8 << 10;
const AHEAD: usize = 4 << 10;

/// Asks for what follows a step, `far` ahead or not so far.
#[inline(always)]
fn prefetch_ahead<L: Lanes, T>(step: &[T; STEP], far: bool) {
    let ahead = step.as_ptr().cast::<u8>().wrapping_add(if far { FAR_AHEAD } else { AHEAD });
    for line in (0..STEP * size_of::<T>()).step_by(64) {
        let line = ahead.wrapping_add(line);
        if far { L::prefetch_far(line) } else { L::prefetch(line) }
    }
}

struct Forward<'r> {
    act: Act,
    part: Part<'r, 1, 1>,
    stream: bool,
}

impl Kernel for Forward<'_> {
    #[inline(always)]
    fn run<L, T>(mut self)
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let (act, stream, zero) = (self.act, self.stream, Real::of(0.0));
        specialized!(act => while let Some(row) = self.part.next::<T>() {
            let ([x], [o]) = (row.inputs, row.outputs);
            let mut noted = L::splat(zero);
            let (xs, os) = (x.as_chunks::<STEP>().0, o.as_chunks_mut::<STEP>().0);
            for (xs, os) in xs.iter().zip(os) {
                prefetch_ahead::<L, T>(xs, act.is_cheap());
                for start in (0..STEP).step_by(BLOCKS * L::N) {
                    let mut blocks = [<L as Memory<T>>::pack(L::splat(zero)); BLOCKS];
                    for k in 0..BLOCKS {
                        let i = start + k * L::N;
                        if act.has_short_form() {
                            noted = <L as Memory<T>>::note(xs, i, noted);
                        }
                        let value = act.stored_value::<L, true>(L::read_whole(xs, i));
                        blocks[k] = act.packed::<L, T>(value);
                    }
                    <L as Memory<T>>::write_packed(blocks, os, start, stream);
                }
            }
            let again = act.has_short_form() && <L as Memory<T>>::is_far(noted, SHORT_LIMIT);
            let rest = if again { 0 } else { x.len() / STEP * STEP };
            for i in (rest..x.len()).step_by(L::N) {
                let value = act.stored_value::<L, false>(L::read(x, i, zero));
                <L as Memory<T>>::write_end(act.packed::<L, T>(value), o, i, stream);
            }
        });
    }
}

struct InPlace<'r> {
    act: Act,
    part: Part<'r, 0, 1>,
}

impl Kernel for InPlace<'_> {
    #[inline(always)]
    fn run<L, T>(mut self)
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let (act, zero) = (self.act, Real::of(0.0));
        specialized!(act => while let Some(row) = self.part.next::<T>() {
            let [x] = row.outputs;
            for i in (0..x.len()).step_by(L::N) {
                let value = act.stored_value::<L, false>(L::read(x, i, zero));
                <L as Memory<T>>::write_end(act.packed::<L, T>(value), x, i, false);
            }
        });
    }
}

/// The gradient from x or, with `FROM_OUTPUT`, from f(x) in its place.
struct Backward<'r, const FROM_OUTPUT: bool> {
    act: Act,
    part: Part<'r, 2, 1>,
    stream: bool,
}

impl<const FROM_OUTPUT: bool> Kernel for Backward<'_, FROM_OUTPUT> {
    #[inline(always)]
    fn run<L, T>(mut self)
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let (act, stream, zero) = (self.act, self.stream, Real::of(0.0));
        specialized!(act => while let Some(row) = self.part.next::<T>() {
            let ([x, grad], [dx]) = (row.inputs, row.outputs);
            let short = !FROM_OUTPUT && act.has_short_form();
            let mut noted = L::splat(zero);
            let (xs, grads) = (x.as_chunks::<STEP>().0, grad.as_chunks::<STEP>().0);
            let dxs = dx.as_chunks_mut::<STEP>().0;
            for ((xs, grads), dxs) in xs.iter().zip(grads).zip(dxs) {
                prefetch_ahead::<L, T>(xs, FROM_OUTPUT || act.is_cheap());
                prefetch_ahead::<L, T>(grads, FROM_OUTPUT || act.is_cheap());
                for start in (0..STEP).step_by(BLOCKS * L::N) {
                    let mut blocks = [<L as Memory<T>>::pack(L::splat(zero)); BLOCKS];
                    for k in 0..BLOCKS {
                        let i = start + k * L::N;
                        let (x, grad): (L, L) = (L::read_whole(xs, i), L::read_whole(grads, i));
                        if short {
                            noted = <L as Memory<T>>::note(xs, i, noted);
                        }
                        blocks[k] = if FROM_OUTPUT {
                            <L as Memory<T>>::pack(act.pull_back_from_output(x, grad))
                        } else {
                            act.packed::<L, T>(act.stored_pull_back::<L, true>(x, grad))
                        };
                    }
                    <L as Memory<T>>::write_packed(blocks, dxs, start, stream);
                }
            }
            let again = short && <L as Memory<T>>::is_far(noted, SHORT_LIMIT);
            let rest = if again { 0 } else { x.len() / STEP * STEP };
            for i in (rest..x.len()).step_by(L::N) {
                let (x, grad): (L, L) = (L::read(x, i, zero), L::read(grad, i, zero));
                let block = if FROM_OUTPUT {
                    <L as Memory<T>>::pack(act.pull_back_from_output(x, grad))
                } else {
                    act.packed::<L, T>(act.stored_pull_back::<L, false>(x, grad))
                };
                <L as Memory<T>>::write_end(block, dx, i, stream);
            }
        });
    }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Act {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|act| act.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::new("act", "name", format!("is {name:?}"), format!("one of {names}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() -> Result<()> {
        let x = [-2.0f64, -0.5, 0.0, 0.5, 2.0];
        let at = |act: Act| act.forward(View::new(&x, &[5])?)?.to_vec::<f64>();
        let close = |got: Vec<f64>, want: [f64; 5]| {
            assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-6), "{got:?} {want:?}");
        };
        close(at(Act::None)?, x);
        close(at(Act::Relu)?, [0.0, 0.0, 0.0, 0.5, 2.0]);
        close(at(Act::Sigmoid)?, [0.119203, 0.377541, 0.5, 0.622459, 0.880797]);
        close(at(Act::Silu)?, [-0.238406, -0.188770, 0.0, 0.311230, 1.761594]);
        close(at(Act::Tanh)?, [-0.964028, -0.462117, 0.0, 0.462117, 0.964028]);
        close(at(Act::Gelu)?, [-0.045500, -0.154269, 0.0, 0.345731, 1.954500]);
        close(at(Act::GeluTanh)?, [-0.045402, -0.154286, 0.0, 0.345714, 1.954598]);
        close(at(Act::Softplus)?, [0.126928, 0.474077, std::f64::consts::LN_2, 0.974077, 2.126928]);
        close(at(Act::ReluSquared)?, [0.0, 0.0, 0.0, 0.25, 4.0]);
        Ok(())
    }

    /// Every output that a 16-bit type has, on every instruction set, against the formula.
    #[test]
    fn gradients_from_outputs() -> Result<()> {
        use crate::reference::ulp;
        use crate::{DType, Isa, with_isa};
        use half::bf16;
        let o: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let o: Vec<bf16> = o.into_iter().filter(|o| o.to_f32().abs() <= 1.0).collect();
        let grad: Vec<bf16> =
            (0..o.len()).map(|i| bf16::from_f32(i as f32 / 999.0 - 17.0)).collect();
        let (o_view, grad_view) = (View::new(&o, &[o.len()])?, View::new(&grad, &[o.len()])?);
        type Slope = fn(f64) -> f64;
        let slopes: [(Act, Slope); 4] = [
            (Act::None, |_| 1.0),
            (Act::Relu, |o| f64::from(u8::from(o > 0.0))),
            (Act::Sigmoid, |o| o * (1.0 - o)),
            (Act::Tanh, |o| 1.0 - o * o),
        ];
        for isa in Isa::available() {
            for (act, slope) in slopes {
                let dx = with_isa(isa, || act.backward_from_output(o_view, grad_view))??;
                for ((dx, o), grad) in dx.as_slice::<bf16>()?.iter().zip(&o).zip(&grad) {
                    let want = f64::from(grad.to_f32()) * slope(f64::from(o.to_f32()));
                    let error = ulp::error(DType::BF16, f64::from(dx.to_f32()), want);
                    assert!(error <= 0.501, "{act} {isa}: {dx} {want} {error}");
                }
            }
        }
        let error = Act::Silu.backward_from_output(o_view, grad_view).unwrap_err();
        assert!(error.to_string().contains("relu, sigmoid or tanh"));
        Ok(())
    }

    #[test]
    fn relu_keeps_nan_and_cuts_any_gradient() -> Result<()> {
        let x = [f32::NAN, -1.0, 0.0, 1.0];
        let grad = [1.0, f32::NAN, f32::INFINITY, 7.0];
        let [x, grad] = [View::new(&x, &[4])?, View::new(&grad, &[4])?];
        assert!(Act::Relu.forward(x)?.as_slice::<f32>()?[0].is_nan());
        assert_eq!(Act::Relu.backward(x, grad)?.as_slice::<f32>()?, [1.0, 0.0, 0.0, 7.0]);
        Ok(())
    }

    #[test]
    fn views_of_all_kinds() -> Result<()> {
        let x: Vec<f32> = (0..24).map(|i| i as f32 - 12.0).collect();
        let mut o = vec![f32::NAN; 24];
        // Transposed in and out alike.
        let xt = View::new(&x, &[4, 6])?.permute(&[1, 0])?;
        Act::Relu.forward_into(xt, ViewMut::new(&mut o, &[4, 6])?.permute(&[1, 0])?)?;
        assert!(o.iter().zip(&x).all(|(o, x)| *o == x.max(0.0)));
        // Transposed in, straight out: no common contiguous dimension.
        let error = Act::Relu.forward_into(xt, ViewMut::new(&mut o, &[6, 4])?).unwrap_err();
        assert_eq!(error.argument(), "x");
        // Scalars and empty tensors.
        assert_eq!(Act::Relu.forward(View::new(&x[20..21], &[])?)?.to_vec::<f32>()?, [8.0]);
        assert!(Act::Relu.forward(View::new(&x[..0], &[3, 0, 2])?)?.is_empty());
        Ok(())
    }

    #[test]
    fn names_are_read_back() {
        for act in Act::ALL {
            assert_eq!(act.name().parse::<Act>().unwrap(), act);
        }
        assert!("swish".parse::<Act>().unwrap_err().to_string().contains("silu"));
    }
}
