//! Normalization over the last dimension, with residual, gate, weight and bias fused in.
//!
//! Over the last dimension d in `groups` of e = d / groups:
//!
//! ```text
//! p = x  [+ residual]  [* g(gate)   (gate "pre")]
//! q = p                      or  p - mean(p)                                (center)
//! sigma = sqrt(mean(q^2) + eps),  r = q / sigma
//! o = scale * r  [* weight | * (1 + weight)]  [+ bias]  [* g(gate)   (gate "post")]
//! ```
//!
//! Backward, with do1 = do (or do * g(gate), post), o1 = o before the gate and
//! dr = scale * do1 * weight:
//!
//! ```text
//! dp = (dr - r * mean(r * dr) [- mean(dr)   (center)]) / sigma
//! pre:  ds = dp * g(gate),  dgate = dp * (x + residual) * g'(gate)
//! post: ds = dp,            dgate = do * o1 * g'(gate)
//! dx = dresidual = ds [+ the gradient that arrives at residual_out]
//! dweight = sum over rows of do1 * scale * r,  dbias = sum over rows of do1
//! ```
//!
//! What the forward keeps for it is x (or the sum x + residual) and, for each row and group,
//! rstd = 1 / sigma and, if centered, the mean of p.
//!
//! **Numerics.** Everything is computed in f32 (f64 for f64) and rounded once at the store; what is
//! normalized is the unrounded sum, of which `residual_out` receives a rounded copy. Sums run in
//! lanes within chunks of `CHUNK` blocks and in f64 across chunks, so their error does not grow
//! with d. The mean is taken twice: after a first one m, q0 = p - m has a small mean delta (what
//! rounding left over), and mean(q0^2) - delta^2 is the variance without cancellation, even where
//! the mean is a million times the deviation. The backward finds delta anew, so rounding the kept
//! mean costs nothing.
//!
//! **Passes.** A row is read from memory once; later passes find it in the caches or, where p is
//! more than x, find p as the first pass kept it. The values of the gate are kept from pass to pass
//! too; in usual calls the passes evaluate its short form themselves, and the general code takes
//! over where an argument is too large for that. Of a very long group all is found anew in each
//! pass, chunk by chunk. Short groups go in batches, pass by pass. A pass over a batch is a function
//! of its own (where its loop needs all registers, one over a chunk is), so that sums and constants
//! stay in registers; the usual calls have loops of their own, the others choose block by block.

use std::marker::PhantomData;
use std::ops::Range;

use super::act::{Act, specialized};
use super::parameter;
use crate::dtype::{DType, with_real};
use crate::error::{Error, Result};
use crate::pool::{Buffer, Reals, RealsMut};
use crate::rows::{self, Operands, Part, Rows, Runs};
use crate::scratch::Scratch;
use crate::simd::{self, Kernel, Lanes, MAX_LANES, Math, Memory, SHORT_LIMIT, Task};
use crate::view::{View, ViewMut};
use crate::{Element, Real, isa};

/// How the weight enters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightForm {
    /// `* weight`
    #[default]
    Plain,
    /// `* (1 + weight)`, as Gemma does.
    OnePlus,
}

/// Where the gate multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GatePosition {
    /// What is normalized.
    #[default]
    Pre,
    /// The normalized, weighted and biased result.
    Post,
}

/// Options of the normalization.
///
/// ```
/// use fuselane::{Normalize, View};
/// let x = [3.0f32, 4.0, 0.0, 0.0];
/// let o = Normalize::rms_norm().with_eps(0.0).forward(View::new(&x, &[1, 4])?, None)?;
/// assert_eq!(o.as_slice::<f32>()?, [1.2, 1.6, 0.0, 0.0]);
/// # Ok::<(), fuselane::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalize {
    /// Subtracts the mean first.
    pub center: bool,
    /// Added to the mean square before the root; finite and not negative.
    pub eps: f64,
    /// Multiplies the normalized values.
    pub scale: f64,
    /// The last dimension is normalized in this many equal groups.
    pub groups: usize,
    /// How the weight, if there is one, enters.
    pub weight_form: WeightForm,
    /// Where the gate, if there is one, multiplies.
    pub gate_position: GatePosition,
    /// The activation of the gate.
    pub gate_act: Act,
}

impl Default for Normalize {
    fn default() -> Self {
        Self {
            center: false,
            eps: 1e-6,
            scale: 1.0,
            groups: 1,
            weight_form: WeightForm::Plain,
            gate_position: GatePosition::Pre,
            gate_act: Act::Sigmoid,
        }
    }
}

/// What becomes of the residual.
#[derive(Debug, Default)]
pub enum Residual<'a> {
    /// There is none.
    #[default]
    None,
    /// It is added to x; the sum is not kept.
    Add(View<'a>),
    /// It is added to x, and the second view receives the sum.
    AddInto(View<'a>, ViewMut<'a>),
    /// It is added to x, and its own memory receives the sum.
    AddInPlace(ViewMut<'a>),
}

/// The operands of [`Normalize::forward_into`]. All but the parameters and the statistics have the
/// shape and dtype of x.
///
/// ```
/// use fuselane::{Normalize, NormalizeForward, Residual, View, ViewMut};
/// let (x, mut residual, mut o) = ([1.0f32, 2.0], [2.0f32, 2.0], [0.0f32; 2]);
/// let weight = [1.0f32, 10.0];
/// Normalize::rms_norm().with_eps(0.0).forward_into(NormalizeForward {
///     weight: Some(View::new(&weight, &[2])?),
///     residual: Residual::AddInPlace(ViewMut::new(&mut residual, &[1, 2])?),
///     ..NormalizeForward::new(View::new(&x, &[1, 2])?, ViewMut::new(&mut o, &[1, 2])?)
/// })?;
/// assert_eq!(residual, [3.0, 4.0]);
/// assert!((o[0] - 0.848528).abs() < 1e-6 && (o[1] - 11.31371).abs() < 1e-5);
/// # Ok::<(), fuselane::Error>(())
/// ```
#[derive(Debug)]
pub struct NormalizeForward<'a> {
    /// What is normalized, along its last dimension.
    pub x: View<'a>,
    /// One weight for each element of a row, of any dtype.
    pub weight: Option<View<'a>>,
    /// One bias for each element of a row, of any dtype.
    pub bias: Option<View<'a>>,
    /// The gate, before its activation.
    pub gate: Option<View<'a>>,
    /// What is added to x first.
    pub residual: Residual<'a>,
    /// Receives the result.
    pub o: ViewMut<'a>,
    /// Receives 1 / sigma of each row and group: the shape of x with `groups` for its last
    /// dimension, in the arithmetic type (f64 for f64, else f32).
    pub rstd: Option<ViewMut<'a>>,
    /// Receives the mean that was subtracted, if centered; shape and dtype as for `rstd`.
    pub mean: Option<ViewMut<'a>>,
}

impl<'a> NormalizeForward<'a> {
    /// x to o, with nothing else.
    pub fn new(x: View<'a>, o: ViewMut<'a>) -> Self {
        let (weight, bias, gate, rstd, mean) = (None, None, None, None, None);
        Self { x, weight, bias, gate, residual: Residual::None, o, rstd, mean }
    }
}

/// The operands of [`Normalize::backward_into`]. Only the gradients that are asked for are computed.
///
/// ```
/// use fuselane::{Normalize, NormalizeBackward, View, ViewMut};
/// let (x, grad, mut dx) = ([3.0f64, 4.0], [1.0f64, 0.0], [0.0f64; 2]);
/// let rstd = [12.5f64.sqrt().recip()]; // as the forward keeps it
/// let [x, grad] = [View::new(&x, &[1, 2])?, View::new(&grad, &[1, 2])?];
/// Normalize::rms_norm().with_eps(0.0).backward_into(NormalizeBackward {
///     dx: Some(ViewMut::new(&mut dx, &[1, 2])?),
///     ..NormalizeBackward::new(grad, x, View::new(&rstd, &[1, 1])?)
/// })?;
/// assert!((3.0 * dx[0] + 4.0 * dx[1]).abs() < 1e-15); // no change along x changes o
/// # Ok::<(), fuselane::Error>(())
/// ```
#[derive(Debug)]
pub struct NormalizeBackward<'a> {
    /// The gradient that arrives at the output.
    pub grad: View<'a>,
    /// x of the forward; or the kept sum x + residual, with `residual` left out.
    pub x: View<'a>,
    /// The residual of the forward, if `x` is not the sum.
    pub residual: Option<View<'a>>,
    /// The gate of the forward.
    pub gate: Option<View<'a>>,
    /// The weight of the forward.
    pub weight: Option<View<'a>>,
    /// The bias of the forward; read for `dgate` of a gate in the post position only.
    pub bias: Option<View<'a>>,
    /// 1 / sigma, as the forward kept it.
    pub rstd: View<'a>,
    /// The mean, as the forward kept it; needed if centered.
    pub mean: Option<View<'a>>,
    /// The gradient that arrives at the sum x + residual from elsewhere.
    pub grad_residual_out: Option<View<'a>>,
    /// Receives the gradient of x.
    pub dx: Option<ViewMut<'a>>,
    /// Receives the gradient of the residual, which has the same values as `dx`: a caller who can
    /// use one tensor for both leaves this out.
    pub dresidual: Option<ViewMut<'a>>,
    /// Receives the gradient of the gate.
    pub dgate: Option<ViewMut<'a>>,
    /// Receives the gradient of the weight, in any dtype.
    pub dweight: Option<ViewMut<'a>>,
    /// Receives the gradient of the bias, in any dtype.
    pub dbias: Option<ViewMut<'a>>,
}

impl<'a> NormalizeBackward<'a> {
    /// The operands that are always needed; no gradient is asked for yet.
    pub fn new(grad: View<'a>, x: View<'a>, rstd: View<'a>) -> Self {
        Self {
            grad,
            x,
            residual: None,
            gate: None,
            weight: None,
            bias: None,
            rstd,
            mean: None,
            grad_residual_out: None,
            dx: None,
            dresidual: None,
            dgate: None,
            dweight: None,
            dbias: None,
        }
    }
}

/// A result with what its backward needs, from [`Normalize::forward_keeping`].
#[derive(Debug)]
pub struct Normalized {
    /// The result.
    pub o: Buffer,
    /// 1 / sigma of each row and group.
    pub rstd: Buffer,
    /// The mean of each row and group, if centered.
    pub mean: Option<Buffer>,
}

/// Gradients, from [`Normalize::backward`].
#[derive(Debug)]
pub struct NormalizeGradients {
    /// The gradient of x.
    pub dx: Buffer,
    /// The gradient of the weight, if there was one.
    pub dweight: Option<Buffer>,
}

const NAME: &str = "normalize";

impl Normalize {
    /// `o = x / sqrt(mean(x^2) + eps)` with eps 1e-6, meant to be used without a weight.
    ///
    /// ```
    /// assert_eq!(fuselane::Normalize::srms_norm().scale, 1.0);
    /// ```
    pub fn srms_norm() -> Self {
        Self::default()
    }

    /// `o = weight * x / sqrt(mean(x^2) + eps)` with eps 1e-6.
    ///
    /// ```
    /// use fuselane::{Normalize, View};
    /// let (x, weight) = ([2.0f32, -2.0], [1.0f32, 3.0]);
    /// let weight = View::new(&weight, &[2])?;
    /// let o = Normalize::rms_norm().with_eps(0.0).forward(View::new(&x, &[2])?, Some(weight))?;
    /// assert_eq!(o.as_slice::<f32>()?, [1.0, -3.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn rms_norm() -> Self {
        Self::default()
    }

    /// `o = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias` with eps 1e-5.
    ///
    /// ```
    /// use fuselane::{Normalize, View};
    /// let o = Normalize::layer_norm().with_eps(0.0).forward(View::new(&[5.0f32, 9.0], &[2])?, None)?;
    /// assert_eq!(o.as_slice::<f32>()?, [-1.0, 1.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn layer_norm() -> Self {
        Self { center: true, eps: 1e-5, ..Self::default() }
    }

    /// Normalizes the last dimension in this many equal groups.
    ///
    /// ```
    /// use fuselane::{Normalize, View};
    /// let groups = Normalize::srms_norm().with_eps(0.0).with_groups(2);
    /// let o = groups.forward(View::new(&[1.0f32, 1.0, -8.0, 8.0], &[4])?, None)?;
    /// assert_eq!(o.as_slice::<f32>()?, [1.0, 1.0, -1.0, 1.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    #[must_use]
    pub fn with_groups(self, groups: usize) -> Self {
        Self { groups, ..self }
    }

    /// Adds `eps` to the mean square before the root.
    ///
    /// ```
    /// assert_eq!(fuselane::Normalize::rms_norm().with_eps(1e-5).eps, 1e-5);
    /// ```
    #[must_use]
    pub fn with_eps(self, eps: f64) -> Self {
        Self { eps, ..self }
    }

    /// Checks the options and returns the last dimension of x.
    fn check(&self, x: View<'_>) -> Result<usize> {
        let fault = |option, got: String, expected: String| {
            Err(Error::new(NAME, option, format!("is {got}"), expected))
        };
        if !(self.eps.is_finite() && self.eps >= 0.0) {
            return fault("eps", format!("{}", self.eps), "a finite number from 0 on".into());
        }
        if !self.scale.is_finite() {
            return fault("scale", format!("{}", self.scale), "a finite number".into());
        }
        let d = x.shape().last().copied().unwrap_or(1); // `Rows::new` refuses a scalar
        if self.groups == 0 {
            return fault("groups", "0".into(), "at least 1".into());
        }
        if !d.is_multiple_of(self.groups) {
            let expected = format!("a divisor of {d} (last dimension of x)");
            return fault("groups", format!("{}", self.groups), expected);
        }
        Ok(d)
    }

    /// The weight, widened, with the scale and the 1 of its form worked in; in index order.
    fn factor<R: Real>(&self, weight: Option<View<'_>>, d: usize) -> Scratch<R> {
        let mut factor = Scratch::new(d);
        match weight {
            None => factor.fill(R::of(self.scale)),
            Some(weight) => {
                let one = match self.weight_form {
                    WeightForm::Plain => 0.0,
                    WeightForm::OnePlus => 1.0,
                };
                parameter::widen(weight, &mut factor[..d]);
                if (self.scale, one) != (1.0, 0.0) {
                    for value in &mut factor[..d] {
                        *value = R::of(self.scale * (one + value.to_f64()));
                    }
                }
            }
        }
        factor
    }

    fn gate_at(&self, gate: Option<View<'_>>) -> Option<GatePosition> {
        gate.map(|_| self.gate_position)
    }

    /// Normalizes into the caller's memory.
    ///
    /// ```
    /// use fuselane::{Normalize, NormalizeForward, View, ViewMut};
    /// let (x, bias, mut o) = ([0.0f32, 2.0, 1.0, 7.0], [10.0f32, 20.0], [0.0f32; 4]);
    /// Normalize::layer_norm().with_eps(0.0).forward_into(NormalizeForward {
    ///     bias: Some(View::new(&bias, &[2])?),
    ///     ..NormalizeForward::new(View::new(&x, &[2, 2])?, ViewMut::new(&mut o, &[2, 2])?)
    /// })?;
    /// assert_eq!(o, [9.0, 21.0, 9.0, 21.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn forward_into(&self, call: NormalizeForward<'_>) -> Result<()> {
        let (weight, bias) = (call.weight, call.bias);
        let (rows, with, d) = self.checked_forward(call)?;
        let rows = rows.merged(false);
        if rows.count() == 0 {
            return Ok(());
        }
        let (isa, stream, options) = (isa(), rows.stream(), *self);
        with_real!(rows.dtype(), R => {
            let factor = self.factor::<R>(weight, d);
            let bias_len = bias.map_or(0, |_| d);
            let bias = widened::<R>(bias, bias_len);
            let (factor, bias) = (Reals::new(&factor[..d]), Reals::new(&bias[..bias_len]));
            rows.for_each_part(1, |part| {
                simd::run(isa, rows.dtype(), Forward { options, with, factor, bias, part, stream });
            });
        });
        Ok(())
    }

    /// The checks of [`Normalize::forward_into`], without the call: no element is read or written, so
    /// that the views may stand for memory that only another device can reach.
    ///
    /// ```
    /// use fuselane::{Normalize, NormalizeForward, View, ViewMut};
    /// let (x, mut o) = ([1.0f32; 6], [0.0f32; 6]);
    /// let call = NormalizeForward::new(View::new(&x, &[2, 3])?, ViewMut::new(&mut o, &[2, 3])?);
    /// let error = Normalize::rms_norm().with_groups(2).check_forward(call).unwrap_err();
    /// assert_eq!(error.argument(), "groups");
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn check_forward(&self, call: NormalizeForward<'_>) -> Result<()> {
        self.checked_forward(call).map(drop)
    }

    /// The rows of a forward, what takes part in it, and the length of a row. Nothing is read or
    /// written.
    fn checked_forward<'a>(
        &self,
        call: NormalizeForward<'a>,
    ) -> Result<(Rows<'a, 3, 2, 0, 2>, ForwardWith, usize)> {
        let NormalizeForward { x, weight, bias, gate, residual, o, rstd, mean } = call;
        let d = self.check(x)?;
        if mean.is_some() && !self.center {
            return Err(Error::new(NAME, "mean", "is given", "none (center is off)"));
        }
        for (name, view) in [("weight", weight), ("bias", bias)] {
            if let Some(view) = view {
                parameter::check(NAME, name, view, d)?;
            }
        }
        let (residual, sum_name, sum, added) = match residual {
            Residual::None => (None, "residual_out", None, Added::Nothing),
            Residual::Add(view) => (Some(view), "residual_out", None, Added::Input),
            Residual::AddInto(view, sum) => (Some(view), "residual_out", Some(sum), Added::Input),
            Residual::AddInPlace(sum) => (None, "residual", Some(sum), Added::InPlace),
        };
        let mut written = vec![("o", o.as_view())];
        written.extend(sum.iter().map(|view| (sum_name, view.as_view())));
        written.extend(rstd.iter().map(|view| ("rstd", view.as_view())));
        written.extend(mean.iter().map(|view| ("mean", view.as_view())));
        rows::disjoint(NAME, &[("weight", weight), ("bias", bias)], &written)?;
        let with = ForwardWith {
            added,
            gate: self.gate_at(gate),
            fused: None,
            center: self.center,
            bias: bias.is_some(),
        };
        let rows = Rows::new(
            NAME,
            Operands {
                like: ("x", x),
                inputs: [("x", Some(x)), ("residual", residual), ("gate", gate)],
                outputs: [("o", Some(o)), (sum_name, sum)],
                statistics_len: self.groups,
                kept: [],
                keeps: [("rstd", rstd), ("mean", mean)],
                input_len: [None; 3],
                output_len: [None; 2],
            },
        )?;
        Ok((rows, with, d))
    }

    /// The result in a buffer from the pool, for the plain case.
    ///
    /// ```
    /// use fuselane::{Normalize, View};
    /// let o = Normalize::srms_norm().with_eps(0.0).forward(View::new(&[-5.0f64, 5.0], &[2])?, None)?;
    /// assert_eq!(o.as_slice::<f64>()?, [-1.0, 1.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn forward(&self, x: View<'_>, weight: Option<View<'_>>) -> Result<Buffer> {
        let mut o = Buffer::unfilled(x.dtype(), x.shape())?;
        self.forward_into(NormalizeForward { weight, ..NormalizeForward::new(x, o.view_mut()) })?;
        Ok(o)
    }

    /// The result and the statistics in buffers from the pool, for [`Normalize::backward`].
    ///
    /// ```
    /// use fuselane::{Normalize, View};
    /// let (x, grad) = ([1.0f32, 3.0], [1.0f32, 0.0]);
    /// let [x, grad] = [View::new(&x, &[2])?, View::new(&grad, &[2])?];
    /// let norm = Normalize::layer_norm().with_eps(0.0);
    /// let kept = norm.forward_keeping(x, None)?;
    /// assert_eq!(kept.o.as_slice::<f32>()?, [-1.0, 1.0]);
    /// // Two values are always normalized to -1 and 1, so no change of x changes the result.
    /// assert_eq!(norm.backward(grad, x, None, &kept)?.dx.as_slice::<f32>()?, [0.0, 0.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn forward_keeping(&self, x: View<'_>, weight: Option<View<'_>>) -> Result<Normalized> {
        let mut shape = x.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = self.groups;
        }
        let statistic = || Buffer::unfilled(x.dtype().real(), &shape);
        let (mut o, mut rstd) = (Buffer::unfilled(x.dtype(), x.shape())?, statistic()?);
        let mut mean = if self.center { Some(statistic()?) } else { None };
        self.forward_into(NormalizeForward {
            weight,
            rstd: Some(rstd.view_mut()),
            mean: mean.as_mut().map(Buffer::view_mut),
            ..NormalizeForward::new(x, o.view_mut())
        })?;
        Ok(Normalized { o, rstd, mean })
    }

    /// Writes the gradients that are asked for into the caller's memory.
    ///
    /// ```
    /// use fuselane::{Normalize, NormalizeBackward, View, ViewMut};
    /// let (x, grad, rstd) = ([2.0f32, -2.0], [5.0f32, 7.0], [0.5f32]);
    /// let (weight, mut dweight) = ([1.0f32, 1.0], [0.0f32; 2]);
    /// let [x, grad] = [View::new(&x, &[1, 2])?, View::new(&grad, &[1, 2])?];
    /// Normalize::rms_norm().with_eps(0.0).backward_into(NormalizeBackward {
    ///     weight: Some(View::new(&weight, &[2])?),
    ///     dweight: Some(ViewMut::new(&mut dweight, &[2])?),
    ///     ..NormalizeBackward::new(grad, x, View::new(&rstd, &[1, 1])?)
    /// })?;
    /// assert_eq!(dweight, [5.0, -7.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn backward_into(&self, mut call: NormalizeBackward<'_>) -> Result<()> {
        let (rows, with, d) = self.checked_backward(&mut call)?;
        let rows = rows.merged(false);
        let NormalizeBackward { weight, bias, mut dweight, mut dbias, .. } = call;
        if rows.count() == 0 {
            for mut gradient in dweight.into_iter().chain(dbias) {
                gradient.fill_zero();
            }
            return Ok(());
        }
        let (isa, stream, options) = (isa(), rows.stream(), *self);
        let parameters = [weight, bias].into_iter().flatten();
        let exactly = parameters.into_iter().any(|p| p.dtype().size() > rows.dtype().size());
        with_real!(rows.dtype(), R => {
            let factor = self.factor::<R>(weight, d);
            let bias_len = bias.map_or(0, |_| d);
            let bias = widened::<R>(bias, bias_len);
            let (factor, bias) = (Reals::new(&factor[..d]), Reals::new(&bias[..bias_len]));
            let run = |part: Part<'_, 5, 3, 2>, sums: &mut [R]| {
                let sums = RealsMut::new(sums);
                let kernel = Backward { options, with, factor, bias, part, stream, exactly, sums };
                simd::run(isa, rows.dtype(), kernel);
            };
            if !with.dweight && !with.dbias {
                rows.for_each_part(1, |part| run(part, &mut []));
                return Ok(());
            }
            let groups = Groups::new(d, self.groups);
            let len = groups.padded() * (with.dweight as usize + with.dbias as usize);
            let mut sums = Scratch::<R>::zeros(len);
            let sums = &mut sums[..len];
            rows.sum_over_parts(1, sums, run);
            let (dweight_sums, dbias_sums) =
                sums.split_at_mut(if with.dweight { groups.padded() } else { 0 });
            if let Some(dweight) = &mut dweight {
                if self.scale != 1.0 {
                    for sum in dweight_sums.iter_mut() {
                        *sum = R::of(self.scale * sum.to_f64());
                    }
                }
                groups.store(rows.dtype(), dweight_sums, dweight);
            }
            if let Some(dbias) = &mut dbias {
                groups.store(rows.dtype(), dbias_sums, dbias);
            }
        });
        Ok(())
    }

    /// The checks of [`Normalize::backward_into`], without the call; see
    /// [`Normalize::check_forward`].
    pub fn check_backward(&self, mut call: NormalizeBackward<'_>) -> Result<()> {
        self.checked_backward(&mut call).map(drop)
    }

    /// The rows of a backward, what takes part in it, and the length of a row. The gradients of the
    /// parameters stay with the call; those in rows are taken from it. Nothing is read or written.
    fn checked_backward<'a>(
        &self,
        call: &mut NormalizeBackward<'a>,
    ) -> Result<(Rows<'a, 5, 3, 2>, BackwardWith, usize)> {
        let &mut NormalizeBackward { grad, x, residual, gate, weight, bias, .. } = call;
        let &mut NormalizeBackward { rstd, mean, grad_residual_out, .. } = call;
        let (dx, dresidual, dgate) = (call.dx.take(), call.dresidual.take(), call.dgate.take());
        let d = self.check(x)?;
        let (dweight_view, dbias_view) = (
            call.dweight.as_ref().map(ViewMut::as_view),
            call.dbias.as_ref().map(ViewMut::as_view),
        );
        let parameters =
            [("weight", weight), ("bias", bias), ("dweight", dweight_view), ("dbias", dbias_view)];
        for (name, view) in parameters {
            if let Some(view) = view {
                parameter::check(NAME, name, view, d)?;
            }
        }
        let given = |name, without| Err(Error::new(NAME, name, "is given", without));
        if mean.is_some() && !self.center {
            return given("mean", "none (center is off)");
        }
        if mean.is_none() && self.center {
            let expected = "the mean that the forward kept (center is on)";
            return Err(Error::new(NAME, "mean", "is missing", expected));
        }
        if dgate.is_some() && gate.is_none() {
            return given("dgate", "none (there is no gate)");
        }
        if dweight_view.is_some() && weight.is_none() {
            return given("dweight", "none (there is no weight)");
        }
        let inputs = [
            ("grad", Some(grad)),
            ("x", Some(x)),
            ("residual", residual),
            ("gate", gate),
            ("grad_residual_out", grad_residual_out),
        ];
        let outputs = [("dx", dx), ("dresidual", dresidual), ("dgate", dgate)];
        let mut written: Vec<_> =
            outputs.iter().filter_map(|(name, o)| Some((*name, o.as_ref()?.as_view()))).collect();
        written.extend(dweight_view.map(|view| ("dweight", view)));
        written.extend(dbias_view.map(|view| ("dbias", view)));
        rows::disjoint(NAME, &inputs, &written)?;
        let kept = [("rstd", Some(rstd)), ("mean", mean)];
        rows::disjoint(NAME, &kept, &written)?;
        rows::disjoint(NAME, &[("weight", weight), ("bias", bias)], &written)?;

        let [dx, dresidual, dgate] = outputs.each_ref().map(|(_, view)| view.is_some());
        let with = BackwardWith {
            residual: residual.is_some(),
            gate: self.gate_at(gate),
            fused: None,
            center: self.center,
            grad_sum: grad_residual_out.is_some(),
            dx,
            dresidual,
            dgate,
            dweight: dweight_view.is_some(),
            dbias: dbias_view.is_some(),
        };
        let rows = Rows::new(
            NAME,
            Operands {
                like: ("x", x),
                inputs,
                outputs,
                statistics_len: self.groups,
                kept,
                keeps: [],
                input_len: [None; 5],
                output_len: [None; 3],
            },
        )?;
        Ok((rows, with, d))
    }

    /// The gradients of x and, if there is one, of the weight (in its dtype) in buffers from the
    /// pool, for the plain case. `kept` comes from [`Normalize::forward_keeping`], whose example
    /// shows both.
    pub fn backward(
        &self,
        grad: View<'_>,
        x: View<'_>,
        weight: Option<View<'_>>,
        kept: &Normalized,
    ) -> Result<NormalizeGradients> {
        let mut dx = Buffer::unfilled(x.dtype(), x.shape())?;
        let dweight = weight.map(|weight| Buffer::unfilled(weight.dtype(), weight.shape()));
        let mut dweight = dweight.transpose()?;
        self.backward_into(NormalizeBackward {
            weight,
            mean: kept.mean.as_ref().map(Buffer::view),
            dx: Some(dx.view_mut()),
            dweight: dweight.as_mut().map(Buffer::view_mut),
            ..NormalizeBackward::new(grad, x, kept.rstd.view())
        })?;
        Ok(NormalizeGradients { dx, dweight })
    }
}

