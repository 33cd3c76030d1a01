//! Cosine encoding with a fused activation: `x' = act(x)`, and the features times the cosines of
//! their token's angles, followed by the features times the sines (see [`crate::ops::angles`]):
//!
//! ```text
//! o = [ x' cos A , x' sin A ]       one angle per feature; o has 2d features
//! ```
//!
//! Backward:
//!
//! ```text
//! dx' = do_cos cos A + do_sin sin A         dx = act backward of dx', from x
//! dA = x' (do_sin cos A - do_cos sin A),    dtheta = sum of coordinate * dA
//! ```
//!
//! The inner product of an encoded query and key is the sum of `q' k' cos(A_q - A_k)`: it depends
//! on the difference of their coordinates only, axis by axis.

use crate::error::Result;
use crate::kernels::encode::Waves;
use crate::ops::angles::{Angles, Placement, Positions};
use crate::ops::encode::{self, Common, EncodingBackward, FusedAct, Options, TokenLayout};
use crate::plan;
use crate::pool::Buffer;
use crate::reference::{self, angles::Input};
use crate::view::{View, ViewMut};

/// Options of the cosine encoding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cosine<'a> {
    /// The activation applied first.
    pub act: FusedAct,
    /// The order of dimensions of x; (batch, heads, tokens, features) by default.
    pub layout: TokenLayout,
    /// Where each token stands; on a [`Positions::Grid`] for the n-dimensional form.
    pub positions: Positions<'a>,
    /// The first tokens, which have angle 0 (class or condition tokens).
    pub extra_tokens: usize,
    /// Ends of packed sequences along the token dimension (`cu_seqlens`): from 0, never falling, to the
    /// number of tokens. Positions start anew in each, and a softmax over the sequence stays within it.
    pub sequences: Option<&'a [usize]>,
}

impl Default for Cosine<'_> {
    fn default() -> Self {
        Self {
            act: FusedAct::default(),
            layout: TokenLayout::HeadsTokens,
            positions: Positions::default(),
            extra_tokens: 0,
            sequences: None,
        }
    }
}

/// The tensors of a backward call; see [`EncodingBackward`]. The gradient that arrives has 2d features.
pub type CosineBackward<'a> = EncodingBackward<'a>;

impl Cosine<'_> {
    /// Writes the encoded `x` into `o`, which has twice as many features.
    ///
    /// ```
    /// use fuselane::{Cosine, Positions, View, ViewMut};
    /// // A grid of 1 x 2 tokens with one feature for each axis.
    /// let (x, theta) = ([1.0f32, 2.0, 3.0, 4.0], [std::f32::consts::FRAC_PI_2]);
    /// let mut o = [0.0f32; 8];
    /// let options = Cosine { positions: Positions::Grid(&[1, 2]), ..Cosine::default() };
    /// options.forward_into(
    ///     View::new(&x, &[1, 1, 2, 2])?,
    ///     View::new(&theta, &[1, 1])?,
    ///     ViewMut::new(&mut o, &[1, 1, 2, 4])?,
    /// )?;
    /// // The second token has coordinates (0, 1): its second feature turns by a quarter.
    /// for (got, want) in o.into_iter().zip([1.0, 2.0, 0.0, 0.0, 3.0, 0.0, 0.0, 4.0]) {
    ///     assert!((got - want).abs() < 1e-6);
    /// }
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn forward_into<'c>(
        &self,
        x: View<'_>,
        angles: impl Into<Angles<'c>>,
        o: ViewMut<'_>,
    ) -> Result<()> {
        self.encode(x, angles.into(), o)
    }

    /// [`Cosine::forward_into`] without type parameters, so that kernels are compiled in this crate alone.
    fn encode(&self, x: View<'_>, angles: Angles<'_>, o: ViewMut<'_>) -> Result<()> {
        encode::forward(self, x, angles, o)
    }

    /// The checks of [`Cosine::forward_into`] alone, and what the call comes to. No element is read or written
    /// (of a table neither): views may stand for another device's memory.
    ///
    /// ```
    /// use fuselane::{Cosine, View, ViewMut};
    /// let (x, theta, mut o) = ([0.0f32; 6], [0.0f32; 3], [0.0f32; 12]);
    /// let (x, o) = (View::new(&x, &[1, 1, 2, 3])?, ViewMut::new(&mut o, &[1, 1, 2, 6])?);
    /// let plan = Cosine::default().check_forward(x, View::new(&theta, &[1, 3])?.into(), o)?;
    /// assert_eq!((plan.features, plan.output_features, plan.pairs), (3, 6, None));
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn check_forward(
        &self,
        x: View<'_>,
        angles: Angles<'_>,
        mut o: ViewMut<'_>,
    ) -> Result<plan::Encoding> {
        Ok(encode::check_forward(self, x, angles, &mut o)?.1)
    }

    /// The encoded `x` in a buffer from the pool.
    pub fn forward<'c>(&self, x: View<'_>, angles: impl Into<Angles<'c>>) -> Result<Buffer> {
        let mut shape = x.shape().to_vec();
        shape.last_mut().into_iter().for_each(|d| *d *= 2);
        Buffer::filled(x.dtype(), &shape, |o| self.forward_into(x, angles, o))
    }

    /// Writes the gradients that are asked for.
    ///
    /// ```
    /// use fuselane::{Cosine, CosineBackward, View, ViewMut};
    /// // The second of two tokens stands at angle 1 * 0.5.
    /// let (grad, theta) = ([1.0f32, 0.0, 0.0, 1.0], [0.5f32]);
    /// let mut dx = [0.0f32; 2];
    /// Cosine::default().backward_into(CosineBackward {
    ///     x: None, // no activation and no dtheta: x is not needed
    ///     grad: View::new(&grad, &[1, 1, 2, 2])?,
    ///     angles: View::new(&theta, &[1, 1])?.into(),
    ///     dx: Some(ViewMut::new(&mut dx, &[1, 1, 2, 1])?),
    ///     dtheta: None,
    /// })?;
    /// assert!((dx[0] - 1.0).abs() < 1e-6 && (dx[1] - 0.5f32.sin()).abs() < 1e-6);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn backward_into(&self, call: CosineBackward<'_>) -> Result<()> {
        encode::backward(self, call)
    }

    /// The checks of [`Cosine::backward_into`] alone, and what the call comes to; see
    /// [`Cosine::check_forward`]. Without x and dx it comes to an encoding without tokens.
    pub fn check_backward(&self, mut call: CosineBackward<'_>) -> Result<plan::Encoding> {
        Ok(encode::check_backward(self, &mut call)?.1)
    }

    /// `dx` of [`Cosine::backward_into`] in a buffer from the pool.
    pub fn backward<'c>(
        &self,
        x: Option<View<'_>>,
        grad: View<'_>,
        angles: impl Into<Angles<'c>>,
    ) -> Result<Buffer> {
        let mut shape = grad.shape().to_vec();
        shape.last_mut().into_iter().for_each(|width| *width /= 2);
        let angles = angles.into();
        Buffer::filled(grad.dtype(), &shape, |dx| {
            self.backward_into(CosineBackward { x, grad, angles, dx: Some(dx), dtheta: None })
        })
    }
}

