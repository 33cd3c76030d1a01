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
//! NaN gives NaN; the gradients of relu and relu_squared are 0 where x <= 0, whatever arrives.
//! Any shape works, and any strides as long as one dimension is contiguous in all tensors of the call.

use std::fmt;
use std::str::FromStr;

use super::{contiguous_last, double};
use crate::error::{Error, Result};
use crate::exec::operands::{Named, Operands};
use crate::exec::rows::Rows;
use crate::kernels::act::{Backward, BackwardFromOutput, Forward, InPlace};
use crate::pool::Buffer;
use crate::reference::act;
use crate::simd::dispatch;
use crate::view::{View, ViewMut};
use crate::{DType, isa};

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

/// Elements of a row of a task: enough to make a row's overhead small, and few enough for the first-level
/// cache.
const TILE: usize = 9216;

/// The rows of a call whose operands all look like the first input.
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

/// The rows of a call that replaces x.
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
        let (isa, dtype, non_temporal) = (isa(), rows.dtype(), rows.non_temporal());
        rows.for_each_task(1, |rows| match dtype {
            DType::F64 => double::each_element(rows, |[x]| act::forward(self, x)),
            _ => dispatch(isa, dtype, Forward { act: self, rows, non_temporal }),
        });
        Ok(())
    }

    /// The checks of [`Act::forward_into`] alone. No element is read or written: views may stand for
    /// another device's memory.
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
        Buffer::filled(x.dtype(), x.shape(), |o| self.forward_into(x, o))
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
        let (isa, dtype) = (isa(), rows.dtype());
        rows.for_each_task(1, |rows| match dtype {
            DType::F64 => double::each_element_in_place(rows, |x| act::forward(self, x)),
            _ => dispatch(isa, dtype, InPlace { act: self, rows }),
        });
        Ok(())
    }

    /// The checks of [`Act::forward_in_place`] alone; see [`Act::check_forward`].
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
        let (isa, dtype, non_temporal) = (isa(), rows.dtype(), rows.non_temporal());
        rows.for_each_task(1, |rows| match dtype {
            DType::F64 => double::each_element(rows, |[x, grad]| act::backward(self, x, grad)),
            _ => dispatch(isa, dtype, Backward { act: self, rows, non_temporal }),
        });
        Ok(())
    }

    /// The checks of [`Act::backward_into`] alone; see [`Act::check_forward`].
    pub fn check_backward(self, x: View<'_>, grad: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        checked([("x", x), ("grad", grad)], ("dx", dx)).map(drop)
    }

    /// `dx` of [`Act::backward_into`] in a buffer from the pool.
    pub fn backward(self, x: View<'_>, grad: View<'_>) -> Result<Buffer> {
        Buffer::filled(x.dtype(), x.shape(), |dx| self.backward_into(x, grad, dx))
    }

    /// Whether [`Act::backward_from_output_into`] can do without x.
    pub const fn has_slope_from_output(self) -> bool {
        matches!(self, Self::None | Self::Relu | Self::Sigmoid | Self::Tanh)
    }

    /// Writes `dx` from the output `o` of the forward: for none, relu, sigmoid (o (1 - o)) and tanh
    /// (1 - o²), as PyTorch does. It needs no exponential, so it is faster; but where o is close to 1, its
    /// rounding is most of what is left of the slope.
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
        self.check_slope_from_output()?;
        let rows = checked([("o", o), ("grad", grad)], ("dx", dx))?;
        let (isa, dtype, non_temporal) = (isa(), rows.dtype(), rows.non_temporal());
        rows.for_each_task(1, |rows| match dtype {
            DType::F64 => {
                double::each_element(rows, |[o, grad]| act::backward_from_output(self, o, grad))
            }
            _ => dispatch(isa, dtype, BackwardFromOutput { act: self, rows, non_temporal }),
        });
        Ok(())
    }

    /// The checks of [`Act::backward_from_output_into`] alone; see [`Act::check_forward`].
    pub fn check_backward_from_output(
        self,
        o: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        self.check_slope_from_output()?;
        checked([("o", o), ("grad", grad)], ("dx", dx)).map(drop)
    }

    fn check_slope_from_output(self) -> Result<()> {
        if !self.has_slope_from_output() {
            let expected = "none, relu, sigmoid or tanh (others need x, see backward_into)";
            return Err(Error::new("act", "name", format!("is {self}"), expected));
        }
        Ok(())
    }

    /// `dx` of [`Act::backward_from_output_into`] in a buffer from the pool.
    pub fn backward_from_output(self, o: View<'_>, grad: View<'_>) -> Result<Buffer> {
        Buffer::filled(o.dtype(), o.shape(), |dx| self.backward_from_output_into(o, grad, dx))
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