/// Sums run in lanes within a chunk of this many blocks, and in f64 across chunks: fewer would cost
/// time, and more would cost accuracy.
const CHUNK: usize = 128;

/// Of a longer group, what passes hand on is computed anew in each of them, so that no row needs
/// working memory of its own size.
const LONG: usize = 1 << 16;

/// Groups that a pass works on, at most, before the next pass comes: what it takes to begin and end a
/// pass, and to wait for a root and a quotient between them, is shared by all.
const BATCH: usize = 16;

/// Elements of the groups of a batch, at most: few enough to stay in the first-level cache between the
/// passes. (Twice as many, in rows of 2,048, are 8 % faster where only x is read twice, and 35 % slower
/// where p is kept. Rows of 128: 1.8 times as fast as one by one, backward 1.1 to 1.3 times.)
const BATCH_ELEMENTS: usize = 2048;

/// Rows that the parameters' gradients are summed over before they go to the sum of the part, so
/// that a small addend does not meet a large sum too often.
const RECENT: usize = 64;

/// How a row's parameters lie in working memory: in register order, each group from a block's start.
#[derive(Clone, Copy)]
struct Groups {
    count: usize,
    len: usize,
    /// Whether batches are to be of two halves that take turns; see [`StaggeredPairs`].
    in_turns: bool,
}

impl Groups {
    #[inline(always)]
    fn new(d: usize, count: usize) -> Self {
        Self { count, len: d / count, in_turns: false }
    }

    /// Where a group lies in a row.
    #[inline(always)]
    fn range(self, group: usize) -> Range<usize> {
        group * self.len..(group + 1) * self.len
    }

    /// Where a group lies in working memory.
    #[inline(always)]
    fn registers(self, group: usize) -> Range<usize> {
        let len = self.len.next_multiple_of(MAX_LANES);
        group * len..(group + 1) * len
    }

    /// The length of all groups in working memory.
    #[inline(always)]
    fn padded(self) -> usize {
        if self.len == 0 { 0 } else { self.count * self.len.next_multiple_of(MAX_LANES) }
    }

    /// Brings a parameter (empty, if there is none) into working memory.
    #[inline(always)]
    fn widen<L>(self, values: &[L::Real]) -> Scratch<L::Real>
    where
        L: Lanes + Memory<<L as Lanes>::Real>,
    {
        let mut registers = Scratch::new(if values.is_empty() { 0 } else { self.padded() });
        if !values.is_empty() {
            for group in 0..self.count {
                let to = &mut registers[self.registers(group)];
                parameter::to_registers::<L>(&values[self.range(group)], to);
            }
        }
        registers
    }

    /// The numbers that one pass over a group hands on to the next; of a long group those of a chunk.
    #[inline(always)]
    fn handed_on(self) -> usize {
        if self.len > LONG { CHUNK * MAX_LANES } else { self.len.next_multiple_of(MAX_LANES) }
    }

    /// Working memory for them, of each group of a batch, if there are any.
    #[inline(always)]
    fn memory<R: Real>(self, any: bool) -> Scratch<R> {
        Scratch::new(if any { self.batch() * self.handed_on() } else { 0 })
    }

    /// How many groups a pass works on before the next one comes.
    #[inline(always)]
    fn batch(self) -> usize {
        let halves = if self.in_turns { 2 } else { 1 };
        halves * (BATCH_ELEMENTS / self.len.max(1)).clamp(1, BATCH / halves)
    }

    /// How many rows make a batch; one, if that has more groups than a batch.
    #[inline(always)]
    fn batch_rows(self) -> usize {
        (self.batch() / self.count.max(1)).max(1)
    }

    /// Whether two passes may share a loop ([`Staggered`]): where the lanes have registers enough for both,
    /// groups are of whole steps, and what passes hand on is kept.
    #[inline(always)]
    fn staggers<L: Lanes>(self) -> bool {
        L::MANY_REGISTERS
            && self.len.is_multiple_of(4 * MAX_LANES)
            && (1..=LONG).contains(&self.len)
    }

    /// How many elements behind a batch the next one begins, if groups and rows follow each other.
    #[inline(always)]
    fn ahead(self, batch: Batch) -> usize {
        batch.len() * self.len
    }

    /// The batches of some rows: of some rows each, or of some groups of one.
    #[inline(always)]
    fn batches(self, rows: usize) -> Batches {
        let steps = (self.batch_rows(), self.batch().min(self.count).max(1));
        Batches { rows, groups: self.count, steps, next: (0, 0) }
    }

    /// What a pass goes over at a time, as elements of a group, from `start` on: all of it; of a long
    /// one, a chunk.
    #[inline(always)]
    fn span<L: Lanes>(self, start: usize) -> Option<Range<usize>> {
        let len = if self.len > LONG { CHUNK * L::N } else { self.len };
        (start < self.len).then(|| start..self.len.min(start + len))
    }

    /// Rounds sums in working memory to a gradient.
    fn store<R: Real>(self, dtype: DType, sums: &[R], gradient: &mut ViewMut<'_>) {
        let mut values = Scratch::<R>::new(self.count * self.len);
        let values = &mut values[..self.count * self.len];
        if self.len > 0 {
            for group in 0..self.count {
                let to = &mut values[self.range(group)];
                parameter::to_index_order(dtype, &sums[self.registers(group)], to);
            }
        }
        parameter::store(gradient, values);
    }
}

/// Some groups of some rows.
#[derive(Clone, Copy)]
struct Batch {
    /// The first row of a run and the one behind the last.
    rows: (usize, usize),
    /// The same for groups of each row.
    groups: (usize, usize),
    /// Which memory the first one has, of those of a batch.
    slot: usize,
}

impl Batch {
    #[inline(always)]
    fn len(self) -> usize {
        (self.rows.1 - self.rows.0) * (self.groups.1 - self.groups.0)
    }

    /// The one that has some slot.
    #[inline(always)]
    fn one(self, slot: usize) -> Self {
        let groups = self.groups.1 - self.groups.0;
        let (row, group) = (self.rows.0 + slot / groups, self.groups.0 + slot % groups);
        Self { rows: (row, row + 1), groups: (group, group + 1), slot }
    }
}

/// See [`Groups::batches`].
struct Batches {
    rows: usize,
    groups: usize,
    /// Rows and groups of a batch.
    steps: (usize, usize),
    /// Where the next one begins.
    next: (usize, usize),
}

impl Iterator for Batches {
    type Item = Batch;
    #[inline(always)]
    fn next(&mut self) -> Option<Batch> {
        let ((row, group), (rows, groups)) = (self.next, self.steps);
        let rows = (row, self.rows.min(row + rows));
        let groups = (group, self.groups.min(group + groups));
        self.next = if groups.1 < self.groups { (row, groups.1) } else { (rows.1, 0) };
        (row < self.rows).then_some(Batch { rows, groups, slot: 0 })
    }
}

/// Runs `$body` for each span of some groups; see [`Groups::span`]. (A loop by hand: `step_by` would
/// divide, and most groups are of one span.)
macro_rules! for_each_span {
    ($L:ident in $groups:expr, $span:ident => $body:block) => {{
        let (groups, mut start): (Groups, usize) = ($groups, 0);
        while let Some($span) = groups.span::<$L>(start) {
            start = $span.end;
            let $span = &$span;
            $body
        }
    }};
}

/// Runs `$body` for each group of a batch.
macro_rules! for_each_group {
    ($batch:expr, ($row:ident, $group:ident, $slot:ident) => $body:block) => {{
        let batch: Batch = $batch;
        let mut slot = batch.slot;
        for $row in batch.rows.0..batch.rows.1 {
            for $group in batch.groups.0..batch.groups.1 {
                let $slot = slot;
                $body
                slot += 1;
            }
        }
    }};
}

/// An optional parameter of `len` numbers, widened, in index order.
fn widened<R: Real>(parameter: Option<View<'_>>, len: usize) -> Scratch<R> {
    let mut values = Scratch::new(len);
    if let Some(parameter) = parameter {
        parameter::widen(parameter, &mut values[..len]);
    }
    values
}

/// The part of a group that a pass works on at a time.
#[derive(Clone, Copy)]
struct Chunk {
    /// Where it starts in the group.
    start: usize,
    /// Its length.
    len: usize,
    /// Where it starts in [`Groups::memory`].
    kept: usize,
}

impl Chunk {
    /// The chunk at `start` of a group of length `len`.
    #[inline(always)]
    fn new<L: Lanes>(start: usize, len: usize) -> Self {
        let kept = if len > LONG { 0 } else { start };
        Self { start, len: (CHUNK * L::N).min(len - start), kept }
    }

    /// This part of a row, if it takes part.
    #[inline(always)]
    fn of<T>(self, row: &[T], any: bool) -> &[T] {
        if any { &row[self.start..][..self.len] } else { &[] }
    }

    /// [`Chunk::of`], to write.
    #[inline(always)]
    fn of_mut<T>(self, row: &mut [T], any: bool) -> &mut [T] {
        if any { &mut row[self.start..][..self.len] } else { &mut [] }
    }

    /// This part of numbers in register order, if they take part.
    #[inline(always)]
    fn registers<L: Lanes>(self, numbers: &[L::Real], start: usize, any: bool) -> &[L::Real] {
        let len = self.len.next_multiple_of(L::N);
        if any { &numbers[start..][..len] } else { &[] }
    }

    /// [`Chunk::registers`], to write.
    #[inline(always)]
    fn registers_mut<L: Lanes>(
        self,
        numbers: &mut [L::Real],
        start: usize,
        any: bool,
    ) -> &mut [L::Real] {
        let len = self.len.next_multiple_of(L::N);
        if any { &mut numbers[start..][..len] } else { &mut [] }
    }
}

/// Runs `$body` for each block of a chunk of length `$len`: `$i` is its place in the operands,
/// `$whole` whether it is known to be whole, and `$slot` a number for its use. There are several of
/// these, which blocks take in turns: sums, of which one need not wait for the other; or results,
/// which `$end` stores together.
///
/// Blocks go in steps, one for each slot. In a step, the operands that are read and written are slices
/// of known length, which leaves no bound to check. Blocks behind the last step come one by one, and
/// so do all blocks of short lanes.
macro_rules! blocks {
    ($L:ident in $len:expr, read [$($r:ident),*], write [$($w:ident),*],
        ($i:ident, $whole:ident, $slot:ident of [$($slots:ident),*]) => $body:block) => {
        blocks!(@steps $L in $len, read [$($r),*], write [$($w),*],
            ($i, $whole, $slot of [$($slots),*]) => $body then {} rest at {
                $(if at < $len {
                    let ($i, $whole, $slot) = (at, false, &mut $slots);
                    $body
                    at += $L::N;
                    if const { $L::N == MAX_LANES } {
                        continue;
                    }
                })*
            })
    };
    ($L:ident in $len:expr, read [$($r:ident),*], write [$($w:ident),*],
        ($i:ident, $whole:ident, $slot:ident of [$first:ident $(, $more:ident)*]) => $body:block
        then $end:block) => {
        blocks!(@steps $L in $len, read [$($r),*], write [$($w),*],
            ($i, $whole, $slot of [$first $(, $more)*]) => $body then { let $i = 0; $end } rest at {
                let ($i, $whole) = (at, false);
                {
                    let $slot = &mut $first;
                    $body
                }
                $end
                at += $L::N;
            })
    };
    (@steps $L:ident in $len:expr, read [$($r:ident),*], write [$($w:ident),*],
        ($i:ident, $whole:ident, $slot:ident of [$($slots:ident),*]) => $body:block then $end:block
        rest $at:ident $rest:block) => {{
        const STEP: usize = MAX_LANES * [$(stringify!($slots)),*].len();
        let steps = if const { $L::N == MAX_LANES } { $len / STEP } else { 0 };
        {
            $(let $r = in_steps::<_, STEP>($r, steps);)*
            $(let $w = in_steps_mut::<_, STEP>($w, steps);)*
            for step in 0..steps {
                $(let $r = step_of($r, step);)*
                $(let $w = step_of_mut($w, step);)*
                let (mut next, $whole) = (0, true);
                $({
                    let ($i, $slot) = (next, &mut $slots);
                    $body
                    next += MAX_LANES;
                })*
                let _ = next;
                $end
            }
        }
        let mut $at = steps * STEP;
        while $at < $len $rest
    }};
}

/// An operand in steps of known length; nothing, if it takes no part.
#[inline(always)]
fn in_steps<T, const STEP: usize>(row: &[T], steps: usize) -> &[[T; STEP]] {
    if row.is_empty() { &[] } else { &row.as_chunks().0[..steps] }
}

/// [`in_steps`], to write.
#[inline(always)]
fn in_steps_mut<T, const STEP: usize>(row: &mut [T], steps: usize) -> &mut [[T; STEP]] {
    if row.is_empty() { &mut [] } else { &mut row.as_chunks_mut().0[..steps] }
}

/// A step of an operand.
#[inline(always)]
fn step_of<T, const STEP: usize>(steps: &[[T; STEP]], step: usize) -> &[T] {
    if steps.is_empty() { &[] } else { &steps[step] }
}

/// [`step_of`], to write.
#[inline(always)]
fn step_of_mut<T, const STEP: usize>(steps: &mut [[T; STEP]], step: usize) -> &mut [T] {
    if steps.is_empty() { &mut [] } else { &mut steps[step] }
}

/// Chooses the loop of a task: that of a usual call, compiled by itself, or that of the others,
/// which looks at what takes part block by block (as all do where the lanes are not fast).
macro_rules! enter {
    ($L:ident, $kind:expr, $Task:ident $fields:tt) => {
        if const { $L::N < MAX_LANES } {
            enter!(@kind $L, { USUAL }, $Task $fields)
        } else {
            match $kind {
                0 => enter!(@kind $L, 0, $Task $fields),
                1 => enter!(@kind $L, 1, $Task $fields),
                2 => enter!(@kind $L, 2, $Task $fields),
                3 => enter!(@kind $L, 3, $Task $fields),
                4 => enter!(@kind $L, 4, $Task $fields),
                5 => enter!(@kind $L, 5, $Task $fields),
                6 => enter!(@kind $L, 6, $Task $fields),
                7 if const { $L::HAS_SHORT } => enter!(@kind $L, 7, $Task $fields),
                8 if const { $L::HAS_SHORT } => enter!(@kind $L, 8, $Task $fields),
                _ => enter!(@kind $L, { USUAL }, $Task $fields),
            }
        }
    };
    (@kind $L:ident, $kind:tt, $Task:ident { $($field:tt)* }) => {
        $L::enter($Task::<$L, T, $kind> { $($field)*, lanes: PhantomData })
    };
}

