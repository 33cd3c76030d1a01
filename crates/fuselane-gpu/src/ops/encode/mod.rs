//! What `rotate` and `cosine` share: an activation, then an encoding by the token's angles.
//!
//! Of a token and head, a unit has a vector of `N` angles with the pairs of features that they
//! rotate, or a vector of features that pass through (`pairs`). It walks over the batch, so that
//! its sines and cosines are made once for all entries; where there are too few vectors to fill a
//! device, over a chunk of it.
//!
//! | file | what it has |
//! |---|---|
//! | `call` | a checked call, and what its launches have in common |
//! | `pairs` | how pairs lie in memory; the encoding itself |
//! | `activation` | the activation before it |
//! | `elementwise` | forward and backward, where statistics of a softmax are known |
//! | `softmax_features` | a softmax over the features: a team of units has a row in registers |
//! | `softmax_sequence` | a softmax over the sequence: its statistics come from `softmax` |
//! | `theta` | the gradient of theta |

mod activation;
mod call;
mod elementwise;
mod pairs;
mod softmax_features;
mod softmax_sequence;
mod theta;

use fuselane::plan::Encoding;
use fuselane::{FusedAct, Positions, Result, TokenLayout, View, ViewMut};

use self::call::{Call, Gradients};
use crate::angles::Angles;
use crate::launch::{one_device, result_like};
use crate::tensor::Tensor;

/// What the encodings differ in.
pub(crate) trait Encoder {
    const NAME: &'static str;
    const OUTPUTS: usize;

    fn checked_forward(
        &self,
        x: View<'_>,
        angles: fuselane::Angles<'_>,
        o: ViewMut<'_>,
    ) -> Result<Encoding>;

    fn checked_backward(&self, views: BackwardViews<'_>) -> Result<Encoding>;

    fn options(&self) -> Options<'_>;
}

/// The public functions of an encoding. `outputs` are the features of the output for each one of x.
macro_rules! functions {
    (
        $(#[$into_doc:meta])* forward_into, $(#[$forward_doc:meta])* forward,
        $options:ident, $backward:ident, name: $name:literal, outputs: $outputs:literal
    ) => {
        $(#[$into_doc])*
        pub fn forward_into<'a>(
            options: &fuselane::$options<'_>,
            x: &crate::Tensor,
            angles: impl Into<crate::Angles<'a>>,
            o: &mut crate::Tensor,
        ) -> fuselane::Result<()> {
            super::encode::forward_into(options, x, angles.into(), o)
        }

        $(#[$forward_doc])*
        pub fn forward<'a>(
            options: &fuselane::$options<'_>,
            x: &crate::Tensor,
            angles: impl Into<crate::Angles<'a>>,
        ) -> fuselane::Result<crate::Tensor> {
            super::encode::forward(options, x, angles.into())
        }

        /// Writes the gradients that are asked for.
        pub fn backward_into(
            options: &fuselane::$options<'_>,
            backward: $backward<'_>,
        ) -> fuselane::Result<()> {
            super::encode::backward_into(options, backward)
        }

        /// `dx` of [`backward_into`] in a new tensor.
        pub fn backward<'a>(
            options: &fuselane::$options<'_>,
            x: Option<&'a crate::Tensor>,
            grad: &'a crate::Tensor,
            angles: impl Into<crate::Angles<'a>>,
        ) -> fuselane::Result<crate::Tensor> {
            super::encode::backward(options, x, grad, angles.into())
        }

        impl super::encode::Encoder for fuselane::$options<'_> {
            const NAME: &'static str = $name;
            const OUTPUTS: usize = $outputs;

            fn checked_forward(
                &self,
                x: fuselane::View<'_>,
                angles: fuselane::Angles<'_>,
                o: fuselane::ViewMut<'_>,
            ) -> fuselane::Result<fuselane::plan::Encoding> {
                self.check_forward(x, angles, o)
            }

            fn checked_backward(
                &self,
                views: super::encode::BackwardViews<'_>,
            ) -> fuselane::Result<fuselane::plan::Encoding> {
                let super::encode::BackwardViews { x, grad, angles, dx, dtheta } = views;
                self.check_backward(fuselane::$backward { x, grad, angles, dx, dtheta })
            }

            fn options(&self) -> super::encode::Options<'_> {
                let Self { act, layout, positions, extra_tokens, sequences, .. } = *self;
                super::encode::Options { act, layout, positions, extra_tokens, sequences }
            }
        }
    };
}
pub(super) use functions;

