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
//! normalized is the unrounded sum, of which `residual_out` receives a rounded copy. Sums run in lanes
//! within chunks of 2,048 elements and in f64 across chunks, so that their error does not grow with d.
//! The mean is taken twice: after a first one m, q0 = p - m has a small mean delta (what rounding left
//! over), and mean(q0^2) - delta^2 is the variance without cancellation, even where the mean is a
//! million times the deviation. The backward finds delta anew, so that rounding the kept mean is free.
//!
//! **Passes.** To the kernels, each group is a row. A row is read from memory once: the pass that writes
//! it finds it in the first-level cache, or finds p as the pass before saved it. Short rows go in tiles,
//! pass by pass. The usual calls have loops of their own; in all others the loops choose block by block.

#[cfg(test)]
pub(super) mod tests;

use super::act::Act;
use super::double;
use crate::error::{Error, Result};
use crate::exec::operands::{Operands, check_parameter, disjoint};
use crate::exec::rows::{Rows, TaskRows};
use crate::exec::scratch::Scratch;
use crate::kernels::lanes::Lane;
use crate::kernels::normalize::backward::{self, Backward};
use crate::kernels::normalize::forward::{self, Added, Forward};
use crate::kernels::param;
use crate::pool::Buffer;
use crate::simd::dispatch;
use crate::view::{View, ViewMut};
use crate::{DType, isa};

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
    /// It is added to x, and the second view receives the sum, rounded to its dtype.
    ///
    /// A backward may read this sum in the place of x and the residual. In 16 bits, it then works on the
    /// rounded sum, while the statistics are those of the unrounded one. To be exact, give it x and the
    /// residual: see [`NormalizeBackward::residual`].
    AddInto(View<'a>, ViewMut<'a>),
    /// It is added to x, and its own memory receives the sum, as with [`Residual::AddInto`].
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
    /// The residual of the forward, if `x` is not the sum. The two are added anew, and not rounded.
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
    /// Receives the gradient of the residual. Its values are those of `dx`, which may serve for both.
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
    fn scaled_weight(&self, weight: Option<View<'_>>, d: usize) -> Scratch<f32> {
        let mut scaled = param::widened(weight, d);
        let one = match self.weight_form {
            WeightForm::Plain => 0.0,
            WeightForm::OnePlus => 1.0,
        };
        if weight.is_none() {
            scaled.fill(self.scale as f32);
        } else if (self.scale, one) != (1.0, 0.0) {
            for value in &mut scaled[..d] {
                *value = (self.scale * (one + f64::from(*value))) as f32;
            }
        }
        scaled
    }

    /// How many rows of their own the groups of a row become. (Groups without elements, of which there may
    /// be any number, stay one row.)
    fn groups_as_rows(&self, d: usize) -> usize {
        if d == 0 { 1 } else { self.groups }
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
    pub fn forward_into(&self, mut call: NormalizeForward<'_>) -> Result<()> {
        let (weight, bias) = (call.weight, call.bias);
        let (rows, options, d) = self.checked_forward(&mut call)?;
        if rows.dtype() == DType::F64 {
            double::normalize(self, call);
            return Ok(());
        }
        let (isa, eps, groups) = (isa(), self.eps, self.groups_as_rows(d));
        let rows = rows.split(groups).merged(false);
        if rows.count() == 0 {
            return Ok(());
        }
        let (dtype, non_temporal) = (rows.dtype(), rows.non_temporal());
        let (weight, bias) = (self.scaled_weight(weight, d), param::widened(bias, d));
        let (weight, bias) = (&weight[..d], if options.bias { &bias[..d] } else { &[] });
        rows.for_each_task(groups, |rows| {
            let kernel = Forward { options, eps, groups, weight, bias, rows, non_temporal };
            dispatch(isa, dtype, kernel);
        });
        Ok(())
    }

    /// The checks of [`Normalize::forward_into`] alone. No element is read or written: views may stand
    /// for another device's memory.
    ///
    /// ```
    /// use fuselane::{Normalize, NormalizeForward, View, ViewMut};
    /// let (x, mut o) = ([1.0f32; 6], [0.0f32; 6]);
    /// let call = NormalizeForward::new(View::new(&x, &[2, 3])?, ViewMut::new(&mut o, &[2, 3])?);
    /// let error = Normalize::rms_norm().with_groups(2).check_forward(call).unwrap_err();
    /// assert_eq!(error.argument(), "groups");
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn check_forward(&self, mut call: NormalizeForward<'_>) -> Result<()> {
        self.checked_forward(&mut call).map(drop)
    }

    /// The rows of a forward, its options as kernels need them, and the length of a row.
    fn checked_forward<'a>(
        &self,
        call: &'a mut NormalizeForward<'_>,
    ) -> Result<(Rows<'a, 3, 2, 0, 2>, forward::Options, usize)> {
        let &mut NormalizeForward { x, weight, bias, gate, .. } = call;
        let (o, residual) = (call.o.reborrow(), &mut call.residual);
        let [rstd, mean] =
            [&mut call.rstd, &mut call.mean].map(|o| o.as_mut().map(ViewMut::reborrow));
        let d = self.check(x)?;
        if mean.is_some() && !self.center {
            return Err(Error::new(NAME, "mean", "is given", "none (center is off)"));
        }
        for (name, view) in [("weight", weight), ("bias", bias)] {
            if let Some(view) = view {
                check_parameter(NAME, name, view, d)?;
            }
        }
        let (residual, sum_name, sum, added) = match residual {
            Residual::None => (None, "residual_out", None, Added::Nothing),
            Residual::Add(view) => (Some(*view), "residual_out", None, Added::Residual),
            Residual::AddInto(view, sum) => {
                (Some(*view), "residual_out", Some(sum.reborrow()), Added::ResidualSaved)
            }
            Residual::AddInPlace(sum) => {
                (None, "residual", Some(sum.reborrow()), Added::ResidualInPlace)
            }
        };
        let mut written = vec![("o", o.as_view())];
        written.extend(sum.iter().map(|view| (sum_name, view.as_view())));
        written.extend(rstd.iter().map(|view| ("rstd", view.as_view())));
        written.extend(mean.iter().map(|view| ("mean", view.as_view())));
        disjoint(NAME, &[("weight", weight), ("bias", bias)], &written)?;
        let options = forward::Options {
            added,
            gate: gate.map(|_| (self.gate_position, self.gate_act)),
            center: self.center,
            bias: bias.is_some(),
        };
        let inputs = [("x", Some(x)), ("residual", residual), ("gate", gate)];
        let outputs = [("o", Some(o)), (sum_name, sum)];
        let save = [("rstd", rstd), ("mean", mean)];
        let operands = Operands::with_statistics(("x", x), inputs, outputs, self.groups, [], save);
        Ok((Rows::new(NAME, operands)?, options, d))
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
        Buffer::filled(x.dtype(), x.shape(), |o| {
            self.forward_into(NormalizeForward { weight, ..NormalizeForward::new(x, o) })
        })
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
        let mut mean = self.center.then(statistic).transpose()?;
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
        let (weight, bias) = (call.weight, call.bias);
        let (rows, options, d) = self.checked_backward(&mut call)?;
        if rows.dtype() == DType::F64 {
            double::normalize_backward(self, call);
            return Ok(());
        }
        let (isa, groups) = (isa(), self.groups_as_rows(d));
        let rows = rows.split(groups).merged(false);
        if rows.count() == 0 || d == 0 {
            call.dweight.iter_mut().chain(&mut call.dbias).for_each(ViewMut::fill_zero);
            return Ok(());
        }
        let (dtype, non_temporal) = (rows.dtype(), rows.non_temporal());
        let (weight, bias) = (self.scaled_weight(weight, d), param::widened(bias, d));
        let (weight, bias) = (&weight[..d], if options.bias { &bias[..d] } else { &[] });
        let run = |rows: TaskRows<'_, 5, 3, 2>, sums: &mut [Lane]| {
            let kernel = Backward { options, groups, weight, bias, rows, non_temporal, sums };
            dispatch(isa, dtype, kernel);
        };
        if !options.dweight && !options.dbias {
            rows.for_each_task(groups, |rows| run(rows, &mut []));
            return Ok(());
        }
        let len = param::lanes_len(groups, d / groups);
        let gradients = usize::from(options.dweight) + usize::from(options.dbias);
        let mut sums = Scratch::<Lane>::zeros(len * gradients);
        rows.sum_over_tasks(groups, &mut sums, run);
        let mut values = Scratch::<f32>::new(d);
        let mut sums = sums.chunks_exact(len);
        for (gradient, scale) in [(&mut call.dweight, self.scale), (&mut call.dbias, 1.0)] {
            if let Some(gradient) = gradient {
                let sums = sums.next().expect("there are sums for both");
                param::rows_to_index_order(dtype, sums, groups, &mut values[..d]);
                if scale != 1.0 {
                    for value in &mut values[..d] {
                        *value = (scale * f64::from(*value)) as f32;
                    }
                }
                param::store(gradient, &values[..d]);
            }
        }
        Ok(())
    }

    /// The checks of [`Normalize::backward_into`] alone; see [`Normalize::check_forward`].
    pub fn check_backward(&self, mut call: NormalizeBackward<'_>) -> Result<()> {
        self.checked_backward(&mut call).map(drop)
    }

    /// The rows of a backward, its options as kernels need them, and the length of a row.
    fn checked_backward<'a>(
        &self,
        call: &'a mut NormalizeBackward<'_>,
    ) -> Result<(Rows<'a, 5, 3, 2>, backward::Options, usize)> {
        let &mut NormalizeBackward { grad, x, residual, gate, weight, bias, .. } = call;
        let &mut NormalizeBackward { rstd, mean, grad_residual_out, .. } = call;
        let outputs = [&mut call.dx, &mut call.dresidual, &mut call.dgate];
        let [dx, dresidual, dgate] = outputs.map(|o| o.as_mut().map(ViewMut::reborrow));
        let parameters = [&call.dweight, &call.dbias];
        let [dweight, dbias] = parameters.map(|gradient| gradient.as_ref().map(ViewMut::as_view));
        let d = self.check(x)?;
        for (name, view) in
            [("weight", weight), ("bias", bias), ("dweight", dweight), ("dbias", dbias)]
        {
            if let Some(view) = view {
                check_parameter(NAME, name, view, d)?;
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
        if dweight.is_some() && weight.is_none() {
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
        written.extend(dweight.map(|view| ("dweight", view)));
        written.extend(dbias.map(|view| ("dbias", view)));
        let saved = [("rstd", Some(rstd)), ("mean", mean)];
        disjoint(NAME, &inputs, &written)?;
        disjoint(NAME, &saved, &written)?;
        disjoint(NAME, &[("weight", weight), ("bias", bias)], &written)?;

        let [dx, dresidual, dgate] = outputs.each_ref().map(|(_, view)| view.is_some());
        let options = backward::Options {
            residual: residual.is_some(),
            gate: gate.map(|_| (self.gate_position, self.gate_act)),
            bias: bias.is_some(),
            center: self.center,
            grad_residual_out: grad_residual_out.is_some(),
            dx,
            dresidual,
            dgate,
            dweight: dweight.is_some(),
            dbias: dbias.is_some(),
        };
        let operands = Operands::with_statistics(("x", x), inputs, outputs, self.groups, saved, []);
        Ok((Rows::new(NAME, operands)?, options, d))
    }

    /// The gradients of x and, if there is one, of the weight (in its dtype) in buffers from the pool, for
    /// the plain case. See the example of [`Normalize::forward_keeping`], where `kept` comes from.
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