/// How many kinds of calls have loops of their own, forward and backward.
const USUAL: usize = 9;

/// The block at `i` of a row, with zeros past its end.
#[inline(always)]
fn read<L, T>(row: &[T], i: usize, whole: bool) -> L
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let zero = Real::of(0.0);
    if whole { L::read_whole(row, i) } else { L::read(row, i, zero) }
}

/// Writes the block at `i` of a row, up to its end.
#[inline(always)]
fn write<L, T>(block: L, row: &mut [T], i: usize, whole: bool, stream: bool)
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    if whole { block.write_whole(row, i, stream) } else { block.write(row, i, stream) }
}

/// Writes the block at `i` of a row, up to its end. If it is only `nearly` right, a tie is chance, and
/// it takes the cheaper rounding.
#[inline(always)]
fn write_block<L, T>(block: L, row: &mut [T], (i, whole): (usize, bool), nearly: bool, stream: bool)
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let packed = packed::<L, T>(block, nearly);
    if whole {
        L::write_aligned(packed, row, i, stream)
    } else {
        L::write_end(packed, row, i, stream)
    }
}

/// A block as it is stored; see [`write_block`].
#[inline(always)]
fn packed<L, T>(block: L, nearly: bool) -> <L as Memory<T>>::Packed
where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    if nearly { <L as Memory<T>>::nearest(block).pack_exact() } else { block.pack() }
}

/// Writes the blocks of a step, which the row is; or the first of them at `i`, up to the row's end.
/// If they are only `nearly` right, a tie is chance, and they take the cheaper rounding.
#[inline(always)]
fn write_step<L, T, const K: usize>(
    blocks: [L; K],
    row: &mut [T],
    (i, whole): (usize, bool),
    nearly: bool,
    stream: bool,
) where
    T: Element,
    L: Lanes<Real = T::Real> + Memory<T>,
{
    let mut all = [packed::<L, T>(blocks[0], nearly); K];
    if !whole {
        return L::write_end(all[0], row, i, stream);
    }
    for k in 1..K {
        all[k] = packed::<L, T>(blocks[k], nearly);
    }
    L::write_packed(all, row, 0, stream);
}

/// The block at `i` of a row of length `len`, with zeros past its end.
#[inline(always)]
fn inside<L: Lanes + Memory<<L as Lanes>::Real>>(block: L, i: usize, len: usize) -> L {
    let ones = [Real::of(1.0); MAX_LANES];
    let zero = L::splat(Real::of(0.0));
    let inside = L::read(&ones[..(len - i).min(L::N)], 0, Real::of(0.0));
    L::select(zero.lt(inside), block, zero)
}

/// Asks for what lies `ahead` elements behind the block at `i`, once for each line of the cache. That
/// is the next group's, if groups and rows follow each other: so memory is busy while this row is
/// worked on in the caches.
#[inline(always)]
fn prefetch<L: Lanes, T>(row: &[T], i: usize, ahead: usize) {
    for line in lines_ahead::<L, T>(row, i, ahead) {
        // (A gated norm backward took 4 % longer on a Zen 4 with all of it in the second level.)
        if const { L::MANY_REGISTERS } { L::prefetch_far(line) } else { L::prefetch(line) }
    }
}

/// [`prefetch`] in a loop that reads straight on from row to row: what it soon needs, into the first-level
/// cache.
#[inline(always)]
fn prefetch_soon<L: Lanes, T>(row: &[T], i: usize) {
    for line in lines_ahead::<L, T>(row, i, SOON / size_of::<T>()) {
        L::prefetch(line);
    }
}

/// How far ahead [`prefetch_soon`] asks, in bytes. (Emerald Rapids, rows of 2,048, backward: 5.3 ns for 16
/// elements with 2 KiB, 5.8 with 4, and 5.7 to 6.0 with 4 to 8 KiB into the second-level cache; with a
/// residual 6.9, 8.0 and 7.7, with a gate 9.1, 10.2 and 9.6.)
const SOON: usize = 2 << 10;

/// The cache lines that lie `ahead` elements behind the block at `i`, if those begin there.
#[inline(always)]
fn lines_ahead<L: Lanes, T>(row: &[T], i: usize, ahead: usize) -> impl Iterator<Item = *const u8> {
    let (at, bytes) = (i * size_of::<T>(), L::N * size_of::<T>());
    let begins = !row.is_empty() && at % LINE.max(bytes) == 0;
    let next = row.as_ptr().wrapping_add(i + ahead).cast::<u8>();
    let lines = if begins { bytes.div_ceil(LINE) } else { 0 };
    (0..lines).map(move |line| next.wrapping_add(line * LINE))
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// The part of a row that belongs to a group; empty where the operand is absent.
#[inline(always)]
fn of_group<T>(row: &[T], range: Range<usize>) -> &[T] {
    if row.is_empty() { row } else { &row[range] }
}

/// [`of_group`], to write.
#[inline(always)]
fn of_group_mut<T>(row: &mut [T], range: Range<usize>) -> &mut [T] {
    if row.is_empty() { row } else { &mut row[range] }
}

/// Rounds a scalar to the arithmetic type. Every NaN becomes the usual one, whose payload
/// survives rounding to 16 bits.
#[inline(always)]
fn scalar<R: Real>(value: f64) -> R {
    R::of(if value.is_nan() { -f64::NAN } else { value })
}

/// Where what is added to x comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Added {
    Nothing,
    Input,
    /// The memory that the sum goes to.
    InPlace,
}

/// What takes part in a forward call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ForwardWith {
    added: Added,
    gate: Option<GatePosition>,
    /// The gate's activation, if the passes themselves evaluate its short form. Otherwise
    /// [`gate_values`] has been there before.
    fused: Option<Act>,
    center: bool,
    bias: bool,
}

impl ForwardWith {
    const RMS: Self =
        Self { added: Added::Nothing, gate: None, fused: None, center: false, bias: false };

    /// The calls that have loops of their own. Those of gates are for the short forms, where the
    /// lanes have such.
    const fn usual(kind: usize, short: bool) -> Self {
        let rms = Self::RMS;
        let (pre, post) = (Some(GatePosition::Pre), Some(GatePosition::Post));
        let [sigmoid, silu] = short_gates(short);
        match kind {
            0 => rms,
            1 => Self { added: Added::Input, ..rms },
            2 => Self { added: Added::InPlace, ..rms },
            3 => Self { center: true, ..rms },
            4 => Self { center: true, bias: true, ..rms },
            5 => Self { gate: pre, fused: sigmoid, ..rms },
            6 => Self { gate: post, fused: sigmoid, ..rms },
            7 => Self { gate: pre, fused: silu, ..rms },
            _ => Self { gate: post, fused: silu, ..rms },
        }
    }

    /// What the loops of a kind know.
    #[inline(always)]
    fn known<L: Math, const KIND: usize>(self) -> Self {
        if KIND < USUAL {
            const { Self::usual(KIND, L::HAS_SHORT) }
        } else {
            Self { fused: None, ..self }
        }
    }

    /// The kind of this call. If it is no usual one, the gate is not fused.
    #[inline(always)]
    fn kind<L: Math>(&mut self) -> usize {
        let (mut kind, with) = (0, *self);
        while kind < USUAL && Self::usual(kind, L::HAS_SHORT) != with {
            kind += 1;
        }
        if kind == USUAL {
            self.fused = None;
        }
        kind
    }

    /// Whether the first pass keeps p for the others: where that is cheaper than to find it anew.
    #[inline(always)]
    fn keeps_p(self) -> bool {
        self.added != Added::Nothing || self.gate == Some(GatePosition::Pre) || self.center
    }
}

/// The activations that a gate may be fused with, or none where the lanes have no short forms.
const fn short_gates(short: bool) -> [Option<Act>; 2] {
    if short { [Some(Act::Sigmoid), Some(Act::Silu)] } else { [None, None] }
}

/// The activation of a gate that the passes may evaluate themselves, if the call is a usual one. Of
/// a long group they would do so in each pass.
#[inline(always)]
fn fusible<L: Math>(act: Act, gate: Option<GatePosition>, len: usize) -> Option<Act> {
    let short = L::HAS_SHORT && gate.is_some() && act.has_short_form() && len <= LONG;
    short.then_some(act)
}

struct Forward<'r> {
    options: Normalize,
    with: ForwardWith,
    factor: Reals<'r>,
    bias: Reals<'r>,
    part: Part<'r, 3, 2, 0, 2>,
    stream: bool,
}

impl Kernel for Forward<'_> {
    #[inline(always)]
    fn run<L, T>(mut self)
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let groups = Groups::new(self.factor.len(), self.options.groups);
        let fused = fusible::<L>(self.options.gate_act, self.with.gate, groups.len);
        let mut with = ForwardWith { fused, ..self.with };
        let kind = with.kind::<L>();
        let pairs = with == ForwardWith::RMS && groups.len * size_of::<T>() <= PAIR_ROW;
        let in_turns = pairs && groups.count == 1 && groups.staggers::<L>();
        let groups = Groups { in_turns, ..groups };
        if groups.len == 0 {
            while let Some(row) = self.part.next::<T>() {
                for kept in row.keeps {
                    kept.fill(scalar(f64::NAN));
                }
            }
            return;
        }
        let factor = groups.widen::<L>(self.factor.get());
        let bias = groups.widen::<L>(self.bias.get());
        let (mut gates, mut p) =
            (groups.memory(with.gate.is_some()), groups.memory(with.keeps_p()));
        let zero = Real::of(0.0);
        let none = Statistics { near: zero, rest: zero, rstd: zero, mean: zero };
        while let Some(runs) = self.part.next_run::<T>(usize::MAX) {
            let batches = groups.batches(runs.rows);
            let mut rows = ForwardRows::<T> {
                kind,
                with,
                groups,
                runs,
                factor: &factor,
                bias: &bias,
                gates: &mut gates,
                p: &mut p,
                sums: [0.0; BATCH],
                squares: [0.0; BATCH],
                nears: [zero; BATCH],
                found: [none; BATCH],
                stream: self.stream,
            };
            rows.normalize::<L>(&self.options, batches);
        }
    }
}

/// What a group is normalized with.
#[derive(Clone, Copy)]
struct Statistics<R> {
    /// The mean but for rounding, what is left of it, and both.
    near: R,
    rest: R,
    mean: R,
    rstd: R,
}

/// Some rows of a forward.
struct ForwardRows<'r, T: Element> {
    kind: usize,
    with: ForwardWith,
    groups: Groups,
    runs: Runs<'r, T, 3, 2, 0, 2>,
    factor: &'r [T::Real],
    bias: &'r [T::Real],
    /// g(gate), of each group of a batch.
    gates: &'r mut [T::Real],
    /// What is normalized, of each group of a batch.
    p: &'r mut [T::Real],
    /// Of each group of a batch: sums of p (or of p - near) and of its square, and what comes of them.
    sums: Each<f64>,
    squares: Each<f64>,
    nears: Each<T::Real>,
    found: Each<Statistics<T::Real>>,
    stream: bool,
}

/// The operands of a group.
struct ForwardGroup<'r, T: Element> {
    x: &'r [T],
    residual: &'r [T],
    gate: &'r [T],
    o: &'r mut [T],
    sum: &'r mut [T],
    factor: &'r [T::Real],
    bias: &'r [T::Real],
    gates: &'r mut [T::Real],
    p: &'r mut [T::Real],
}

/// A number for each group of a batch.
type Each<N> = [N; BATCH];

impl<T: Element> ForwardRows<'_, T> {
    #[inline(always)]
    fn group(&mut self, row: usize, group: usize, slot: usize) -> ForwardGroup<'_, T> {
        let (range, registers) = (self.groups.range(group), self.groups.registers(group));
        let handed_on = slot * self.groups.handed_on()..(slot + 1) * self.groups.handed_on();
        let ([x, residual, gate], [o, sum]) = (&self.runs.inputs, &mut self.runs.outputs);
        ForwardGroup {
            x: &x.row(row)[range.clone()],
            residual: of_group(residual.row(row), range.clone()),
            gate: of_group(gate.row(row), range.clone()),
            o: &mut o.row(row)[range.clone()],
            sum: of_group_mut(sum.row(row), range),
            factor: &self.factor[registers.clone()],
            bias: of_group(self.bias, registers),
            gates: of_group_mut(self.gates, handed_on.clone()),
            p: of_group_mut(self.p, handed_on),
        }
    }

    /// g(gate) of a span of each group of a batch.
    #[inline(always)]
    fn gate_values<L>(&mut self, act: Act, batch: Batch, span: &Range<usize>)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        for_each_group!(batch, (row, group, slot) => {
            let operands = self.group(row, group, slot);
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, operands.x.len());
                gate_values::<L, T>(act, false, operands.gate, chunk, operands.gates, &mut []);
            }
        });
    }

    /// Finds p of a span of each group, keeps it where the other passes need it, and adds to the sums
    /// of p if centered, else to those of p^2; gives the slots, as bits, of those whose gates have
    /// arguments that are too large for a short form. In the `last` pass over long groups, x +
    /// residual is kept too.
    #[inline(always)]
    fn first<L>(&mut self, act: Act, batch: Batch, span: &Range<usize>, last: bool) -> u32
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        // The sum may overwrite an addend, so it is written when that was read last.
        let keeps_sum = last || self.groups.len <= LONG;
        let pre = self.with.gate == Some(GatePosition::Pre);
        if pre && self.with.fused.is_none() {
            self.gate_values::<L>(act, batch, span);
        }
        let (kind, rows) = (self.kind, &mut *self);
        let far = enter!(L, kind, First { rows, batch, span, keeps_sum });
        for slot in bits(far) {
            let batch = batch.one(slot);
            self.gate_values::<L>(act, batch, span);
            let rows = &mut *self;
            enter!(L, USUAL, First { rows, batch, span, keeps_sum });
        }
        far
    }

    /// Normalizes batch after batch.
    #[inline(always)]
    fn normalize<L>(&mut self, options: &Normalize, mut batches: Batches)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let loops = self.kind < USUAL && !self.with.center;
        let gate = self.with.gate.is_none() || self.with.fused.is_some();
        let staggers = loops && gate && self.groups.staggers::<L>();
        let mut coming = batches.next();
        // The slots of the batch that is coming, if its first pass is done.
        let mut found = None;
        while let Some(batch) = coming {
            let far = match found.take() {
                Some(far) => far,
                None => self.statistics::<L>(options, batch),
            };
            coming = batches.next();
            match coming {
                Some(next) if staggers && far == 0 && next.len() == batch.len() => {
                    let far = self.write_and_first::<L>(options.gate_act, batch, next);
                    self.keep(batch);
                    self.statistics_of_sums(options, next.len());
                    found = Some(far);
                }
                _ => {
                    self.write::<L>(options.gate_act, batch, far);
                    self.keep(batch);
                }
            }
        }
    }

    /// Gives the statistics of a batch to the caller, where asked for.
    #[inline(always)]
    fn keep(&mut self, batch: Batch) {
        let ([rstds, means], found) = (&mut self.runs.keeps, &self.found);
        for_each_group!(batch, (row, group, slot) => {
            if let Some(kept) = rstds.row(row).get_mut(group) {
                *kept = found[slot].rstd;
            }
            if let Some(kept) = means.row(row).get_mut(group) {
                *kept = found[slot].mean;
            }
        });
    }

    /// [`ForwardRows::write`] of a batch and [`ForwardRows::first`] of the one that comes next, in one
    /// loop; gives the slots of the latter.
    #[inline(always)]
    fn write_and_first<L>(&mut self, act: Act, batch: Batch, next: Batch) -> u32
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let (kind, span) = (self.kind, &(0..self.groups.len));
        let rows = &mut *self;
        if rows.groups.in_turns {
            L::enter(StaggeredPairs::<L, T> { rows, batch, next, lanes: PhantomData });
            return 0;
        }
        let far = enter!(L, kind, Staggered { rows, batch, next });
        let post = self.with.gate == Some(GatePosition::Post);
        for slot in bits(far) {
            // Anew, without the short form.
            let batch = if post { batch.one(slot) } else { next.one(slot) };
            self.gate_values::<L>(act, batch, span);
            let rows = &mut *self;
            if post {
                enter!(L, USUAL, Output { rows, batch, span });
            } else {
                let keeps_sum = true;
                enter!(L, USUAL, First { rows, batch, span, keeps_sum });
            }
        }
        if post { 0 } else { far }
    }

    /// Finds the statistics of each group; gives the slots of [`ForwardRows::first`].
    #[inline(always)]
    fn statistics<L>(&mut self, options: &Normalize, batch: Batch) -> u32
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let (act, groups, slots) = (options.gate_act, self.groups, batch.len());
        let per_element = 1.0 / groups.len as f64;
        let mut far = 0;
        for_each_span!(L in groups, span => {
            far |= self.first::<L>(act, batch, span, false);
        });
        if self.with.center {
            for (near, sum) in self.nears.iter_mut().zip(&self.sums).take(slots) {
                *near = scalar(sum * per_element);
            }
            for_each_span!(L in groups, span => {
                if groups.len > LONG {
                    let sums = self.sums;
                    self.first::<L>(act, batch, span, false);
                    self.sums = sums;
                }
                let (p, nears) = (&*self.p, &self.nears);
                let (sums, squares) = (&mut self.sums, &mut self.squares);
                L::enter(Squares::<L> { p, groups, slots, span, nears, sums, squares });
            });
        }
        self.statistics_of_sums(options, slots);
        far
    }

    /// The statistics of the first slots, of their sums.
    #[inline(always)]
    fn statistics_of_sums(&mut self, options: &Normalize, slots: usize) {
        let per_element = 1.0 / self.groups.len as f64;
        for slot in 0..slots {
            let (sum, square) = match self.with.center {
                true => (self.sums[slot], self.squares[slot]),
                false => (0.0, self.sums[slot]),
            };
            let delta = sum * per_element;
            let mean_square = square * per_element - delta * delta;
            // Rounding must not make it negative; a NaN stays one.
            let mean_square = if mean_square < 0.0 { 0.0 } else { mean_square };
            let near = self.nears[slot];
            self.found[slot] = Statistics {
                near,
                rest: scalar(delta),
                mean: scalar(near.to_f64() + delta),
                rstd: scalar(1.0 / (mean_square + options.eps).sqrt()),
            };
        }
    }

    /// Writes the output; `far` as [`ForwardRows::first`] gave it.
    #[inline(always)]
    fn write<L>(&mut self, act: Act, batch: Batch, far: u32)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let post = self.with.gate == Some(GatePosition::Post);
        for_each_span!(L in self.groups, span => {
            if self.groups.len > LONG && self.with.keeps_p() {
                self.first::<L>(act, batch, span, true);
            }
            if post && self.with.fused.is_none() {
                self.gate_values::<L>(act, batch, span);
            }
            let mut far = far;
            if far == 0 {
                let (kind, rows) = (self.kind, &mut *self);
                far = enter!(L, kind, Output { rows, batch, span });
            } else {
                for slot in (0..batch.len()).filter(|slot| far >> slot & 1 == 0) {
                    let (kind, rows, batch) = (self.kind, &mut *self, batch.one(slot));
                    enter!(L, kind, Output { rows, batch, span });
                }
            }
            for slot in bits(far) {
                let batch = batch.one(slot);
                if post {
                    self.gate_values::<L>(act, batch, span);
                }
                let rows = &mut *self;
                enter!(L, USUAL, Output { rows, batch, span });
            }
        });
    }
}

/// The bits that are set, by number.
#[inline(always)]
fn bits(mut set: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (set != 0).then(|| set.trailing_zeros() as usize);
        set &= set.wrapping_sub(1);
        bit
    })
}

/// See [`ForwardRows::first`].
struct First<'r, 'g, L, T: Element, const KIND: usize> {
    rows: &'r mut ForwardRows<'g, T>,
    batch: Batch,
    span: &'r Range<usize>,
    keeps_sum: bool,
    lanes: PhantomData<L>,
}

impl<L, T, const KIND: usize> Task for First<'_, '_, L, T, KIND>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let Self { rows, batch, span, .. } = self;
        let (with, stream) = (rows.with.known::<L, KIND>(), rows.stream);
        let keeps_sum = self.keeps_sum && rows.runs.outputs[1].len() > 0;
        let pre = with.gate == Some(GatePosition::Pre);
        let (fused, unfused) = (pre && with.fused.is_some(), pre && with.fused.is_none());
        let zero = L::splat(Real::of(0.0));
        // Each pass asks for some of the next batch, so that memory is busy in both.
        let next = rows.groups.ahead(batch);
        let mut all_far = 0;
        for_each_group!(batch, (row, group, slot) => {
            let group = rows.group(row, group, slot);
            let (mut noted, mut sum_of_all) = (zero, 0.0);
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group.x.len());
                let x = chunk.of(group.x, true);
                let residual = chunk.of(group.residual, with.added == Added::Input);
                let sum = chunk.of_mut(group.sum, keeps_sum || with.added == Added::InPlace);
                let gate = chunk.of(group.gate, fused);
                let gates = chunk.registers::<L>(group.gates, chunk.kept, unfused);
                let kept = chunk.registers_mut::<L>(group.p, chunk.kept, with.keeps_p());
                // Four sums; or one, as the short form needs the registers, and time enough for it to
                // wait.
                let (mut a, mut b, mut c, mut d, mut one) = (zero, zero, zero, zero, zero);
                blocks!(L in chunk.len, read [x, residual, gate, gates], write [sum, kept],
                    (i, whole, total of [a, b, c, d]) => {
                    let total = if fused { &mut one } else { total };
                    prefetch::<L, T>(residual, i, next);
                    prefetch::<L, T>(gate, i, next);
                    let inputs = FirstInputs { x, residual, gate, gates };
                    let p = inputs.p::<L>(with, (sum, keeps_sum), (i, whole), &mut noted, stream);
                    if with.keeps_p() {
                        p.set(kept, i);
                    }
                    *total = if with.center { total.add(p) } else { p.mul_add(p, *total) };
                });
                let total = if fused { one } else { a.add(b).add(c.add(d)) };
                sum_of_all += total.reduce_add().to_f64();
            }
            let so_far = if span.start == 0 { 0.0 } else { rows.sums[slot] };
            rows.sums[slot] = so_far + sum_of_all;
            if fused && L::is_far(noted, SHORT_LIMIT) {
                all_far |= 1 << slot;
            }
        });
        all_far
    }
}