/// The options that all encodings have.
#[derive(Clone, Copy)]
pub(crate) struct Options<'a> {
    pub(crate) act: FusedAct,
    pub(crate) layout: TokenLayout,
    pub(crate) positions: Positions<'a>,
    pub(crate) extra_tokens: usize,
    pub(crate) sequences: Option<&'a [usize]>,
}

/// The tensors of a backward call. Outputs that are `None` are not computed.
#[derive(Debug)]
pub struct EncodingBackward<'a> {
    /// What the forward got; needed where there is an activation, and for `dtheta`.
    pub x: Option<&'a Tensor>,
    /// The gradient that arrives at the output, in its shape.
    pub grad: &'a Tensor,
    /// The frequencies or the table that the forward used.
    pub angles: Angles<'a>,
    /// The gradient of x.
    pub dx: Option<&'a mut Tensor>,
    /// The gradient of theta, in theta's shape.
    pub dtheta: Option<&'a mut Tensor>,
}

/// Those tensors as the core's checks know them.
pub(crate) struct BackwardViews<'a> {
    pub(crate) x: Option<View<'a>>,
    pub(crate) grad: View<'a>,
    pub(crate) angles: fuselane::Angles<'a>,
    pub(crate) dx: Option<ViewMut<'a>>,
    pub(crate) dtheta: Option<ViewMut<'a>>,
}

pub(crate) fn forward_into<O: Encoder>(
    encoder: &O,
    x: &Tensor,
    angles: Angles<'_>,
    o: &mut Tensor,
) -> Result<()> {
    one_device(O::NAME, [("x", Some(x)), angles.tensor(), ("o", Some(o))])?;
    let encoding = encoder.checked_forward(x.view()?, angles.checked()?, o.view_mut()?)?;
    let options = encoder.options();
    call::forward(&Call { operator: O::NAME, encoding, options, angles }, x, o)
}

pub(super) fn forward<O: Encoder>(encoder: &O, x: &Tensor, angles: Angles<'_>) -> Result<Tensor> {
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last *= O::OUTPUTS;
    }
    let mut o = result_like(O::NAME, "x", x, &shape)?;
    forward_into(encoder, x, angles, &mut o)?;
    Ok(o)
}

pub(crate) fn backward_into<O: Encoder>(encoder: &O, backward: EncodingBackward<'_>) -> Result<()> {
    let EncodingBackward { x, grad, angles, dx, dtheta } = backward;
    let (dx, dtheta) = (dx.as_deref(), dtheta.as_deref());
    one_device(
        O::NAME,
        [("grad", Some(grad)), ("x", x), angles.tensor(), ("dx", dx), ("dtheta", dtheta)],
    )?;
    let encoding = encoder.checked_backward(BackwardViews {
        x: x.map(Tensor::view).transpose()?,
        grad: grad.view()?,
        angles: angles.checked()?,
        dx: dx.map(Tensor::view_mut).transpose()?,
        dtheta: dtheta.map(Tensor::view_mut).transpose()?,
    })?;
    let call = Call { operator: O::NAME, encoding, options: encoder.options(), angles };
    call::backward(&call, Gradients { x, grad, dx, dtheta })
}

pub(super) fn backward<'a, O: Encoder>(
    encoder: &O,
    x: Option<&'a Tensor>,
    grad: &'a Tensor,
    angles: Angles<'a>,
) -> Result<Tensor> {
    let mut shape = grad.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last /= O::OUTPUTS;
    }
    let mut dx = result_like(O::NAME, "grad", grad, &shape)?;
    let call = EncodingBackward { x, grad, angles, dx: Some(&mut dx), dtheta: None };
    backward_into(encoder, call)?;
    Ok(dx)
}