impl Options for Cosine<'_> {
    type Encoding = Waves;

    fn common(&self) -> Common<'_> {
        let Self { act, layout, positions, extra_tokens, sequences } = *self;
        Common { act, layout, placement: Placement { positions, extra_tokens, sequences } }
    }

    fn encoding(&self, _angles: Angles<'_>, features: usize) -> Result<Waves> {
        Ok(Waves { features })
    }

    fn reference_forward(&self, _plan: &plan::Encoding, input: &Input<'_>) -> Vec<f64> {
        reference::cosine::forward(self, input)
    }

    fn reference_backward(
        &self,
        _plan: &plan::Encoding,
        input: &Input<'_>,
        grad: &[f64],
    ) -> reference::angles::Gradients {
        reference::cosine::backward(self, input, grad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AngleTable, DType};
    use std::f64::consts::FRAC_PI_2;

    #[test]
    fn grid_coordinates_and_extra_tokens() -> Result<()> {
        // Two features, one for each axis of a 2 x 2 grid, after one extra token. In quarter
        // turns, cos and sin of coordinate 1 are 0 and 1.
        let (x, theta) = (vec![1.0f64; 10], [FRAC_PI_2]);
        let (x, theta) = (View::new(&x, &[1, 1, 5, 2])?, View::new(&theta, &[1, 1])?);
        let options =
            Cosine { positions: Positions::Grid(&[2, 2]), extra_tokens: 1, ..Cosine::default() };
        let o = options.forward(x, theta)?;
        let rounded: Vec<f64> = o.as_slice::<f64>()?.iter().map(|v| v.round() + 0.0).collect();
        let expected = [
            [1.0, 1.0, 0.0, 0.0], // the extra token
            [1.0, 1.0, 0.0, 0.0], // (0, 0)
            [1.0, 0.0, 0.0, 1.0], // (0, 1)
            [0.0, 1.0, 1.0, 0.0], // (1, 0)
            [0.0, 0.0, 1.0, 1.0], // (1, 1)
        ];
        assert_eq!(rounded, expected.concat());
        let table = AngleTable::for_grid(theta, 2, &[2, 2], DType::F64)?;
        assert_eq!(options.forward(x, &table)?.as_slice::<f64>()?, o.as_slice::<f64>()?);
        Ok(())
    }

    #[test]
    fn theta_needs_an_angle_for_each_feature() -> Result<()> {
        let (x, theta) = ([1.0f32; 12], [1.0f32, 0.5]);
        let x = View::new(&x, &[1, 1, 2, 6])?;
        let error = Cosine::default().forward(x, View::new(&theta, &[1, 2])?).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cosine: theta has 2 frequencies for each of 1 axes, expected at least 6 angles in all"
        );
        Ok(())
    }
}