/// The inputs of the first pass.
struct FirstInputs<'r, T: Element> {
    x: &'r [T],
    residual: &'r [T],
    gate: &'r [T],
    gates: &'r [T::Real],
}

impl<T: Element> FirstInputs<'_, T> {
    /// What is normalized, of a block. x + residual goes to the memory of the sum, if it is to be kept.
    #[inline(always)]
    fn p<L>(
        &self,
        with: ForwardWith,
        (sum, keeps_sum): (&mut [T], bool),
        (i, whole): (usize, bool),
        noted: &mut L,
        stream: bool,
    ) -> L
    where
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        let x: L = read(self.x, i, whole);
        let s = match with.added {
            Added::Nothing => x,
            Added::Input => x.add(read(self.residual, i, whole)),
            Added::InPlace => x.add(read(sum, i, whole)),
        };
        if with.added != Added::Nothing && keeps_sum {
            write(s, sum, i, whole, stream);
        }
        match (with.gate, with.fused) {
            (Some(GatePosition::Pre), None) => s.mul(L::get(self.gates, i)),
            (Some(GatePosition::Pre), Some(act)) => {
                *noted = L::note(self.gate, i, *noted);
                s.mul(act.stored_value::<L, true>(read(self.gate, i, whole)))
            }
            _ => s,
        }
    }
}

/// Adds to the sums of p - near and of its square, of a span of each group.
struct Squares<'r, L: Lanes> {
    p: &'r [L::Real],
    groups: Groups,
    slots: usize,
    span: &'r Range<usize>,
    nears: &'r Each<L::Real>,
    sums: &'r mut Each<f64>,
    squares: &'r mut Each<f64>,
}

impl<L> Task for Squares<'_, L>
where
    L: Lanes + Memory<<L as Lanes>::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { groups, .. } = self;
        let zero = L::splat(Real::of(0.0));
        for slot in 0..self.slots {
            let near = L::splat(self.nears[slot]);
            let (mut sum, mut square) = (0.0, 0.0);
            for start in self.span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, groups.len);
                let first = slot * groups.handed_on() + chunk.kept;
                let p = chunk.registers::<L>(self.p, first, true);
                let (mut a, mut b) = ((zero, zero), (zero, zero));
                blocks!(L in chunk.len, read [p], write [], (i, whole, total of [a, b]) => {
                    let mut q = L::get(p, i).sub(near);
                    if !whole {
                        q = inside(q, i, chunk.len);
                    }
                    *total = (total.0.add(q), q.mul_add(q, total.1));
                });
                sum += a.0.add(b.0).reduce_add().to_f64();
                square += a.1.add(b.1).reduce_add().to_f64();
            }
            if self.span.start > 0 {
                (sum, square) = (self.sums[slot] + sum, self.squares[slot] + square);
            }
            (self.sums[slot], self.squares[slot]) = (sum, square);
        }
    }
}

/// Writes the output of a span of each group, and gives the slots, as bits, of those whose gates have
/// arguments that are too large for a short form.
struct Output<'r, 'g, L, T: Element, const KIND: usize> {
    rows: &'r mut ForwardRows<'g, T>,
    batch: Batch,
    span: &'r Range<usize>,
    lanes: PhantomData<L>,
}

impl<L, T, const KIND: usize> Task for Output<'_, '_, L, T, KIND>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let Self { rows, batch, span, .. } = self;
        let (with, stream) = (rows.with.known::<L, KIND>(), rows.stream);
        let post = with.gate == Some(GatePosition::Post);
        let (fused, unfused) = (post && with.fused.is_some(), post && with.fused.is_none());
        let zero = L::splat(Real::of(0.0));
        let next = rows.groups.ahead(batch);
        let mut all_far = 0;
        for_each_group!(batch, (row, group, slot) => {
            let Statistics { near, rest, rstd, .. } = rows.found[slot];
            let (near, rest, scale) = (L::splat(near), L::splat(rest), L::splat(rstd));
            let group = rows.group(row, group, slot);
            let mut noted = zero;
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group.x.len());
                let (x, o) = (chunk.of(group.x, true), chunk.of_mut(group.o, true));
                let gate = with.gate.is_some() && (post || with.fused.is_none());
                let gate = chunk.of(group.gate, gate);
                let kept = chunk.registers::<L>(group.p, chunk.kept, with.keeps_p());
                let gates = chunk.registers::<L>(group.gates, chunk.kept, unfused);
                let factor = chunk.registers::<L>(group.factor, chunk.start, true);
                let bias = chunk.registers::<L>(group.bias, chunk.start, with.bias);
                let (mut a, mut b) = (zero, zero);
                blocks!(L in chunk.len, read [x, gate, kept, gates, factor, bias], write [o],
                    (i, whole, y of [a, b]) => {
                    prefetch::<L, T>(x, i, next);
                    prefetch::<L, T>(gate, i, next);
                    let p: L = if with.keeps_p() { L::get(kept, i) } else { read(x, i, whole) };
                    let q = if with.center { p.sub(near).sub(rest) } else { p };
                    let inputs = OutputInputs { gate, gates, factor, bias };
                    *y = inputs.output::<L>(with, q.mul(scale), (i, whole), &mut noted);
                } then {
                    write_step([a, b], o, (i, whole), with.fused.is_some(), stream);
                });
            }
            if fused && L::is_far(noted, SHORT_LIMIT) {
                all_far |= 1 << slot;
            }
        });
        all_far
    }
}

/// What the output is made of, besides what is normalized.
struct OutputInputs<'r, T: Element> {
    gate: &'r [T],
    gates: &'r [T::Real],
    factor: &'r [T::Real],
    bias: &'r [T::Real],
}

impl<T: Element> OutputInputs<'_, T> {
    /// The output of a block, of r.
    #[inline(always)]
    fn output<L>(&self, with: ForwardWith, r: L, (i, whole): (usize, bool), noted: &mut L) -> L
    where
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        let factor = L::get(self.factor, i);
        let y = match with.bias {
            true => r.mul_add(factor, L::get(self.bias, i)),
            false => r.mul(factor),
        };
        match (with.gate, with.fused) {
            (Some(GatePosition::Post), None) => y.mul(L::get(self.gates, i)),
            (Some(GatePosition::Post), Some(act)) => {
                *noted = L::note(self.gate, i, *noted);
                y.mul(act.stored_value::<L, true>(read(self.gate, i, whole)))
            }
            _ => y,
        }
    }
}

/// [`Output`] of a batch and [`First`] of the one that comes next, block by block in one loop. So memory
/// is read and written all the time, where either pass alone would leave one of the two idle: stores
/// past the caches wait in few buffers. (On an Emerald Rapids, rows of 2,048: 2.2 ns for 16 elements
/// instead of 2.7 from the last-level cache, and 3.2 instead of 3.8 from memory.) The sums are those of
/// [`First`], in the same order. p of a block of the next batch takes the place of what was just used.
/// Gives the slots, as bits, of those whose gates have arguments that are too large for a short form.
struct Staggered<'r, 'g, L, T: Element, const KIND: usize> {
    rows: &'r mut ForwardRows<'g, T>,
    batch: Batch,
    next: Batch,
    lanes: PhantomData<L>,
}

impl<L, T, const KIND: usize> Task for Staggered<'_, '_, L, T, KIND>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let Self { rows, batch, next, .. } = self;
        let (with, stream) = (rows.with.known::<L, KIND>(), rows.stream);
        if const { !L::MANY_REGISTERS || KIND == USUAL } || with.center {
            return 0; // never asked for
        }
        let keeps_sum = rows.runs.outputs[1].len() > 0;
        let post = with.gate == Some(GatePosition::Post);
        let fused = !post && with.fused.is_some();
        let zero = L::splat(Real::of(0.0));
        let mut all_far = 0;
        for slot in 0..batch.len() {
            let (at, next) = (batch.one(slot), next.one(slot));
            let scale = L::splat(rows.found[slot].rstd);
            let [x, residual, gate] = &rows.runs.inputs;
            let of = |at: Batch| rows.groups.range(at.groups.0);
            let next_residual = of_group(residual.row(next.rows.0), of(next));
            let gate_row = if post { at } else { next };
            let gate = of_group(gate.row(gate_row.rows.0), of(gate_row));
            let (group_x, next_x) = (&x.row(at.rows.0)[of(at)], &x.row(next.rows.0)[of(next)]);
            let [o, sum] = &mut rows.runs.outputs;
            let group_o = &mut o.row(at.rows.0)[of(at)];
            let next_sum = of_group_mut(sum.row(next.rows.0), of(next));
            let handed_on = slot * rows.groups.handed_on()..(slot + 1) * rows.groups.handed_on();
            let (group_p, registers) =
                (of_group_mut(rows.p, handed_on), rows.groups.registers(at.groups.0));
            let (group_factor, group_bias) =
                (&rows.factor[registers.clone()], of_group(rows.bias, registers));
            let (mut noted, mut sum_of_all) = (zero, 0.0);
            for start in (0..group_x.len()).step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group_x.len());
                let (x, o) = (chunk.of(group_x, true), chunk.of_mut(group_o, true));
                let next_x = chunk.of(next_x, true);
                let residual = chunk.of(next_residual, with.added == Added::Input);
                let sum = chunk.of_mut(next_sum, keeps_sum || with.added == Added::InPlace);
                let gate = chunk.of(gate, with.gate.is_some());
                let kept = chunk.registers_mut::<L>(group_p, chunk.kept, with.keeps_p());
                let factor = chunk.registers::<L>(group_factor, chunk.start, true);
                let bias = chunk.registers::<L>(group_bias, chunk.start, with.bias);
                // The outputs and the sums of four blocks.
                let (mut a, mut b, mut c, mut d) =
                    ((zero, zero), (zero, zero), (zero, zero), (zero, zero));
                let mut one = zero;
                blocks!(L in chunk.len, read [x, next_x, residual, gate, factor, bias],
                    write [o, sum, kept], (i, whole, at of [a, b, c, d]) => {
                    prefetch_soon::<L, T>(next_x, i);
                    prefetch_soon::<L, T>(residual, i);
                    prefetch_soon::<L, T>(gate, i);
                    let p: L = if with.keeps_p() { L::get(kept, i) } else { read(x, i, whole) };
                    let inputs = OutputInputs { gate, gates: &[], factor, bias };
                    at.0 = inputs.output::<L>(with, p.mul(scale), (i, whole), &mut noted);
                    let inputs = FirstInputs { x: next_x, residual, gate, gates: &[] };
                    let p = inputs.p::<L>(with, (sum, keeps_sum), (i, whole), &mut noted, stream);
                    if with.keeps_p() {
                        p.set(kept, i);
                    }
                    let total = if fused { &mut one } else { &mut at.1 };
                    *total = p.mul_add(p, *total);
                } then {
                    write_step([a.0, b.0, c.0, d.0], o, (i, whole), with.fused.is_some(), stream);
                });
                let total = if fused { one } else { a.1.add(b.1).add(c.1.add(d.1)) };
                sum_of_all += total.reduce_add().to_f64();
            }
            rows.sums[slot] = sum_of_all;
            if with.fused.is_some() && L::is_far(noted, SHORT_LIMIT) {
                all_far |= 1 << slot;
            }
        }
        all_far
    }
}

/// [`Staggered`] of a plain norm, whose batches are of two halves: a row of one half and a row of the
/// other take turns, step by step. So memory is read and written at two places, which keeps more of it
/// busy, and the weight is read half as often. (Emerald Rapids, rows of 2,048 from memory: 0.90 of the
/// time. A loop in C takes 9.0 cycles for 16 elements one row at a time, 8.0 with two, 8.0 to 8.4 with
/// four. With a residual, a gate or backward, turns gain nothing.)
struct StaggeredPairs<'r, 'g, L, T: Element> {
    rows: &'r mut ForwardRows<'g, T>,
    batch: Batch,
    next: Batch,
    lanes: PhantomData<L>,
}

/// Blocks of a step of [`StaggeredPairs`], as many as sums in [`First`], and elements.
const PAIR_BLOCKS: usize = 4;
const PAIR_STEP: usize = PAIR_BLOCKS * MAX_LANES;

/// The most bytes of a row of [`StaggeredPairs`], which asks for the next two in the first-level cache.
const PAIR_ROW: usize = 8 << 10;

impl<L, T> Task for StaggeredPairs<'_, '_, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { rows, batch, next, .. } = self;
        if const { !L::MANY_REGISTERS } {
            return; // never asked for
        }
        let (half, ahead) = (batch.len() / 2, rows.groups.ahead(batch));
        for slot in 0..half {
            let slots = [slot, slot + half];
            let (at, next) = (slots.map(|s| batch.rows.0 + s), slots.map(|s| next.rows.0 + s));
            let scales = slots.map(|slot| rows.found[slot].rstd);
            let x = &rows.runs.inputs[0];
            let (x, next_x) = (at.map(|row| x.row(row)), next.map(|row| x.row(row)));
            let mut o = rows.runs.outputs[0].two_rows(at);
            let mut sums_of_all = [0.0; 2];
            for start in (0..x[0].len()).step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, x[0].len());
                let factor = chunk.registers::<L>(rows.factor, chunk.start, true);
                let [o_0, o_1] = &mut o;
                let mut turns = [
                    Turn::<L, T>::new(chunk, (x[0], next_x[0]), o_0, scales[0]),
                    Turn::<L, T>::new(chunk, (x[1], next_x[1]), o_1, scales[1]),
                ];
                for (step, factor) in factor.as_chunks().0.iter().enumerate() {
                    for turn in &mut turns {
                        turn.step(step, factor, ahead, rows.stream);
                    }
                }
                for (sum, turn) in sums_of_all.iter_mut().zip(turns) {
                    let [a, b, c, d] = turn.sums;
                    *sum += a.add(b).add(c.add(d)).reduce_add().to_f64();
                }
            }
            for (slot, sum) in slots.into_iter().zip(sums_of_all) {
                rows.sums[slot] = sum;
            }
        }
    }
}

/// A chunk of one of two rows that take turns, and of the row that takes its place.
struct Turn<'r, L, T: Element> {
    x: &'r [[T; PAIR_STEP]],
    next_x: &'r [[T; PAIR_STEP]],
    o: &'r mut [[T; PAIR_STEP]],
    scale: L,
    sums: [L; PAIR_BLOCKS],
}

impl<'r, L, T> Turn<'r, L, T>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    #[inline(always)]
    fn new(chunk: Chunk, (x, next_x): (&'r [T], &'r [T]), o: &'r mut [T], scale: T::Real) -> Self {
        Self {
            x: chunk.of(x, true).as_chunks().0,
            next_x: chunk.of(next_x, true).as_chunks().0,
            o: chunk.of_mut(o, true).as_chunks_mut().0,
            scale: L::splat(scale),
            sums: [L::splat(Real::of(0.0)); PAIR_BLOCKS],
        }
    }

    /// Writes a step of the output, and adds one of the next row to the sums. Asks for what lies `ahead`
    /// elements behind that.
    #[inline(always)]
    fn step(&mut self, step: usize, factor: &[T::Real; PAIR_STEP], ahead: usize, stream: bool) {
        let (x, next_x) = (&self.x[step], &self.next_x[step]);
        let mut outputs = [self.scale; PAIR_BLOCKS];
        for k in 0..PAIR_BLOCKS {
            let i = k * MAX_LANES;
            for line in lines_ahead::<L, T>(next_x, i, ahead) {
                L::prefetch(line);
            }
            let (x, p): (L, L) = (L::read_whole(x, i), L::read_whole(next_x, i));
            outputs[k] = x.mul(self.scale).mul(L::get(factor, i));
            self.sums[k] = p.mul_add(p, self.sums[k]);
        }
        write_step(outputs, &mut self.o[step], (0, true), false, stream);
    }
}

/// g(gate) of a chunk and, unless `slopes` is empty, g'(gate), in register order. They need not be
/// `exactly` right where all that comes of them is stored as the gate is.
#[inline(always)]
fn gate_values<L, T>(
    act: Act,
    exactly: bool,
    gate: &[T],
    chunk: Chunk,
    values: &mut [T::Real],
    slopes: &mut [T::Real],
) where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T>,
{
    /// With `SHORT`, short forms of whole blocks only, and tells whether there are arguments too
    /// large for them; else all from `start` on.
    struct Values<'r, L, T: Element, const SHORT: bool> {
        act: Act,
        gate: &'r [T],
        start: usize,
        exactly: bool,
        values: &'r mut [T::Real],
        slopes: &'r mut [T::Real],
        lanes: PhantomData<L>,
    }
    impl<L, T, const SHORT: bool> Task for Values<'_, L, T, SHORT>
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        type Output = bool;
        #[inline(always)]
        fn run(self) -> bool {
            let Self { act, gate, start, exactly, values, slopes, .. } = self;
            let mut noted = L::splat(Real::of(0.0));
            let len = if SHORT { gate.len() / L::N * L::N } else { gate.len() };
            specialized!(act => for i in (start..len).step_by(L::N) {
                let x = read::<L, T>(gate, i, SHORT);
                if SHORT {
                    noted = L::note(gate, i, noted);
                }
                let (value, slope) = if SHORT {
                    act.stored_value_and_slope::<L, true>(x)
                } else if exactly || const { !L::HAS_SHORT } {
                    act.value_and_slope(x)
                } else {
                    act.stored_value_and_slope::<L, false>(x)
                };
                value.set(values, i);
                if !slopes.is_empty() {
                    slope.set(slopes, i);
                }
            });
            SHORT && L::is_far(noted, SHORT_LIMIT)
        }
    }
    let (gate, has_slopes, lanes) = (chunk.of(gate, true), !slopes.is_empty(), PhantomData::<L>);
    let values = chunk.registers_mut::<L>(values, chunk.kept, true);
    let slopes = chunk.registers_mut::<L>(slopes, chunk.kept, has_slopes);
    let mut start = 0;
    if const { L::HAS_SHORT } && !exactly && act.has_short_form() {
        let short = Values::<_, _, true> { act, gate, start, exactly, values, slopes, lanes };
        if !L::enter(short) {
            start = gate.len() / L::N * L::N;
        }
    }
    if start < gate.len() {
        L::enter(Values::<_, _, false> { act, gate, start, exactly, values, slopes, lanes });
    }
}

/// What takes part in a backward call, and what is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BackwardWith {
    residual: bool,
    gate: Option<GatePosition>,
    /// As in [`ForwardWith`].
    fused: Option<Act>,
    center: bool,
    grad_sum: bool,
    dx: bool,
    dresidual: bool,
    dgate: bool,
    dweight: bool,
    dbias: bool,
}

impl BackwardWith {
    const RMS: Self = Self {
        residual: false,
        gate: None,
        fused: None,
        center: false,
        grad_sum: false,
        dx: true,
        dresidual: false,
        dgate: false,
        dweight: true,
        dbias: false,
    };

    /// As [`ForwardWith::usual`].
    const fn usual(kind: usize, short: bool) -> Self {
        let rms = Self::RMS;
        let pre = Self { gate: Some(GatePosition::Pre), dgate: true, ..rms };
        let post = Self { gate: Some(GatePosition::Post), dgate: true, ..rms };
        let [sigmoid, silu] = short_gates(short);
        match kind {
            0 => rms,
            1 => Self { dweight: false, ..rms },
            2 => Self { residual: true, ..rms },
            3 => Self { grad_sum: true, ..rms },
            4 => Self { center: true, dbias: true, ..rms },
            5 => Self { fused: sigmoid, ..pre },
            6 => Self { fused: sigmoid, ..post },
            7 => Self { fused: silu, ..pre },
            _ => Self { fused: silu, ..post },
        }
    }

    /// What the loops of a kind know.
    #[inline(always)]
    fn known<L: Math, const KIND: usize>(self) -> Self {
        if KIND < USUAL {
            const { Self::usual(KIND, L::HAS_SHORT) }
        } else {
            Self { fused: None, ..self }
        }
    }

    /// The kind of this call. If it is no usual one, the gate is not fused.
    #[inline(always)]
    fn kind<L: Math>(&mut self) -> usize {
        let (mut kind, with) = (0, *self);
        while kind < USUAL && Self::usual(kind, L::HAS_SHORT) != with {
            kind += 1;
        }
        if kind == USUAL {
            self.fused = None;
        }
        kind
    }

    /// Whether the gradient of p is needed.
    #[inline(always)]
    fn dp(self) -> bool {
        self.dx || self.dresidual || (self.dgate && self.gate == Some(GatePosition::Pre))
    }
}

struct Backward<'r> {
    options: Normalize,
    with: BackwardWith,
    factor: Reals<'r>,
    bias: Reals<'r>,
    part: Part<'r, 5, 3, 2, 0>,
    stream: bool,
    /// Whether the parameters, and so their gradients, are of a wider type than x.
    exactly: bool,
    /// Where the gradients of the weight and of the bias, whichever are asked for, are summed.
    sums: RealsMut<'r>,
}

impl Kernel for Backward<'_> {
    #[inline(always)]
    fn run<L, T>(mut self)
    where
        T: Element,
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let groups = Groups::new(self.factor.len(), self.options.groups);
        let act = self.options.gate_act;
        let fused = match self.exactly || self.bias.len() > 0 {
            true => None,
            false => fusible::<L>(act, self.with.gate, groups.len),
        };
        let mut with = BackwardWith { fused, ..self.with };
        let mut kind = with.kind::<L>();
        if groups.len == 0 {
            return;
        }
        // A call that is usual but for the gradient of the weight, which nobody asks for: to sum it all
        // the same takes half the time of the general code.
        let mut forgotten = Scratch::<T::Real>::new(0);
        if const { L::N == MAX_LANES } && kind == USUAL && !with.dweight && !with.dbias {
            let mut more = BackwardWith { fused, dweight: true, ..self.with };
            let usual = more.kind::<L>();
            if usual < USUAL {
                (with, kind) = (more, usual);
                forgotten = Scratch::zeros(groups.padded());
            }
        }
        let factor = groups.widen::<L>(self.factor.get());
        let bias = groups.widen::<L>(self.bias.get());
        let (mut gates, mut slopes) =
            (groups.memory(with.gate.is_some()), groups.memory(with.gate.is_some()));
        let sums: &mut [T::Real] =
            if forgotten.is_empty() { self.sums.get() } else { &mut forgotten };
        let dweight_len = if with.dweight { groups.padded() } else { 0 };
        // The sums of a part that has no more rows are recent themselves.
        let few = self.part.range().len() <= RECENT;
        let mut recent = Scratch::<T::Real>::zeros(if few { 0 } else { sums.len() });
        let zero = Real::of(0.0);
        let none = Means { delta: zero, dr: zero, rdr: zero };
        let mut left = self.part.range().len();
        while left > 0 {
            let into = if few { &mut *sums } else { &mut recent };
            let (dweight, dbias) = into.split_at_mut(dweight_len);
            let mut wanted = RECENT.min(left);
            left -= wanted;
            while let Some(runs) = self.part.next_run::<T>(wanted) {
                wanted -= runs.rows;
                let batches = groups.batches(runs.rows);
                let mut rows = BackwardRows::<T> {
                    kind,
                    with,
                    groups,
                    runs,
                    factor: &factor,
                    bias: &bias,
                    dweight: &mut *dweight,
                    dbias: &mut *dbias,
                    gates: &mut gates,
                    slopes: &mut slopes,
                    statistics: [[zero; 2]; BATCH],
                    sums: [[0.0; 3]; BATCH],
                    means: [none; BATCH],
                    exactly: self.exactly,
                    // As `Act::pull_back` does.
                    cuts: matches!(act, Act::Relu | Act::ReluSquared),
                    stream: self.stream,
                };
                rows.differentiate::<L>(act, batches);
            }
            if !few {
                add_recent::<L>(&mut recent, sums);
            }
        }
    }
}

/// Adds what was summed of late to the sums of the part, and starts anew.
#[inline(always)]
fn add_recent<L: Lanes>(recent: &mut [L::Real], sums: &mut [L::Real]) {
    let zero = L::splat(Real::of(0.0));
    for i in (0..sums.len()).step_by(L::N) {
        L::get(sums, i).add(L::get(recent, i)).set(sums, i);
        zero.set(recent, i);
    }
}

/// What the gradients of a group need of all of it.
#[derive(Clone, Copy)]
struct Means<R> {
    /// What is left of the mean of p.
    delta: R,
    dr: R,
    /// That of r * dr.
    rdr: R,
}

/// Some rows of a backward.
struct BackwardRows<'r, T: Element> {
    kind: usize,
    with: BackwardWith,
    groups: Groups,
    runs: Runs<'r, T, 5, 3, 2>,
    factor: &'r [T::Real],
    bias: &'r [T::Real],
    dweight: &'r mut [T::Real],
    dbias: &'r mut [T::Real],
    /// g(gate), of each group of a batch; or exp(-gate), if the gate is fused.
    gates: &'r mut [T::Real],
    /// g'(gate), of each group of a batch.
    slopes: &'r mut [T::Real],
    /// Of each group of a batch: the kept mean and rstd; sums of q, of dr and of q * dr; and what comes
    /// of them.
    statistics: Each<[T::Real; 2]>,
    sums: Each<[f64; 3]>,
    means: Each<Means<T::Real>>,
    /// As in [`Backward`].
    exactly: bool,
    /// Whether the gate's gradient is 0 where the slope is, whatever arrives.
    cuts: bool,
    stream: bool,
}

/// The operands of a group.
struct BackwardGroup<'r, T: Element> {
    grad: &'r [T],
    x: &'r [T],
    residual: &'r [T],
    gate: &'r [T],
    grad_sum: &'r [T],
    dx: &'r mut [T],
    dresidual: &'r mut [T],
    dgate: &'r mut [T],
    factor: &'r [T::Real],
    bias: &'r [T::Real],
    dweight: &'r mut [T::Real],
    dbias: &'r mut [T::Real],
    gates: &'r mut [T::Real],
    slopes: &'r mut [T::Real],
}

impl<T: Element> BackwardRows<'_, T> {
    #[inline(always)]
    fn group(&mut self, row: usize, group: usize, slot: usize) -> BackwardGroup<'_, T> {
        let (range, registers) = (self.groups.range(group), self.groups.registers(group));
        let handed_on = slot * self.groups.handed_on()..(slot + 1) * self.groups.handed_on();
        let [grad, x, residual, gate, grad_sum] = &self.runs.inputs;
        let [dx, dresidual, dgate] = &mut self.runs.outputs;
        BackwardGroup {
            grad: &grad.row(row)[range.clone()],
            x: &x.row(row)[range.clone()],
            residual: of_group(residual.row(row), range.clone()),
            gate: of_group(gate.row(row), range.clone()),
            grad_sum: of_group(grad_sum.row(row), range.clone()),
            dx: of_group_mut(dx.row(row), range.clone()),
            dresidual: of_group_mut(dresidual.row(row), range.clone()),
            dgate: of_group_mut(dgate.row(row), range),
            factor: &self.factor[registers.clone()],
            bias: of_group(self.bias, registers.clone()),
            dweight: of_group_mut(self.dweight, registers.clone()),
            dbias: of_group_mut(self.dbias, registers),
            gates: of_group_mut(self.gates, handed_on.clone()),
            slopes: of_group_mut(self.slopes, handed_on),
        }
    }

    /// g(gate) and g'(gate) of a span of each group of a batch.
    #[inline(always)]
    fn gate_values<L>(&mut self, act: Act, batch: Batch, span: &Range<usize>)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let exactly = self.exactly;
        for_each_group!(batch, (row, group, slot) => {
            let BackwardGroup { x, gate, gates, slopes, .. } = self.group(row, group, slot);
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, x.len());
                gate_values::<L, T>(act, exactly, gate, chunk, gates, slopes);
            }
        });
    }

    /// The gradients of batch after batch; as [`ForwardRows::normalize`].
    #[inline(always)]
    fn differentiate<L>(&mut self, act: Act, mut batches: Batches)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let loops = self.kind < USUAL && !self.with.center;
        let gate = self.with.gate.is_none() || self.with.fused.is_some();
        let staggers = loops && gate && self.groups.staggers::<L>();
        let mut coming = batches.next();
        let mut found = None;
        while let Some(batch) = coming {
            let far = match found.take() {
                Some(far) => far,
                None => self.means::<L>(act, batch),
            };
            coming = batches.next();
            match coming {
                Some(next) if staggers && far == 0 && next.len() == batch.len() => {
                    let (kind, rows) = (self.kind, &mut *self);
                    let far = enter!(L, kind, StaggeredGradients { rows, batch, next });
                    self.take_statistics(next);
                    self.sums_anew::<L>(act, next, &(0..self.groups.len), far);
                    self.means_of_sums(next.len());
                    found = Some(far);
                }
                _ => self.gradients::<L>(act, batch, far),
            }
        }
    }

    /// Takes what the forward has kept of each group.
    #[inline(always)]
    fn take_statistics(&mut self, batch: Batch) {
        let [rstds, means] = &self.runs.kept;
        for_each_group!(batch, (row, group, slot) => {
            let rstd = scalar(rstds.row(row)[group].to_f64());
            let mean = scalar(means.row(row).get(group).map_or(0.0, |mean| mean.to_f64()));
            self.statistics[slot] = [mean, rstd];
        });
    }

    /// The sums of some slots without the short form of the gate.
    #[inline(always)]
    fn sums_anew<L>(&mut self, act: Act, batch: Batch, span: &Range<usize>, slots: u32)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        for slot in bits(slots) {
            let batch = batch.one(slot);
            self.gate_values::<L>(act, batch, span);
            let rows = &mut *self;
            enter!(L, USUAL, Sums { rows, batch, span });
        }
    }

    /// The means of the first slots, of their sums.
    #[inline(always)]
    fn means_of_sums(&mut self, slots: usize) {
        let per_element = 1.0 / self.groups.len as f64;
        for slot in 0..slots {
            let ([q, dr, qdr], [_, rstd]) = (self.sums[slot], self.statistics[slot]);
            let delta = q * per_element;
            let rdr = (qdr - delta * dr) * rstd.to_f64() * per_element;
            let (delta, dr, rdr) = (scalar(delta), scalar(dr * per_element), scalar(rdr));
            self.means[slot] = Means { delta, dr, rdr };
        }
    }

    /// Whether there is a pass for the means.
    #[inline(always)]
    fn needs_means(&self) -> bool {
        self.with.center || self.with.dp()
    }

    /// Finds the means of each group; gives the slots, as bits, of those whose gates have arguments
    /// that are too large for a short form.
    #[inline(always)]
    fn means<L>(&mut self, act: Act, batch: Batch) -> u32
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        self.take_statistics(batch);
        let mut far = 0;
        if !self.needs_means() {
            return far;
        }
        let unfused = self.with.gate.is_some() && self.with.fused.is_none();
        for_each_span!(L in self.groups, span => {
            if unfused {
                self.gate_values::<L>(act, batch, span);
            }
            let (kind, rows) = (self.kind, &mut *self);
            let found = enter!(L, kind, Sums { rows, batch, span });
            self.sums_anew::<L>(act, batch, span, found);
            far |= found;
        });
        self.means_of_sums(batch.len());
        far
    }

    /// Writes the gradients, and adds to those of the parameters; `far` as
    /// [`BackwardRows::means`] gave it.
    #[inline(always)]
    fn gradients<L>(&mut self, act: Act, batch: Batch, far: u32)
    where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let unfused = self.with.gate.is_some() && self.with.fused.is_none();
        for_each_span!(L in self.groups, span => {
            if unfused && (self.groups.len > LONG || !self.needs_means()) {
                self.gate_values::<L>(act, batch, span);
            }
            if far == 0 {
                let (kind, rows) = (self.kind, &mut *self);
                enter!(L, kind, Gradients { rows, batch, span });
                continue;
            }
            // One by one, in order: so that the parameters' gradients are summed in it.
            for slot in 0..batch.len() {
                let kind = if far >> slot & 1 == 1 { USUAL } else { self.kind };
                let (rows, batch) = (&mut *self, batch.one(slot));
                enter!(L, kind, Gradients { rows, batch, span });
            }
        });
    }
}

/// The inputs that both passes of the backward start from.
struct Inputs<'r, T: Element> {
    grad: &'r [T],
    x: &'r [T],
    residual: &'r [T],
    factor: &'r [T::Real],
}

/// A block of them.
struct Loaded<L> {
    /// The gradient that arrives.
    grad: L,
    /// x + residual.
    sum: L,
    /// p minus the kept mean.
    q: L,
    /// The gradient of the output before the gate.
    grad1: L,
    /// The weight with all that is worked into it.
    factor: L,
    /// The gradient of r.
    dr: L,
}

impl<T: Element> Inputs<'_, T> {
    /// `gate` is the gate's value, if there is a gate.
    #[inline(always)]
    fn load<L>(&self, with: BackwardWith, mean: L, gate: L, i: usize, whole: bool) -> Loaded<L>
    where
        L: Lanes<Real = T::Real> + Memory<T>,
    {
        let grad: L = read(self.grad, i, whole);
        let mut sum: L = read(self.x, i, whole);
        if with.residual {
            sum = sum.add(read(self.residual, i, whole));
        }
        let (p, grad1) = match with.gate {
            None => (sum, grad),
            Some(GatePosition::Pre) => (sum.mul(gate), grad),
            Some(GatePosition::Post) => (sum, grad.mul(gate)),
        };
        let q = if with.center { p.sub(mean) } else { p };
        let factor = L::get(self.factor, i);
        Loaded { grad, sum, q, grad1, factor, dr: grad1.mul(factor) }
    }
}

impl<T: Element> Inputs<'_, T> {
    /// [`Inputs::load`] of the first pass. Of a fused gate, it keeps e in the place of `gates`, which
    /// otherwise has the gate's values.
    #[inline(always)]
    fn load_and_gate<L>(
        &self,
        with: BackwardWith,
        mean: L,
        (gate, gates): (&[T], &mut [T::Real]),
        (i, whole): (usize, bool),
        noted: &mut L,
    ) -> Loaded<L>
    where
        L: Math + Lanes<Real = T::Real> + Memory<T>,
    {
        let value = match (with.gate, with.fused) {
            (None, _) => L::splat(Real::of(0.0)),
            (_, None) => L::get(gates, i),
            (_, Some(act)) => {
                *noted = <L as Memory<T>>::note(gate, i, *noted);
                let e = read::<L, T>(gate, i, whole).exp_minus_for_store();
                e.set(gates, i);
                Fused::new(e).value(act, gate, i, whole)
            }
        };
        self.load::<L>(with, mean, value, i, whole)
    }
}

/// What the gate's value and slope are made of, where it is fused: with e = exp(-gate) and
/// s = 1 / (1 + e), sigmoid is s, and silu is gate * s. The first pass keeps e for the second, which
/// takes less memory than to keep both, and less time than to find e again.
struct Fused<L> {
    e: L,
    s: L,
    divisor: L,
}

impl<L: Math> Fused<L> {
    #[inline(always)]
    fn new(e: L) -> Self {
        let divisor = e.add(L::splat(Real::of(1.0)));
        Self { e, s: divisor.reciprocal_for_store(), divisor }
    }

    /// g(gate) of a block; only silu reads it.
    #[inline(always)]
    fn value<T>(&self, act: Act, gate: &[T], i: usize, whole: bool) -> L
    where
        T: Element<Real = L::Real>,
        L: Memory<T>,
    {
        if act == Act::Silu { read::<L, T>(gate, i, whole).mul(self.s) } else { self.s }
    }

    /// g'(gate) of a block of silu.
    #[inline(always)]
    fn silu_slope(&self, gate: L) -> L {
        gate.mul_add(self.e, self.divisor).mul(self.s).mul(self.s)
    }
}

/// Adds to the sums of q and of dr, if centered, and of q * dr, of a span of each group; gives the
/// slots, as bits, of those whose gates have arguments that are too large for a short form.
struct Sums<'r, 'g, L, T: Element, const KIND: usize> {
    rows: &'r mut BackwardRows<'g, T>,
    batch: Batch,
    span: &'r Range<usize>,
    lanes: PhantomData<L>,
}

impl<L, T, const KIND: usize> Task for Sums<'_, '_, L, T, KIND>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let Self { rows, batch, span, .. } = self;
        let with = rows.with.known::<L, KIND>();
        let zero = L::splat(Real::of(0.0));
        // As in `First`.
        let (fused, next) = (with.fused.is_some(), rows.groups.ahead(batch));
        let mut all_far = 0;
        for_each_group!(batch, (row, group, slot) => {
            let mean = L::splat(rows.statistics[slot][0]);
            let group = rows.group(row, group, slot);
            let (mut noted, mut sums) = (zero, [0.0; 3]);
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group.x.len());
                let grad = chunk.of(group.grad, true);
                let x = chunk.of(group.x, true);
                let residual = chunk.of(group.residual, with.residual);
                let factor = chunk.registers::<L>(group.factor, chunk.start, true);
                let gate = chunk.of(group.gate, with.fused.is_some());
                let gates = chunk.registers_mut::<L>(group.gates, chunk.kept, with.gate.is_some());
                let (mut qs, mut drs, mut a, mut b, mut one) = (zero, zero, zero, zero, zero);
                blocks!(L in chunk.len, read [grad, x, residual, factor, gate], write [gates],
                    (i, whole, qdrs of [a, b]) => {
                    prefetch::<L, T>(gate, i, next);
                    let inputs = Inputs { grad, x, residual, factor };
                    let at = inputs.load_and_gate::<L>(with, mean, (gate, gates), (i, whole), &mut noted);
                    let qdrs = if fused { &mut one } else { qdrs };
                    *qdrs = at.q.mul_add(at.dr, *qdrs);
                    if with.center {
                        qs = qs.add(if whole { at.q } else { inside(at.q, i, chunk.len) });
                        drs = drs.add(at.dr);
                    }
                });
                let qdrs = if fused { one } else { a.add(b) };
                for (sum, found) in sums.iter_mut().zip([qs, drs, qdrs]) {
                    *sum += found.reduce_add().to_f64();
                }
            }
            if span.start > 0 {
                for (sum, so_far) in sums.iter_mut().zip(rows.sums[slot]) {
                    *sum += so_far;
                }
            }
            rows.sums[slot] = sums;
            if fused && <L as Memory<T>>::is_far(noted, SHORT_LIMIT) {
                all_far |= 1 << slot;
            }
        });
        all_far
    }
}

/// Writes the gradients of a span of each group, and adds to those of the parameters.
struct Gradients<'r, 'g, L, T: Element, const KIND: usize> {
    rows: &'r mut BackwardRows<'g, T>,
    batch: Batch,
    span: &'r Range<usize>,
    lanes: PhantomData<L>,
}

impl<L, T, const KIND: usize> Task for Gradients<'_, '_, L, T, KIND>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { rows, batch, span, lanes } = self;
        let (with, stream, cuts) = (rows.with, rows.stream, rows.cuts);
        let next = rows.groups.ahead(batch);
        for_each_group!(batch, (row, group, slot) => {
            let (statistics, means) = (rows.statistics[slot], rows.means[slot]);
            let group = &mut rows.group(row, group, slot);
            for start in span.clone().step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group.x.len());
                let options = (with, stream, cuts);
                let group = &mut *group;
                L::enter(GradientsOfChunk::<L, T, KIND> {
                    options,
                    group,
                    chunk,
                    statistics,
                    means,
                    next,
                    lanes,
                });
            }
        });
    }
}

/// [`Gradients`] of a chunk of one group. A function of its own, as its loop needs all registers.
struct GradientsOfChunk<'r, 'g, L, T: Element, const KIND: usize> {
    /// What takes part, whether to stream, and [`BackwardRows::cuts`].
    options: (BackwardWith, bool, bool),
    group: &'r mut BackwardGroup<'g, T>,
    chunk: Chunk,
    statistics: [T::Real; 2],
    means: Means<T::Real>,
    /// How many elements behind this chunk to ask for memory.
    next: usize,
    lanes: PhantomData<L>,
}

impl<L, T, const KIND: usize> Task for GradientsOfChunk<'_, '_, L, T, KIND>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let Self { options: (with, stream, cuts), group, chunk, next, .. } = self;
        let with = with.known::<L, KIND>();
        let zero = L::splat(Real::of(0.0));
        let fused = with.fused.is_some();
        let numbers = Numbers::new(self.statistics, self.means);
        let grad = chunk.of(group.grad, true);
        let x = chunk.of(group.x, true);
        let residual = chunk.of(group.residual, with.residual);
        let gate = chunk.of(group.gate, with.gate.is_some());
        let grad_sum = chunk.of(group.grad_sum, with.grad_sum);
        let factor = chunk.registers::<L>(group.factor, chunk.start, true);
        let bias = chunk.registers::<L>(group.bias, chunk.start, !group.bias.is_empty());
        let gates = chunk.registers::<L>(group.gates, chunk.kept, with.gate.is_some());
        let slopes = chunk.registers::<L>(group.slopes, chunk.kept, with.dgate && !fused);
        let dx = chunk.of_mut(group.dx, with.dx);
        let dresidual = chunk.of_mut(group.dresidual, with.dresidual);
        let dgate = chunk.of_mut(group.dgate, with.dgate);
        let dweight = chunk.registers_mut::<L>(group.dweight, chunk.start, with.dweight);
        let dbias = chunk.registers_mut::<L>(group.dbias, chunk.start, with.dbias);
        let (mut a, mut b) = ((), ());
        blocks!(L in chunk.len,
            read [grad, x, residual, gate, grad_sum, factor, bias, gates, slopes],
            write [dx, dresidual, dgate, dweight, dbias],
            (i, whole, _slot of [a, b]) => {
            prefetch::<L, T>(x, i, next);
            prefetch::<L, T>(grad, i, next);
            prefetch::<L, T>(residual, i, next);
            if !fused {
                prefetch::<L, T>(gate, i, next);
            }
            let kept = if with.gate.is_some() { L::get(gates, i) } else { zero };
            let from = GradientInputs {
                at: Inputs { grad, x, residual, factor },
                gate,
                grad_sum,
                bias,
                slopes,
            };
            let to = GradientOutputs { dx, dresidual, dgate, dweight, dbias };
            from.write::<L>(with, kept, &numbers, to, (i, whole), (stream, cuts));
        });
    }
}

/// What the blocks of a group share.
struct Numbers<L> {
    mean: L,
    rstd: L,
    delta: L,
    mean_dr: L,
    mean_rdr: L,
}

impl<L: Lanes> Numbers<L> {
    #[inline(always)]
    fn new([mean, rstd]: [L::Real; 2], Means { delta, dr, rdr }: Means<L::Real>) -> Self {
        let [mean, rstd, delta, mean_dr, mean_rdr] = [mean, rstd, delta, dr, rdr].map(L::splat);
        Self { mean, rstd, delta, mean_dr, mean_rdr }
    }
}

/// What gradients are made of.
struct GradientInputs<'r, T: Element> {
    at: Inputs<'r, T>,
    gate: &'r [T],
    grad_sum: &'r [T],
    bias: &'r [T::Real],
    slopes: &'r [T::Real],
}

/// Where they go.
struct GradientOutputs<'r, T: Element> {
    dx: &'r mut [T],
    dresidual: &'r mut [T],
    dgate: &'r mut [T],
    dweight: &'r mut [T::Real],
    dbias: &'r mut [T::Real],
}

impl<T: Element> GradientInputs<'_, T> {
    /// Writes the gradients of a block, and adds to those of the parameters. `kept` is the gate's value,
    /// or e if it is fused.
    #[inline(always)]
    fn write<L>(
        &self,
        with: BackwardWith,
        kept: L,
        numbers: &Numbers<L>,
        to: GradientOutputs<'_, T>,
        (i, whole): (usize, bool),
        (stream, cuts): (bool, bool),
    ) where
        L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
    {
        let zero = L::splat(Real::of(0.0));
        let (pre, fused) = (with.gate == Some(GatePosition::Pre), with.fused.is_some());
        let parts = Fused::new(kept);
        let value = match with.fused {
            None => kept,
            Some(act) => parts.value(act, self.gate, i, whole),
        };
        let at = self.at.load::<L>(with, numbers.mean, value, i, whole);
        // From a fused gate to the results, the ways are short: many have to be under way at once.
        // (Its value is bounded, so that the products are in range in any order.)
        let (short, scale) = (pre && fused, value.mul(numbers.rstd));
        let r = match with.center {
            true => at.q.sub(numbers.delta).mul(numbers.rstd),
            false if short => at.sum.mul(scale),
            false => at.q.mul(numbers.rstd),
        };
        if with.dweight {
            at.grad1.mul_add(r, L::get(to.dweight, i)).set(to.dweight, i);
        }
        if with.dbias {
            at.grad1.add(L::get(to.dbias, i)).set(to.dbias, i);
        }
        let dr = if with.center { at.dr.sub(numbers.mean_dr) } else { at.dr };
        let unscaled = r.neg_mul_add(numbers.mean_rdr, dr);
        let dp = unscaled.mul(numbers.rstd);
        let mut ds = match pre {
            true if short => unscaled.mul(scale),
            true => dp.mul(value),
            false => dp,
        };
        if with.dgate {
            let gradient = match with.fused {
                // sigmoid' is s^2 e. One s of it is in r, which is sum * s * rstd (a fused gate is
                // never centered); or in dr.
                Some(Act::Sigmoid) if pre => unscaled.mul(r.mul(parts.e.mul(parts.s))),
                Some(Act::Sigmoid) => at.dr.mul(r).mul(parts.e.mul(parts.s)),
                Some(_) if pre => {
                    let slope = parts.silu_slope(read(self.gate, i, whole));
                    unscaled.mul(at.sum.mul(numbers.rstd).mul(slope))
                }
                _ => {
                    let dvalue = if pre {
                        dp.mul(at.sum)
                    } else if self.bias.is_empty() {
                        at.grad.mul(r.mul(at.factor))
                    } else {
                        at.grad.mul(r.mul(at.factor).add(L::get(self.bias, i)))
                    };
                    let slope = match fused {
                        true => parts.silu_slope(read(self.gate, i, whole)),
                        false => L::get(self.slopes, i),
                    };
                    let gradient = dvalue.mul(slope);
                    if !fused && cuts {
                        L::select(slope.le(zero), zero, gradient)
                    } else {
                        gradient
                    }
                }
            };
            write_block(gradient, to.dgate, (i, whole), fused, stream);
        }
        if with.grad_sum {
            ds = ds.add(read(self.grad_sum, i, whole));
        }
        if with.dx {
            write_block(ds, to.dx, (i, whole), fused, stream);
        }
        if with.dresidual {
            write_block(ds, to.dresidual, (i, whole), fused, stream);
        }
    }
}

/// [`Gradients`] of a batch and [`Sums`] of the one that comes next, block by block in one loop; see
/// [`Staggered`]. e of a block of the next batch takes the place of what was just used.
struct StaggeredGradients<'r, 'g, L, T: Element, const KIND: usize> {
    rows: &'r mut BackwardRows<'g, T>,
    batch: Batch,
    next: Batch,
    lanes: PhantomData<L>,
}

impl<L, T, const KIND: usize> Task for StaggeredGradients<'_, '_, L, T, KIND>
where
    T: Element,
    L: Math + Lanes<Real = T::Real> + Memory<T> + Memory<T::Real>,
{
    type Output = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        let Self { rows, batch, next, .. } = self;
        let (with, stream, cuts) = (rows.with.known::<L, KIND>(), rows.stream, rows.cuts);
        if const { !L::MANY_REGISTERS || KIND == USUAL } || with.center {
            return 0; // never asked for
        }
        let zero = L::splat(Real::of(0.0));
        let fused = with.fused.is_some();
        let mut all_far = 0;
        for slot in 0..batch.len() {
            let (at, next) = (batch.one(slot), next.one(slot));
            let numbers = Numbers::<L>::new(rows.statistics[slot], rows.means[slot]);
            let [grad, x, residual, gate, _] = &rows.runs.inputs;
            let range = rows.groups.range(next.groups.0);
            let next_grad = &grad.row(next.rows.0)[range.clone()];
            let next_x = &x.row(next.rows.0)[range.clone()];
            let next_residual = of_group(residual.row(next.rows.0), range.clone());
            let next_gate = of_group(gate.row(next.rows.0), range);
            let next_factor = &rows.factor[rows.groups.registers(next.groups.0)];
            let group = rows.group(at.rows.0, at.groups.0, slot);
            let (mut noted, mut sum) = (zero, 0.0);
            for start in (0..group.x.len()).step_by(CHUNK * L::N) {
                let chunk = Chunk::new::<L>(start, group.x.len());
                let grad = chunk.of(group.grad, true);
                let x = chunk.of(group.x, true);
                let residual = chunk.of(group.residual, with.residual);
                let gate = chunk.of(group.gate, with.gate.is_some());
                let grad_sum = chunk.of(group.grad_sum, with.grad_sum);
                let factor = chunk.registers::<L>(group.factor, chunk.start, true);
                let gates = chunk.registers_mut::<L>(group.gates, chunk.kept, with.gate.is_some());
                let dx = chunk.of_mut(group.dx, with.dx);
                let dgate = chunk.of_mut(group.dgate, with.dgate);
                let dweight = chunk.registers_mut::<L>(group.dweight, chunk.start, with.dweight);
                let next_grad = chunk.of(next_grad, true);
                let next_x = chunk.of(next_x, true);
                let next_residual = chunk.of(next_residual, with.residual);
                let next_gate = chunk.of(next_gate, with.gate.is_some());
                let next_factor = chunk.registers::<L>(next_factor, chunk.start, true);
                let (mut a, mut b, mut one) = (zero, zero, zero);
                blocks!(L in chunk.len,
                    read [grad, x, residual, gate, grad_sum, factor,
                        next_grad, next_x, next_residual, next_gate, next_factor],
                    write [gates, dx, dgate, dweight], (i, whole, qdrs of [a, b]) => {
                    prefetch_soon::<L, T>(next_grad, i);
                    prefetch_soon::<L, T>(next_x, i);
                    prefetch_soon::<L, T>(next_residual, i);
                    prefetch_soon::<L, T>(next_gate, i);
                    prefetch_soon::<L, T>(grad_sum, i);
                    let kept = if with.gate.is_some() { L::get(gates, i) } else { zero };
                    // Loads before stores: an address that differs from that of a store just before
                    // in its upper bits only, as those of rows of 4 KiB do, has to wait for it.
                    let inputs = Inputs {
                        grad: next_grad,
                        x: next_x,
                        residual: next_residual,
                        factor: next_factor,
                    };
                    let of_next = (next_gate, &mut *gates);
                    let at = inputs.load_and_gate::<L>(with, zero, of_next, (i, whole), &mut noted);
                    let qdrs = if fused { &mut one } else { qdrs };
                    *qdrs = at.q.mul_add(at.dr, *qdrs);
                    let at = Inputs { grad, x, residual, factor };
                    let from = GradientInputs { at, gate, grad_sum, bias: &[], slopes: &[] };
                    let to = GradientOutputs {
                        dx,
                        dresidual: &mut [],
                        dgate,
                        dweight,
                        dbias: &mut [],
                    };
                    from.write::<L>(with, kept, &numbers, to, (i, whole), (stream, cuts));
                });
                sum += if fused { one } else { a.add(b) }.reduce_add().to_f64();
            }
            rows.sums[slot] = [0.0, 0.0, sum];
            if fused && <L as Memory<T>>::is_far(noted, SHORT_LIMIT) {
                all_far |= 1 << slot;
            }
        }
        all_far
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, with_isa};
    use half::{bf16, f16};

    /// Numbers that repeat from run to run, in -1..1.
    fn numbers(len: usize, seed: u64) -> Vec<f64> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn typed<T: Element>(values: &[f64]) -> Vec<T> {
        values.iter().map(|&value| T::from_f64(value)).collect()
    }

    fn widened<T: Element>(values: &[T]) -> Vec<f64> {
        values.iter().map(|value| value.to_f64()).collect()
    }

    /// The operands of a call with everything in it, as f64.
    #[derive(Clone, Default)]
    struct Case {
        d: usize,
        x: Vec<f64>,
        residual: Option<Vec<f64>>,
        gate: Option<Vec<f64>>,
        weight: Option<Vec<f64>>,
        bias: Option<Vec<f64>>,
        grad: Vec<f64>,
        grad_sum: Option<Vec<f64>>,
    }

    impl Case {
        fn new(rows: usize, d: usize, gated: bool) -> Self {
            let all = |seed| numbers(rows * d, seed);
            Self {
                d,
                x: all(1),
                residual: Some(all(2)),
                gate: gated.then(|| all(3).iter().map(|v| 3.0 * v).collect()),
                weight: Some(numbers(d, 4)),
                bias: Some(numbers(d, 5)),
                grad: all(6),
                grad_sum: Some(all(7)),
            }
        }

        fn rounded<T: Element>(self) -> Self {
            let round = |v: Vec<f64>| widened(&typed::<T>(&v));
            Self {
                x: round(self.x),
                residual: self.residual.map(round),
                gate: self.gate.map(round),
                grad: round(self.grad),
                grad_sum: self.grad_sum.map(round),
                ..self
            }
        }

        fn rows(&self) -> usize {
            self.x.len() / self.d
        }
    }

    /// What a call gives, as f64.
    #[derive(Debug, Clone, Default, PartialEq)]
    struct Outcome {
        o: Vec<f64>,
        sum: Vec<f64>,
        dx: Vec<f64>,
        dresidual: Vec<f64>,
        dgate: Vec<f64>,
        dweight: Vec<f64>,
        dbias: Vec<f64>,
    }

    fn act(act: Act, x: f64) -> (f64, f64) {
        let x = [x];
        let (one, x) = ([1.0], View::new(&x, &[1]).unwrap());
        let value = act.forward(x).unwrap().as_slice::<f64>().unwrap()[0];
        let slope = act.backward(x, View::new(&one, &[1]).unwrap()).unwrap();
        (value, slope.as_slice::<f64>().unwrap()[0])
    }

    /// The formulas at the head of this file, element by element.
    fn plain(norm: &Normalize, case: &Case) -> Outcome {
        let (d, e) = (case.d, case.d / norm.groups);
        let mut out = Outcome {
            o: vec![0.0; case.x.len()],
            dx: vec![0.0; case.x.len()],
            dgate: vec![0.0; case.x.len()],
            dweight: vec![0.0; d],
            dbias: vec![0.0; d],
            ..Outcome::default()
        };
        let residual = |i: usize| case.residual.as_ref().map_or(0.0, |v| v[i]);
        out.sum = (0..case.x.len()).map(|i| case.x[i] + residual(i)).collect();
        let (pre, post) = match (&case.gate, norm.gate_position) {
            (None, _) => (false, false),
            (_, GatePosition::Pre) => (true, false),
            (_, GatePosition::Post) => (false, true),
        };
        let g: Vec<(f64, f64)> = match &case.gate {
            Some(gate) => gate.iter().map(|&x| act(norm.gate_act, x)).collect(),
            None => vec![(1.0, 0.0); case.x.len()],
        };
        let one = if norm.weight_form == WeightForm::OnePlus { 1.0 } else { 0.0 };
        for start in (0..case.x.len()).step_by(e.max(1)) {
            let at = start..start + e;
            let mean = |f: &dyn Fn(usize) -> f64| at.clone().map(f).sum::<f64>() / e as f64;
            let p = |i: usize| out.sum[i] * if pre { g[i].0 } else { 1.0 };
            let m = if norm.center { mean(&p) } else { 0.0 };
            let sigma = (mean(&|i| (p(i) - m).powi(2)) + norm.eps).sqrt();
            let r = |i: usize| (p(i) - m) / sigma;
            let w = |i: usize| norm.scale * case.weight.as_ref().map_or(1.0, |w| one + w[i % d]);
            let o1 = |i: usize| w(i) * r(i) + case.bias.as_ref().map_or(0.0, |b| b[i % d]);
            let do1 = |i: usize| case.grad[i] * if post { g[i].0 } else { 1.0 };
            let dr = |i: usize| do1(i) * w(i);
            let mean_rdr = mean(&|i| r(i) * dr(i));
            let mean_dr = if norm.center { mean(&dr) } else { 0.0 };
            let dp = |i: usize| (dr(i) - r(i) * mean_rdr - mean_dr) / sigma;
            for i in at.clone() {
                out.o[i] = o1(i) * if post { g[i].0 } else { 1.0 };
                let arrives = case.grad_sum.as_ref().map_or(0.0, |v| v[i]);
                out.dx[i] = dp(i) * if pre { g[i].0 } else { 1.0 } + arrives;
                out.dgate[i] = g[i].1 * if pre { dp(i) * out.sum[i] } else { case.grad[i] * o1(i) };
                out.dweight[i % d] += do1(i) * norm.scale * r(i);
                out.dbias[i % d] += do1(i);
            }
        }
        out.dresidual = out.dx.clone();
        out
    }

    /// The same by the operator, forward then backward, into memory full of NaN.
    fn run<T: Element>(norm: &Normalize, case: &Case) -> Result<Outcome> {
        let (rows, d, n) = (case.rows(), case.d, case.x.len());
        let shape = [rows, d];
        let [x, grad] = [&case.x, &case.grad].map(|v| typed::<T>(v));
        let optional = |v: &Option<Vec<f64>>| v.as_ref().map(|v| typed::<T>(v));
        let (residual, gate, grad_sum) =
            (optional(&case.residual), optional(&case.gate), optional(&case.grad_sum));
        let parameter = |v: &Option<Vec<f64>>| v.as_ref().map(|v| typed::<T::Real>(v));
        let (weight, bias) = (parameter(&case.weight), parameter(&case.bias));
        let nan = T::from_f64(f64::NAN);
        let [mut o, mut sum, mut dx, mut dresidual, mut dgate] = [(); 5].map(|()| vec![nan; n]);
        let none = T::Real::of(f64::NAN);
        let [mut rstd, mut mean] = [(); 2].map(|()| vec![none; rows * norm.groups]);
        let [mut dweight, mut dbias] = [(); 2].map(|()| vec![none; d]);
        let residual_view = residual.as_ref().map(|v| View::new(v, &shape).unwrap());
        let gate_view = gate.as_ref().map(|v| View::new(v, &shape).unwrap());
        let grad_sum_view = grad_sum.as_ref().map(|v| View::new(v, &shape).unwrap());
        let weight_view = weight.as_ref().map(|v| View::new(v, &[d]).unwrap());
        let bias_view = bias.as_ref().map(|v| View::new(v, &[d]).unwrap());
        let statistics = [rows, norm.groups];
        let x_view = View::new(&x, &shape)?;
        norm.forward_into(NormalizeForward {
            weight: weight_view,
            bias: bias_view,
            gate: gate_view,
            residual: match residual_view {
                Some(residual) => Residual::AddInto(residual, ViewMut::new(&mut sum, &shape)?),
                None => Residual::None,
            },
            rstd: Some(ViewMut::new(&mut rstd, &statistics)?),
            mean: if norm.center { Some(ViewMut::new(&mut mean, &statistics)?) } else { None },
            ..NormalizeForward::new(x_view, ViewMut::new(&mut o, &shape)?)
        })?;
        norm.backward_into(NormalizeBackward {
            residual: residual_view,
            gate: gate_view,
            weight: weight_view,
            bias: bias_view,
            mean: if norm.center { Some(View::new(&mean, &statistics)?) } else { None },
            grad_residual_out: grad_sum_view,
            dx: Some(ViewMut::new(&mut dx, &shape)?),
            dresidual: Some(ViewMut::new(&mut dresidual, &shape)?),
            dgate: gate.is_some().then(|| ViewMut::new(&mut dgate, &shape)).transpose()?,
            dweight: weight.is_some().then(|| ViewMut::new(&mut dweight, &[d])).transpose()?,
            dbias: Some(ViewMut::new(&mut dbias, &[d])?),
            ..NormalizeBackward::new(
                View::new(&grad, &shape)?,
                x_view,
                View::new(&rstd, &statistics)?,
            )
        })?;
        Ok(Outcome {
            o: widened(&o),
            sum: if residual.is_some() { widened(&sum) } else { case.x.clone() },
            dx: widened(&dx),
            dresidual: widened(&dresidual),
            dgate: if gate.is_some() { widened(&dgate) } else { vec![0.0; n] },
            dweight: if weight.is_some() { widened(&dweight) } else { vec![0.0; d] },
            dbias: widened(&dbias),
        })
    }

    /// The largest difference, relative to the size of the largest element.
    fn error(got: &[f64], want: &[f64]) -> f64 {
        assert_eq!(got.len(), want.len());
        let size = want.iter().fold(1e-3, |m: f64, w| m.max(w.abs()));
        let apart = |(g, w): (&f64, &f64)| if g.is_nan() { f64::INFINITY } else { (g - w).abs() };
        got.iter().zip(want).map(apart).fold(0.0, f64::max) / size
    }

    fn assert_close(got: &Outcome, want: &Outcome, bound: f64, what: &str) {
        let all = |o: &Outcome| {
            let Outcome { o, sum, dx, dresidual, dgate, dweight, dbias } = o.clone();
            [o, sum, dx, dresidual, dgate, dweight, dbias]
        };
        let names = ["o", "sum", "dx", "dresidual", "dgate", "dweight", "dbias"];
        for ((got, want), name) in all(got).iter().zip(all(want)).zip(names) {
            let error = error(got, &want);
            assert!(error <= bound, "{what}: {name} is off by {error:e}");
        }
    }

    /// Options that matter together, for a row of `d`.
    fn variants(d: usize) -> Vec<Normalize> {
        let mut all = vec![
            Normalize::rms_norm(),
            Normalize::layer_norm(),
            Normalize { scale: -1.5, weight_form: WeightForm::OnePlus, ..Normalize::rms_norm() },
        ];
        for groups in [2, 3] {
            if d.is_multiple_of(groups) {
                all.push(Normalize::rms_norm().with_groups(groups));
                all.push(Normalize { scale: 0.5, ..Normalize::layer_norm().with_groups(groups) });
            }
        }
        for norm in all.clone() {
            all.push(Normalize { gate_position: GatePosition::Post, ..norm });
        }
        all
    }

    #[test]
    fn agrees_with_the_formulas() -> Result<()> {
        for isa in Isa::available() {
            with_isa(isa, || -> Result<()> {
                for d in [1, 2, 7, 8, 9, 15, 16, 17, 30, 127, 2048] {
                    for norm in variants(d) {
                        for gated in [false, true] {
                            let what = format!("{isa} d {d} gated {gated} {norm:?}");
                            // A row of one, centered, is all rounding error over a tiny sigma.
                            let norm = if d < 8 { norm.with_eps(0.1) } else { norm };
                            let case = Case::new(3, d, gated);
                            let want = plain(&norm, &case);
                            assert_close(&run::<f64>(&norm, &case)?, &want, 1e-12, &what);
                            let case = case.rounded::<f32>();
                            let want = plain(&norm, &case);
                            assert_close(&run::<f32>(&norm, &case)?, &want, 4e-6, &what);
                            let case = case.rounded::<bf16>();
                            let want = plain(&norm, &case);
                            assert_close(&run::<bf16>(&norm, &case)?, &want, 4.1e-3, &what);
                            let case = case.rounded::<f16>();
                            let want = plain(&norm, &case);
                            assert_close(&run::<f16>(&norm, &case)?, &want, 6.5e-4, &what);
                        }
                    }
                }
                Ok(())
            })??;
        }
        Ok(())
    }

    #[test]
    fn long_rows() -> Result<()> {
        for d in [100_003, 70_000] {
            for norm in [Normalize::rms_norm(), Normalize::layer_norm()] {
                for gated in [false, true] {
                    let case = Case::new(2, d, gated).rounded::<f32>();
                    let want = plain(&norm, &case);
                    assert_close(&run::<f32>(&norm, &case)?, &want, 2e-6, &format!("{d} {norm:?}"));
                }
            }
        }
        Ok(())
    }

    #[test]
    fn every_gate() -> Result<()> {
        for gate_act in Act::ALL {
            for gate_position in [GatePosition::Pre, GatePosition::Post] {
                for center in [false, true] {
                    let norm =
                        Normalize { gate_act, gate_position, center, ..Normalize::default() };
                    for residual in [false, true] {
                        let mut case = Case::new(4, 37, true);
                        if !residual {
                            (case.residual, case.grad_sum) = (None, None);
                        }
                        let what = format!("{norm:?}");
                        let want = plain(&norm, &case);
                        assert_close(&run::<f64>(&norm, &case)?, &want, 1e-11, &what);
                        let case = case.rounded::<f32>();
                        let want = plain(&norm, &case);
                        assert_close(&run::<f32>(&norm, &case)?, &want, 1e-5, &what);
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn gradients_are_those_of_the_forward() -> Result<()> {
        // Central differences of sum(o * grad) + sum(sum * grad_sum), all operands but the weight.
        for gate_position in [GatePosition::Pre, GatePosition::Post] {
            for center in [false, true] {
                let norm = Normalize {
                    gate_position,
                    center,
                    gate_act: Act::Silu,
                    weight_form: WeightForm::OnePlus,
                    scale: 0.7,
                    groups: 2,
                    ..Normalize::default()
                };
                let case = Case::new(2, 6, true);
                let loss = |case: &Case| -> f64 {
                    let out = run::<f64>(&norm, case).unwrap();
                    let sums = case.grad_sum.as_ref().unwrap();
                    let o: f64 = out.o.iter().zip(&case.grad).map(|(a, b)| a * b).sum();
                    o + out.sum.iter().zip(sums).map(|(a, b)| a * b).sum::<f64>()
                };
                let out = run::<f64>(&norm, &case)?;
                type Pick = fn(&mut Case) -> &mut Vec<f64>;
                let operands: [(Pick, &[f64]); 5] = [
                    (|c| &mut c.x, &out.dx),
                    (|c| c.residual.as_mut().unwrap(), &out.dresidual),
                    (|c| c.gate.as_mut().unwrap(), &out.dgate),
                    (|c| c.weight.as_mut().unwrap(), &out.dweight),
                    (|c| c.bias.as_mut().unwrap(), &out.dbias),
                ];
                for (operand, (pick, gradient)) in operands.into_iter().enumerate() {
                    for (i, want) in gradient.iter().enumerate() {
                        let moved = |by: f64| {
                            let mut case = case.clone();
                            pick(&mut case)[i] += by;
                            loss(&case)
                        };
                        let got = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                        assert!((got - want).abs() < 1e-7, "{operand} {i}: {got} {want} {norm:?}");
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_mean_far_above_the_deviation() -> Result<()> {
        for isa in Isa::available() {
            with_isa(isa, || -> Result<()> {
                for mean in [1e4, 1e5, 1e6] {
                    for d in [37, 1000, 5000] {
                        let norm = Normalize::layer_norm();
                        let mut case = Case::new(3, d, false);
                        (case.residual, case.grad_sum) = (None, None);
                        case.x.iter_mut().for_each(|x| *x = mean + 2.0 * *x);
                        let case = case.rounded::<f32>();
                        let want = plain(&norm, &case);
                        let got = run::<f32>(&norm, &case)?;
                        assert_close(&got, &want, 2e-6, &format!("{isa} mean {mean} d {d}"));
                    }
                }
                Ok(())
            })??;
        }
        Ok(())
    }

    #[test]
    fn constant_rows_are_zero_when_centered() -> Result<()> {
        let x = [1234.567f32; 100];
        let o = Normalize::layer_norm().forward(View::new(&x, &[2, 50])?, None)?;
        assert!(o.as_slice::<f32>()?.iter().all(|&o| o == 0.0));
        Ok(())
    }

    #[test]
    fn dx_is_orthogonal_to_r() -> Result<()> {
        let norm = Normalize::layer_norm().with_eps(0.0);
        let (x, grad) = (numbers(500, 1), numbers(500, 2));
        let [x, grad] = [View::new(&x, &[1, 500])?, View::new(&grad, &[1, 500])?];
        let kept = norm.forward_keeping(x, None)?;
        let dx = norm.backward(grad, x, None, &kept)?.dx;
        let (r, dx) = (kept.o.as_slice::<f64>()?, dx.as_slice::<f64>()?);
        assert!(dx.iter().zip(r).map(|(a, b)| a * b).sum::<f64>().abs() < 1e-12);
        assert!(dx.iter().sum::<f64>().abs() < 1e-12);
        Ok(())
    }

    #[test]
    fn the_sum_in_place_is_the_sum() -> Result<()> {
        for d in [19, 70_001] {
            for gate in [false, true] {
                let shape = [2, d];
                let (x, residual) =
                    (typed::<bf16>(&numbers(2 * d, 1)), typed::<bf16>(&numbers(2 * d, 2)));
                let g = typed::<bf16>(&numbers(2 * d, 3));
                let gate = if gate { Some(View::new(&g, &shape)?) } else { None };
                let [mut o, mut sum, mut o2, mut o3] = [(); 4].map(|()| vec![bf16::NAN; 2 * d]);
                let mut in_place = residual.clone();
                let norm = Normalize::layer_norm();
                let x = View::new(&x, &shape)?;
                let residual_view = View::new(&residual, &shape)?;
                norm.forward_into(NormalizeForward {
                    gate,
                    residual: Residual::AddInto(residual_view, ViewMut::new(&mut sum, &shape)?),
                    ..NormalizeForward::new(x, ViewMut::new(&mut o, &shape)?)
                })?;
                norm.forward_into(NormalizeForward {
                    gate,
                    residual: Residual::AddInPlace(ViewMut::new(&mut in_place, &shape)?),
                    ..NormalizeForward::new(x, ViewMut::new(&mut o2, &shape)?)
                })?;
                norm.forward_into(NormalizeForward {
                    gate,
                    residual: Residual::Add(residual_view),
                    ..NormalizeForward::new(x, ViewMut::new(&mut o3, &shape)?)
                })?;
                assert!(sum == in_place && o == o2 && o == o3);
                let added = x.to_f64_vec().into_iter().zip(widened(&residual));
                assert!(added.zip(&sum).all(|((a, b), s)| bf16::from_f64(a + b) == *s));
            }
        }
        Ok(())
    }

    #[test]
    fn from_the_kept_sum() -> Result<()> {
        // Where the sum is exact, the backward from it is the backward from its addends.
        let x: Vec<f32> = numbers(60, 1).iter().map(|v| (v * 64.0).round() as f32).collect();
        let residual: Vec<f32> = x.iter().rev().copied().collect();
        let sum: Vec<f32> = x.iter().zip(&residual).map(|(a, b)| a + b).collect();
        let (grad, rstd) = (typed::<f32>(&numbers(60, 2)), [0.02f32, 0.03]);
        let view = |v| View::new(v, &[2, 30]);
        let (mut from_both, mut from_sum) = ([f32::NAN; 60], [f32::NAN; 60]);
        let rstd = View::new(&rstd, &[2, 1])?;
        let norm = Normalize::rms_norm();
        norm.backward_into(NormalizeBackward {
            residual: Some(view(&residual)?),
            dresidual: Some(ViewMut::new(&mut from_both, &[2, 30])?),
            ..NormalizeBackward::new(view(&grad)?, view(&x)?, rstd)
        })?;
        norm.backward_into(NormalizeBackward {
            dx: Some(ViewMut::new(&mut from_sum, &[2, 30])?),
            ..NormalizeBackward::new(view(&grad)?, view(&sum)?, rstd)
        })?;
        assert_eq!(from_both, from_sum);
        Ok(())
    }

    #[test]
    fn a_large_gate_beside_a_small_row() -> Result<()> {
        // The product of gate and rstd has no place in f32, but those that dx is made of do.
        let (x, gate, grad) = ([0.0f32, 1e-4], [1e36f32, 1.0], [0.0f32, 1.0]);
        let (mut dx, mut dgate) = ([f32::NAN; 2], [f32::NAN; 2]);
        let rms = (1e-8f64 / 2.0 + 1e-6).sqrt();
        let (norm, rstd) =
            (Normalize { gate_act: Act::None, ..Normalize::rms_norm() }, [1.0 / rms as f32]);
        let given = NormalizeBackward::new(
            View::new(&grad, &[1, 2])?,
            View::new(&x, &[1, 2])?,
            View::new(&rstd, &[1, 1])?,
        );
        norm.backward_into(NormalizeBackward {
            gate: Some(View::new(&gate, &[1, 2])?),
            dx: Some(ViewMut::new(&mut dx, &[1, 2])?),
            dgate: Some(ViewMut::new(&mut dgate, &[1, 2])?),
            ..given
        })?;
        let r = 1e-4 / rms;
        let dp = (1.0 - r * r / 2.0) / rms;
        assert_eq!((dx[0], dgate[0]), (0.0, 0.0));
        assert!((f64::from(dx[1]) / dp - 1.0).abs() < 1e-6, "{dx:?} {dp}");
        assert!((f64::from(dgate[1]) / (1e-4 * dp) - 1.0).abs() < 1e-6, "{dgate:?}");
        Ok(())
    }

    #[test]
    fn each_gradient_alone_is_the_same() -> Result<()> {
        let (rows, d) = (20, 45);
        let all = |seed| typed::<bf16>(&numbers(rows * d, seed));
        let (x, gate, grad) = (all(1), all(2), all(3));
        let (weight, bias) = (typed::<f32>(&numbers(d, 4)), typed::<f32>(&numbers(d, 5)));
        for gate_position in [GatePosition::Pre, GatePosition::Post] {
            for center in [false, true] {
                let norm =
                    Normalize { gate_position, center, groups: 3, ..Normalize::layer_norm() };
                let kept = norm.forward_keeping(View::new(&x, &[rows, d])?, None)?;
                let gradients = |ask: [bool; 5]| -> Result<_> {
                    let [mut dx, mut dresidual, mut dgate] =
                        [(); 3].map(|()| vec![bf16::ZERO; rows * d]);
                    let (mut dweight, mut dbias) = (vec![f32::NAN; d], vec![bf16::NAN; d]);
                    let shape = [rows, d];
                    fn wish<'v, T: Element>(
                        ask: bool,
                        v: &'v mut [T],
                        shape: &[usize],
                    ) -> Option<ViewMut<'v>> {
                        ask.then(|| ViewMut::new(v, shape).unwrap())
                    }
                    norm.backward_into(NormalizeBackward {
                        gate: Some(View::new(&gate, &shape)?),
                        weight: Some(View::new(&weight, &[d])?),
                        bias: Some(View::new(&bias, &[d])?),
                        mean: kept.mean.as_ref().map(Buffer::view),
                        dx: wish(ask[0], &mut dx, &shape),
                        dresidual: wish(ask[1], &mut dresidual, &shape),
                        dgate: wish(ask[2], &mut dgate, &shape),
                        dweight: wish(ask[3], &mut dweight, &[d]),
                        dbias: wish(ask[4], &mut dbias, &[d]),
                        ..NormalizeBackward::new(
                            View::new(&grad, &shape)?,
                            View::new(&x, &shape)?,
                            kept.rstd.view(),
                        )
                    })?;
                    Ok([
                        widened(&dx),
                        widened(&dresidual),
                        widened(&dgate),
                        widened(&dweight),
                        widened(&dbias),
                    ])
                };
                let all = gradients([true; 5])?;
                assert!(all.iter().flatten().all(|v| v.is_finite()));
                for i in 0..5 {
                    let mut ask = [false; 5];
                    ask[i] = true;
                    assert_eq!(gradients(ask)?[i], all[i], "{i}");
                }
                gradients([false; 5])?;
            }
        }
        Ok(())
    }

    /// All that the usual calls give; with `more`, from calls that ask for something in addition
    /// that changes nothing, and so run the general code.
    fn usual_calls<T: Element>(rows: usize, d: usize, more: bool) -> Result<Vec<Vec<f64>>> {
        let shape = [rows, d];
        let all = |seed| typed::<T>(&numbers(rows * d, seed));
        let (x, residual, grad, grad_sum) = (all(1), all(2), all(3), all(4));
        let view = |v| View::new(v, &shape);
        let (x, residual, grad, grad_sum) =
            (view(&x)?, view(&residual)?, view(&grad)?, view(&grad_sum)?);
        let (weight, bias) = (typed::<f32>(&numbers(d, 5)), typed::<f32>(&numbers(d, 6)));
        let (weight, bias) = (View::new(&weight, &[d])?, View::new(&bias, &[d])?);
        let (zeros, zero_bias) = (vec![T::default(); rows * d], vec![0.0f32; d]);
        let zeros = View::new(&zeros, &shape)?;
        let zero_bias = Some(View::new(&zero_bias, &[d])?).filter(|_| more);
        let real = T::DTYPE.real();
        let (rms, layer) = (Normalize::rms_norm(), Normalize::layer_norm());
        let mut given = Vec::new();
        for kind in 0..4 {
            let mut o = vec![T::from_f64(f64::NAN); rows * d];
            let mut sum = typed::<T>(&residual.to_f64_vec());
            let into = match kind {
                0 => Residual::None,
                1 => Residual::AddInto(residual, ViewMut::new(&mut sum, &shape)?),
                2 => Residual::AddInPlace(ViewMut::new(&mut sum, &shape)?),
                _ if more => Residual::Add(zeros),
                _ => Residual::None,
            };
            let centered = kind == 3;
            let [mut rstd, mut mean] =
                [Buffer::zeros(real, &[rows, 1])?, Buffer::zeros(real, &[rows, 1])?];
            let norm = if centered { layer } else { rms };
            norm.forward_into(NormalizeForward {
                weight: Some(weight),
                bias: if centered { Some(bias) } else { zero_bias },
                residual: into,
                rstd: Some(rstd.view_mut()),
                mean: centered.then(|| mean.view_mut()),
                ..NormalizeForward::new(x, ViewMut::new(&mut o, &shape)?)
            })?;
            let kept = if matches!(kind, 1 | 2) { View::new(&sum, &shape)? } else { x };
            let [mut dx, mut same] = [(); 2].map(|()| vec![T::from_f64(f64::NAN); rows * d]);
            let [mut dweight, mut dbias] = [(); 2].map(|()| vec![f32::NAN; d]);
            norm.backward_into(NormalizeBackward {
                weight: Some(weight),
                mean: centered.then(|| mean.view()),
                grad_residual_out: (kind == 1).then_some(grad_sum),
                dx: Some(ViewMut::new(&mut dx, &shape)?),
                dresidual: more.then(|| ViewMut::new(&mut same, &shape)).transpose()?,
                dweight: (kind != 2).then(|| ViewMut::new(&mut dweight, &[d])).transpose()?,
                dbias: centered.then(|| ViewMut::new(&mut dbias, &[d])).transpose()?,
                ..NormalizeBackward::new(grad, kept, rstd.view())
            })?;
            if more {
                assert_eq!(widened(&dx), widened(&same));
            }
            assert!(widened(&o).iter().chain(&widened(&dx)).all(|v| v.is_finite()), "{kind} {d}");
            given.extend([widened(&o), widened(&sum), widened(&dx), rstd.view().to_f64_vec()]);
            if kind != 2 {
                given.push(widened(&dweight));
            }
            if centered {
                given.push(widened(&dbias));
            }
        }
        Ok(given)
    }

    #[test]
    fn usual_calls_agree_with_the_general_code() -> Result<()> {
        for isa in Isa::available() {
            with_isa(isa, || -> Result<()> {
                for d in [1, 7, 16, 17, 45, 48, 64, 127, 192, 2048, 2050, 4160] {
                    assert_eq!(usual_calls::<f32>(19, d, false)?, usual_calls::<f32>(19, d, true)?);
                    assert_eq!(usual_calls::<f16>(19, d, false)?, usual_calls::<f16>(19, d, true)?);
                    assert_eq!(
                        usual_calls::<bf16>(70, d, false)?,
                        usual_calls::<bf16>(70, d, true)?
                    );
                }
                Ok(())
            })??;
        }
        let general = usual_calls::<bf16>(1100, 512, true)?;
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let usual = pool.install(|| usual_calls::<bf16>(1100, 512, false))?;
            assert!(usual == general, "{threads} threads");
        }
        Ok(())
    }

    /// o, rstd, dx, dgate and dweight of a gated norm; with `more`, by the general code.
    fn gated_call<T: Element>(
        norm: &Normalize,
        d: usize,
        gate: &[f64],
        more: bool,
    ) -> Result<[Vec<f64>; 5]> {
        let (n, rows) = (gate.len(), gate.len() / d);
        let shape = [rows, d];
        let [x, grad] = [1, 2].map(|seed| typed::<T>(&numbers(n, seed)));
        let (gate, weight, zeros) =
            (typed::<T>(gate), typed::<T>(&numbers(d, 3)), vec![T::default(); n]);
        let [x, grad, gate, zeros] = [&x, &grad, &gate, &zeros].map(|v| View::new(v, &shape));
        let (x, grad, gate, weight) = (x?, grad?, gate?, View::new(&weight, &[d])?);
        let [mut o, mut dx, mut same, mut dgate] = [(); 4].map(|()| vec![T::from_f64(f64::NAN); n]);
        let mut dweight = vec![T::from_f64(f64::NAN); d];
        let mut rstd = Buffer::zeros(T::DTYPE.real(), &[rows, 1])?;
        norm.forward_into(NormalizeForward {
            weight: Some(weight),
            gate: Some(gate),
            residual: if more { Residual::Add(zeros?) } else { Residual::None },
            rstd: Some(rstd.view_mut()),
            ..NormalizeForward::new(x, ViewMut::new(&mut o, &shape)?)
        })?;
        norm.backward_into(NormalizeBackward {
            weight: Some(weight),
            gate: Some(gate),
            dx: Some(ViewMut::new(&mut dx, &shape)?),
            dresidual: more.then(|| ViewMut::new(&mut same, &shape)).transpose()?,
            dgate: Some(ViewMut::new(&mut dgate, &shape)?),
            dweight: Some(ViewMut::new(&mut dweight, &[d])?),
            ..NormalizeBackward::new(grad, x, rstd.view())
        })?;
        let rstd = rstd.view().to_f64_vec();
        Ok([widened(&o), rstd, widened(&dx), widened(&dgate), widened(&dweight)])
    }

    #[test]
    fn fused_gates_agree_with_the_general_code() -> Result<()> {
        fn check<T: Element>(norm: &Normalize, d: usize, gate: &[f64], bits: i32) -> Result<()> {
            let fused = gated_call::<T>(norm, d, gate, false)?;
            let general = gated_call::<T>(norm, d, gate, true)?;
            // Sums of terms that cancel differ by what the arithmetic rounds.
            let absolute = [1e-44, 0.0, 1e-5, 1e-5, 1e-4];
            for ((fused, general), absolute) in fused.iter().zip(&general).zip(absolute) {
                for (i, (a, b)) in fused.iter().zip(general).enumerate() {
                    let bound = b.abs() * 2f64.powi(-bits) + absolute;
                    assert!((a - b).abs() <= bound, "{} {norm:?} {d} {i}: {a} {b}", T::DTYPE);
                }
            }
            Ok(())
        }
        for (gate_position, gate_act) in [
            (GatePosition::Pre, Act::Sigmoid),
            (GatePosition::Post, Act::Sigmoid),
            (GatePosition::Pre, Act::Silu),
            (GatePosition::Post, Act::Silu),
        ] {
            let norm = Normalize { gate_position, gate_act, ..Normalize::rms_norm() };
            for d in [1, 15, 40, 64, 192, 2048, 2100] {
                let mut gate: Vec<f64> = numbers(3 * d, 7).iter().map(|v| 9.0 * v).collect();
                check::<bf16>(&norm, d, &gate, 7)?;
                check::<f16>(&norm, d, &gate, 9)?;
                // The last row has arguments that are too large for the short form.
                gate[3 * d - 1] = 100.0;
                if d > 20 {
                    gate[3 * d - 20] = -85.0;
                }
                check::<bf16>(&norm, d, &gate, 7)?;
                let far = gated_call::<bf16>(&norm, d, &gate, false)?;
                assert!(far.iter().flatten().all(|v| v.is_finite()));
                // The other rows do not notice.
                gate.truncate(2 * d);
                let near = gated_call::<bf16>(&norm, d, &gate, false)?;
                for (near, far) in near.iter().zip(&far).take(4) {
                    assert_eq!(near[..], far[..near.len()]);
                }
                // Nor do they among several such rows, in the middle of batches.
                let rows = 37;
                let mut gate: Vec<f64> = numbers(rows * d, 8).iter().map(|v| 9.0 * v).collect();
                let near = gated_call::<bf16>(&norm, d, &gate, false)?;
                let far_rows = [1, 2, 7, 20, 36];
                for row in far_rows {
                    gate[row * d + d / 2] = 90.0;
                }
                check::<bf16>(&norm, d, &gate, 7)?;
                let far = gated_call::<bf16>(&norm, d, &gate, false)?;
                for (near, far) in near.iter().zip(&far).take(4) {
                    let len = near.len() / rows;
                    for row in (0..rows).filter(|row| !far_rows.contains(row)) {
                        assert_eq!(near[row * len..][..len], far[row * len..][..len], "{row}");
                    }
                }
            }
        }
        Ok(())
    }

    /// o, the sum, dx and dgate of a call, as bits, row by row of `rows` or of all rows together.
    fn by_rows(
        norm: &Normalize,
        (rows, d): (usize, usize),
        kind: usize,
        alone: bool,
    ) -> Result<Vec<Vec<f64>>> {
        let n = rows * d;
        let [x, grad, residual, grad_sum] =
            [1, 2, 3, 4].map(|seed| typed::<bf16>(&numbers(n, seed)));
        let mut gate: Vec<f64> = numbers(n, 5).iter().map(|v| 5.0 * v).collect();
        for row in [0, rows / 2, rows - 1] {
            gate[row * d + d / 3] = -95.0; // too large for the short form
        }
        let (gate, weight) = (typed::<bf16>(&gate), typed::<bf16>(&numbers(d, 6)));
        let weight = View::new(&weight, &[d])?;
        let mut results = vec![Vec::new(); 4];
        let each = if alone { 1 } else { rows };
        for start in (0..rows).step_by(each) {
            let (at, shape) = (start * d..(start + each) * d, [each, d]);
            let part = |values: &[bf16]| values[at.clone()].to_vec();
            let (x, grad, gate) = (part(&x), part(&grad), part(&gate));
            let (grad_sum, mut sum) = (part(&grad_sum), part(&residual));
            let addend = sum.clone();
            let [mut o, mut dx, mut dgate] = [(); 3].map(|()| vec![bf16::NAN; each * d]);
            let mut rstd = vec![f32::NAN; each * norm.groups];
            let gated = kind >= 3;
            norm.forward_into(NormalizeForward {
                weight: Some(weight),
                gate: gated.then(|| View::new(&gate, &shape)).transpose()?,
                residual: match kind {
                    1 => Residual::Add(View::new(&addend, &shape)?),
                    2 => Residual::AddInPlace(ViewMut::new(&mut sum, &shape)?),
                    _ => Residual::None,
                },
                rstd: Some(ViewMut::new(&mut rstd, &[each, norm.groups])?),
                ..NormalizeForward::new(View::new(&x, &shape)?, ViewMut::new(&mut o, &shape)?)
            })?;
            let mut dweight = vec![bf16::NAN; d];
            let kept = if kind == 2 { &sum } else { &x };
            norm.backward_into(NormalizeBackward {
                weight: Some(weight),
                gate: gated.then(|| View::new(&gate, &shape)).transpose()?,
                residual: (kind == 1).then(|| View::new(&addend, &shape)).transpose()?,
                grad_residual_out: (kind == 2).then(|| View::new(&grad_sum, &shape)).transpose()?,
                dx: Some(ViewMut::new(&mut dx, &shape)?),
                dgate: gated.then(|| ViewMut::new(&mut dgate, &shape)).transpose()?,
                // Without it, the sums are made and forgotten: the others have to be the same.
                dweight: (!alone).then(|| ViewMut::new(&mut dweight, &[d])).transpose()?,
                ..NormalizeBackward::new(
                    View::new(&grad, &shape)?,
                    View::new(kept, &shape)?,
                    View::new(&rstd, &[each, norm.groups])?,
                )
            })?;
            if !gated {
                dgate.fill(bf16::ZERO);
            }
            for (result, values) in results.iter_mut().zip([&o, &sum, &dx, &dgate]) {
                result.extend(values.iter().map(|value| f64::from(value.to_f32())));
            }
        }
        Ok(results)
    }

    /// Each row has a weight for each of its groups, gates that are too large stand in the first, a middle and
    /// the last row, and passes over batches of one, some and parts of a row share their loops.
    #[test]
    fn rows_alone_are_what_they_are_among_others() -> Result<()> {
        for isa in Isa::available() {
            for (rows, groups, len) in
                [(5, 4, 1024), (3, 5, 704), (9, 3, 128), (70, 2, 64), (67, 1, 192), (4, 2, 30)]
            {
                for kind in 0..7 {
                    let norm = Normalize {
                        gate_position: [GatePosition::Pre, GatePosition::Post][kind % 2],
                        gate_act: if kind > 4 { Act::Silu } else { Act::Sigmoid },
                        ..Normalize::rms_norm().with_groups(groups)
                    };
                    let call = |alone| {
                        with_isa(isa, || by_rows(&norm, (rows, groups * len), kind, alone))?
                    };
                    let (all, alone) = (call(false)?, call(true)?);
                    assert!(all.iter().flatten().all(|v| v.is_finite()));
                    assert!(all == alone, "{isa} {rows} rows of {groups} x {len}, kind {kind}");
                }
            }
        }
        Ok(())
    }

    /// Groups are rows of their own: few and many of them, in batches of whole rows and of parts of one.
    #[test]
    fn groups_are_rows() -> Result<()> {
        for (rows, groups, len) in [(3, 37, 5), (7, 3, 24), (40, 1, 33), (2, 5, 700), (1, 16, 128)]
        {
            for center in [false, true] {
                let norm = Normalize { center, ..Normalize::rms_norm() };
                let n = rows * groups * len;
                let [x, grad] = [1, 2].map(|seed| typed::<bf16>(&numbers(n, seed)));
                let call = |rows: usize, groups: usize, d: usize| -> Result<[Vec<f64>; 4]> {
                    let norm = norm.with_groups(groups);
                    let [x, grad] = [View::new(&x, &[rows, d])?, View::new(&grad, &[rows, d])?];
                    let kept = norm.forward_keeping(x, None)?;
                    let dx = norm.backward(grad, x, None, &kept)?.dx;
                    let mean = kept.mean.map_or(Vec::new(), |mean| mean.view().to_f64_vec());
                    let [o, rstd, dx] =
                        [&kept.o, &kept.rstd, &dx].map(|buffer| buffer.view().to_f64_vec());
                    Ok([o, rstd, dx, mean])
                };
                assert_eq!(call(rows, groups, groups * len)?, call(rows * groups, 1, len)?);
            }
        }
        Ok(())
    }

    #[test]
    fn strides_and_broadcasts() -> Result<()> {
        // x as (2, 3, 10), stored as (3, 2, 16) and cut out of the middle; grad is one row for all.
        let stored = typed::<f32>(&numbers(96, 1));
        let x = View::new(&stored, &[3, 2, 16])?.narrow(2, 3, 10)?.permute(&[1, 0, 2])?;
        let dense = typed::<f32>(&x.to_f64_vec());
        let row = typed::<f32>(&numbers(10, 2));
        let grad = View::new(&row, &[10])?.broadcast(&[2, 3, 10])?;
        let grad_dense = typed::<f32>(&grad.to_f64_vec());
        let weight = typed::<f64>(&numbers(20, 3));
        let weight = View::strided(&weight, &[10], &[-2], 19)?;
        let norm = Normalize::layer_norm().with_groups(2);
        let dense = View::new(&dense, &[2, 3, 10])?;
        let kept = norm.forward_keeping(dense, Some(weight))?;
        let want =
            norm.backward(View::new(&grad_dense, &[2, 3, 10])?, dense, Some(weight), &kept)?;

        let mut o = vec![f32::NAN; 96];
        let out = ViewMut::new(&mut o, &[3, 2, 16])?.narrow(2, 5, 10)?.permute(&[1, 0, 2])?;
        let [mut rstd, mut mean] = [(); 2].map(|()| vec![f32::NAN; 12]);
        let statistics =
            |v| -> Result<ViewMut<'_>> { ViewMut::new(v, &[3, 2, 2])?.permute(&[1, 0, 2]) };
        norm.forward_into(NormalizeForward {
            weight: Some(weight),
            rstd: Some(statistics(&mut rstd)?),
            mean: Some(statistics(&mut mean)?),
            ..NormalizeForward::new(x, out)
        })?;
        let got = View::new(&o, &[3, 2, 16])?.narrow(2, 5, 10)?.permute(&[1, 0, 2])?;
        assert_eq!(got.to_f64_vec(), kept.o.view().to_f64_vec());
        assert_eq!(o.iter().filter(|v| v.is_nan()).count(), 36); // nothing beside it was written

        let mut dx = vec![f32::NAN; 60];
        let mut dweight = vec![f64::NAN; 20];
        let statistics = |v| -> Result<View<'_>> { View::new(v, &[3, 2, 2])?.permute(&[1, 0, 2]) };
        norm.backward_into(NormalizeBackward {
            weight: Some(weight),
            mean: Some(statistics(&mean)?),
            dx: Some(ViewMut::new(&mut dx, &[3, 2, 10])?.permute(&[1, 0, 2])?),
            dweight: Some(ViewMut::strided(&mut dweight, &[10], &[2], 0)?),
            ..NormalizeBackward::new(grad, x, statistics(&rstd)?)
        })?;
        let dx = View::new(&dx, &[3, 2, 10])?.permute(&[1, 0, 2])?;
        assert_eq!(dx.to_f64_vec(), want.dx.view().to_f64_vec());
        let dweight: Vec<f64> = dweight.iter().step_by(2).copied().collect();
        assert_eq!(dweight, want.dweight.unwrap().to_vec::<f64>()?);
        Ok(())
    }

    #[test]
    fn threads_and_batches_do_not_matter() -> Result<()> {
        let (rows, d) = (999, 700);
        for (norm, gated) in
            [(Normalize::rms_norm(), false), (Normalize::layer_norm().with_groups(4), true)]
        {
            let mut case = Case::new(rows, d, gated);
            let with = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| run::<bf16>(&norm, &case))
            };
            let one = with(1)?;
            for threads in [2, 3, 7] {
                assert!(with(threads)? == one, "{threads} threads");
            }
            // The last rows by themselves.
            let skip = (rows - 2) * d;
            let (x, grad) = (&mut case.x, &mut case.grad);
            for operand in [Some(x), Some(grad)]
                .into_iter()
                .chain([case.residual.as_mut(), case.gate.as_mut(), case.grad_sum.as_mut()])
                .flatten()
            {
                operand.drain(..skip);
            }
            let alone = run::<bf16>(&norm, &case)?;
            assert!(alone.o == one.o[skip..] && alone.dx == one.dx[skip..]);
        }
        Ok(())
    }

    #[test]
    fn many_rows_do_not_wear_out_the_sums() -> Result<()> {
        // Every row adds the same to dbias and, nearly, to dweight.
        let rows = 200_000;
        let x = vec![0.5f32; 2];
        let x = View::new(&x, &[1, 2])?.broadcast(&[rows, 2])?;
        let rstd = [2.0f32];
        let rstd = View::new(&rstd, &[1, 1])?.broadcast(&[rows, 1])?;
        let weight = [1.0f32; 2];
        let (mut dweight, mut dbias) = ([f32::NAN; 2], [f32::NAN; 2]);
        let grad = [0.1f32, 0.3];
        let grad = View::new(&grad, &[1, 2])?.broadcast(&[rows, 2])?;
        Normalize::rms_norm().backward_into(NormalizeBackward {
            weight: Some(View::new(&weight, &[2])?),
            dweight: Some(ViewMut::new(&mut dweight, &[2])?),
            dbias: Some(ViewMut::new(&mut dbias, &[2])?),
            ..NormalizeBackward::new(grad, x, rstd)
        })?;
        for (got, want) in [(dweight, [20_000.0, 60_000.0]), (dbias, [20_000.0, 60_000.0])] {
            assert!(error(&widened(&got), &want) < 2e-6, "{got:?}");
        }
        Ok(())
    }

    #[test]
    fn nan_and_infinity_stay_in_their_group() -> Result<()> {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = typed::<bf16>(&numbers(40, 1));
            x[13] = bf16::from_f32(bad);
            let o =
                Normalize::layer_norm().with_groups(2).forward(View::new(&x, &[2, 20])?, None)?;
            let o = o.to_vec::<bf16>()?;
            assert!(o[..10].iter().chain(&o[20..]).all(|v| v.is_finite()));
            assert!(o[10..20].iter().all(|v| v.is_nan()));
        }
        // A mean square beyond f32 has sigma infinite.
        let x = [1e20f32, -1e20, 3e19, 0.0];
        let o = Normalize::rms_norm().forward(View::new(&x, &[1, 4])?, None)?;
        assert_eq!(o.as_slice::<f32>()?, [0.0; 4]);
        // Any NaN in what was kept comes out as one.
        let (x, grad) = ([bf16::ONE; 3], [bf16::ONE; 3]);
        let rstd = [f32::from_bits(0x7FFF_FFFF)];
        let mut dx = [bf16::ONE; 3];
        Normalize::rms_norm().backward_into(NormalizeBackward {
            dx: Some(ViewMut::new(&mut dx, &[1, 3])?),
            ..NormalizeBackward::new(
                View::new(&grad, &[1, 3])?,
                View::new(&x, &[1, 3])?,
                View::new(&rstd, &[1, 1])?,
            )
        })?;
        assert!(dx.iter().all(|v| v.is_nan()));
        Ok(())
    }

    #[test]
    fn a_relu_gate_cuts_any_gradient() -> Result<()> {
        let (x, gate, grad) = ([1.0f32, 2.0], [-1.0f32, 1.0], [f32::INFINITY, 1.0]);
        let (rstd, mut dgate) = ([1.0f32], [f32::NAN; 2]);
        let norm = Normalize {
            gate_act: Act::Relu,
            gate_position: GatePosition::Post,
            ..Normalize::rms_norm()
        };
        norm.backward_into(NormalizeBackward {
            gate: Some(View::new(&gate, &[1, 2])?),
            dgate: Some(ViewMut::new(&mut dgate, &[1, 2])?),
            ..NormalizeBackward::new(
                View::new(&grad, &[1, 2])?,
                View::new(&x, &[1, 2])?,
                View::new(&rstd, &[1, 1])?,
            )
        })?;
        assert_eq!(dgate, [0.0, 2.0]);
        Ok(())
    }

    #[test]
    fn empty_tensors() -> Result<()> {
        let none: [f32; 0] = [];
        let norm = Normalize::layer_norm();
        for shape in [[0, 4], [3, 0], [0, 0]] {
            let x = View::new(&none, &shape)?;
            let weight = vec![1.0f32; shape[1]];
            let weight = View::new(&weight, &[shape[1]])?;
            let kept = norm.forward_keeping(x, Some(weight))?;
            assert_eq!((kept.o.len(), kept.rstd.len()), (0, shape[0]));
            assert!(kept.rstd.as_slice::<f32>()?.iter().all(|v| v.is_nan()));
            let gradients = norm.backward(x, x, Some(weight), &kept)?;
            assert!(gradients.dx.is_empty());
            assert_eq!(gradients.dweight.unwrap().to_vec::<f32>()?, vec![0.0; shape[1]]);
        }
        let huge = norm.with_groups(usize::MAX).forward(View::new(&none, &[3, 0])?, None)?;
        assert!(huge.is_empty());
        Ok(())
    }

    #[test]
    fn errors_name_what_is_wrong() -> Result<()> {
        let (x, three, wide) = ([1.0f32; 8], [1.0f32; 3], [1.0f64; 8]);
        let x = View::new(&x, &[2, 4])?;
        let three = View::new(&three, &[3])?;
        let forward = |norm: Normalize, weight| norm.forward(x, weight).unwrap_err().to_string();
        let rms = Normalize::rms_norm();
        for (norm, weight, expected) in [
            (
                rms,
                Some(three),
                "normalize: weight has shape [3], expected [4] (last dimension of x)",
            ),
            (
                rms.with_eps(f64::NAN),
                None,
                "normalize: eps is NaN, expected a finite number from 0 on",
            ),
            (rms.with_eps(-1.0), None, "normalize: eps is -1, expected a finite number from 0 on"),
            (
                Normalize { scale: f64::INFINITY, ..rms },
                None,
                "normalize: scale is inf, expected a finite number",
            ),
            (rms.with_groups(0), None, "normalize: groups is 0, expected at least 1"),
            (
                rms.with_groups(3),
                None,
                "normalize: groups is 3, expected a divisor of 4 (last dimension of x)",
            ),
        ] {
            assert_eq!(forward(norm, weight), expected);
        }
        let scalar = [1.0f32];
        let error = rms.forward(View::new(&scalar, &[])?, None).unwrap_err();
        assert_eq!(error.argument(), "x");

        // Each fault of the forward's operands.
        let mut memory = [0.0f32; 64];
        let mut rest = &mut memory[..];
        let mut take = |len: usize, shape: &[usize]| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(len);
            rest = tail;
            ViewMut::new(head, shape)
        };
        let wide = View::new(&wide, &[2, 4])?;
        let base = |o| NormalizeForward::new(x, o);
        let o = take(8, &[2, 4])?;
        let fault = |call| rms.forward_into(call).unwrap_err().to_string();
        assert_eq!(
            fault(NormalizeForward { gate: Some(wide), ..base(o) }),
            "normalize: gate has dtype f64, expected f32 (dtype of x)"
        );
        assert_eq!(
            fault(NormalizeForward { mean: Some(take(2, &[2, 1])?), ..base(take(8, &[2, 4])?) }),
            "normalize: mean is given, expected none (center is off)"
        );
        assert_eq!(
            fault(NormalizeForward { rstd: Some(take(2, &[1, 2])?), ..base(take(8, &[2, 4])?) }),
            "normalize: rstd has shape [1, 2], expected [2, 1] (from x [2, 4])"
        );
        assert_eq!(
            fault(NormalizeForward {
                residual: Residual::AddInPlace(take(4, &[1, 4])?),
                ..base(take(8, &[2, 4])?)
            }),
            "normalize: residual has shape [1, 4], expected [2, 4] (from x [2, 4])"
        );
        assert_eq!(
            fault(NormalizeForward { bias: Some(three), ..base(take(8, &[2, 4])?) }),
            "normalize: bias has shape [3], expected [4] (last dimension of x)"
        );

        // And of the backward's.
        let rstd = [1.0f32; 2];
        let rstd = View::new(&rstd, &[2, 1])?;
        let base = || NormalizeBackward::new(x, x, rstd);
        fn backward_fault(norm: Normalize, call: NormalizeBackward<'_>) -> String {
            norm.backward_into(call).unwrap_err().to_string()
        }
        let [mut a, mut b] = [[0.0f32; 8], [0.0f32; 8]];
        assert_eq!(
            backward_fault(Normalize::layer_norm(), base()),
            "normalize: mean is missing, expected the mean that the forward kept (center is on)"
        );
        assert_eq!(
            backward_fault(rms, NormalizeBackward { mean: Some(rstd), ..base() }),
            "normalize: mean is given, expected none (center is off)"
        );
        assert_eq!(
            backward_fault(
                rms,
                NormalizeBackward { dgate: Some(ViewMut::new(&mut a, &[2, 4])?), ..base() }
            ),
            "normalize: dgate is given, expected none (there is no gate)"
        );
        assert_eq!(
            backward_fault(
                rms,
                NormalizeBackward { dweight: Some(ViewMut::new(&mut a[..4], &[4])?), ..base() }
            ),
            "normalize: dweight is given, expected none (there is no weight)"
        );
        assert_eq!(
            backward_fault(
                rms,
                NormalizeBackward { dbias: Some(ViewMut::new(&mut a, &[8])?), ..base() }
            ),
            "normalize: dbias has shape [8], expected [4] (last dimension of x)"
        );
        assert_eq!(
            backward_fault(rms, NormalizeBackward { rstd: x, ..base() }),
            "normalize: rstd has shape [2, 4], expected [2, 1] (from x [2, 4])"
        );
        assert_eq!(
            backward_fault(
                rms,
                NormalizeBackward { dx: Some(ViewMut::new(&mut b[..4], &[1, 4])?), ..base() }
            ),
            "normalize: dx has shape [1, 4], expected [2, 4] (from x [2, 4])"
        );
        // SAFETY: the memory is the array's; the call has to refuse it before it touches it.
        let over = unsafe { ViewMut::from_raw(b.as_mut_ptr().cast(), DType::F32, &[4], &[1])? };
        assert_eq!(
            backward_fault(
                rms,
                NormalizeBackward {
                    dx: Some(ViewMut::new(&mut b, &[2, 4])?),
                    dbias: Some(over),
                    ..base()
                }
            ),
            "normalize: dbias overlaps dx in memory, expected memory of its own"
        );
        Ok(())
    }
}
