//! Rotary position encoding with a fused activation: `x' = act(x)`, and each pair of features of
//! x' is turned by the angle `a` of its token and pair (see [`crate::ops::angles`]):
//!
//! ```text
//! o1 = x'1 cos a - x'2 sin a        pairs: half split (k, k + d/2), or interleaved (2k, 2k + 1)
//! o2 = x'1 sin a + x'2 cos a
//! ```
//!
//! Backward turns the gradient back, and pulls it through the activation:
//!
//! ```text
//! dx'1 =  do1 cos a + do2 sin a     dx = act backward of dx', from x
//! dx'2 = -do1 sin a + do2 cos a     da = x'1 dx'2 - x'2 dx'1,  dtheta = sum of coordinate * da
//! ```
//!
//! Features that are in no rotated pair pass through, with the activation applied. Where d is odd,
//! there are (d - 1) / 2 pairs, and with the half split the last feature is in none.

use crate::error::{Error, Result};
use crate::kernels::encode::Rotation;
use crate::ops::angles::{Angles, Placement, Positions};
use crate::ops::encode::{self, Common, EncodingBackward, FusedAct, Options, TokenLayout};
use crate::plan;
use crate::pool::Buffer;
use crate::reference::{self, angles::Input};
use crate::view::{View, ViewMut};

/// Which features form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pairing {
    /// k and k + d/2.
    #[default]
    Half,
    /// 2k and 2k + 1.
    Interleaved,
}

/// What is rotated where there are fewer than d/2 pairs to rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Partial {
    /// The first of the d/2 pairs of all features.
    #[default]
    Pairs,
    /// The first features, paired among themselves, as NeoX does (`rotary_dim`).
    RotaryDim,
}

/// Options of the rotation.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rotate<'a> {
    /// The activation applied first.
    pub act: FusedAct,
    /// The order of dimensions of x; (batch, tokens, heads, features) by default.
    pub layout: TokenLayout,
    /// Where each token stands.
    pub positions: Positions<'a>,
    /// The first tokens, which are not rotated (class or condition tokens).
    pub extra_tokens: usize,
    /// Ends of packed sequences along the token dimension (`cu_seqlens`): from 0, never falling, to the
    /// number of tokens. Positions start anew in each, and a softmax over the sequence stays within it.
    pub sequences: Option<&'a [usize]>,
    /// Which features form a pair.
    pub pairing: Pairing,
    /// What is rotated where there are fewer than d/2 pairs to rotate.
    pub partial: Partial,
    /// How many pairs rotate. By default as many as there are frequencies for (columns of theta
    /// times axes of a grid, at most d/2), or all where theta has a single column, which then
    /// serves every pair.
    pub pairs: Option<usize>,
}

/// The tensors of a backward call; see [`EncodingBackward`].
pub type RotateBackward<'a> = EncodingBackward<'a>;

impl Rotate<'_> {
    /// Writes the rotated `x` into `o`.
    ///
    /// ```
    /// use fuselane::{Rotate, View, ViewMut};
    /// // Two tokens of one pair; the second one is turned by a quarter.
    /// let (x, theta) = ([1.0f32, 0.0, 1.0, 0.0], [std::f32::consts::FRAC_PI_2]);
    /// let mut o = [0.0f32; 4];
    /// Rotate::default().forward_into(
    ///     View::new(&x, &[1, 2, 1, 2])?,
    ///     View::new(&theta, &[1, 1])?,
    ///     ViewMut::new(&mut o, &[1, 2, 1, 2])?,
    /// )?;
    /// assert!((o[0] - 1.0).abs() < 1e-6 && o[1].abs() < 1e-6);
    /// assert!(o[2].abs() < 1e-6 && (o[3] - 1.0).abs() < 1e-6);
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

    /// [`Rotate::forward_into`] without type parameters, so that kernels are compiled in this crate alone.
    fn encode(&self, x: View<'_>, angles: Angles<'_>, o: ViewMut<'_>) -> Result<()> {
        encode::forward(self, x, angles, o)
    }

    /// The checks of [`Rotate::forward_into`] alone, and what the call comes to. No element is read or written
    /// (of a table neither): views may stand for another device's memory.
    ///
    /// ```
    /// use fuselane::plan::Pairs;
    /// use fuselane::{Rotate, View, ViewMut};
    /// let (x, theta, mut o) = ([0.0f32; 40], [0.0f32; 3], [0.0f32; 40]);
    /// let (x, o) = (View::new(&x, &[1, 2, 2, 10])?, ViewMut::new(&mut o, &[1, 2, 2, 10])?);
    /// let plan = Rotate::default().check_forward(x, View::new(&theta, &[1, 3])?.into(), o)?;
    /// // Three of five pairs turn.
    /// assert_eq!(plan.pairs, Some(Pairs { count: 3, second: Some(5) }));
    /// assert_eq!((plan.tokens, plan.heads, plan.split.count), (2, 2, 3));
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

    /// The rotated `x` in a buffer from the pool.
    pub fn forward<'c>(&self, x: View<'_>, angles: impl Into<Angles<'c>>) -> Result<Buffer> {
        Buffer::filled(x.dtype(), x.shape(), |o| self.forward_into(x, angles, o))
    }

    /// Writes the gradients that are asked for.
    ///
    /// ```
    /// use fuselane::{Rotate, RotateBackward, View, ViewMut};
    /// let (grad, theta) = ([0.0f32, 0.0, 0.0, 1.0], [std::f32::consts::FRAC_PI_2]);
    /// let mut dx = [0.0f32; 4];
    /// Rotate::default().backward_into(RotateBackward {
    ///     x: None, // no activation: the gradient is turned back, whatever x was
    ///     grad: View::new(&grad, &[1, 2, 1, 2])?,
    ///     angles: View::new(&theta, &[1, 1])?.into(),
    ///     dx: Some(ViewMut::new(&mut dx, &[1, 2, 1, 2])?),
    ///     dtheta: None,
    /// })?;
    /// assert!((dx[2] - 1.0).abs() < 1e-6 && dx[3].abs() < 1e-6);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn backward_into(&self, call: RotateBackward<'_>) -> Result<()> {
        encode::backward(self, call)
    }

    /// The checks of [`Rotate::backward_into`] alone, and what the call comes to; see
    /// [`Rotate::check_forward`]. Without x and dx it comes to an encoding without tokens.
    pub fn check_backward(&self, mut call: RotateBackward<'_>) -> Result<plan::Encoding> {
        Ok(encode::check_backward(self, &mut call)?.1)
    }

    /// `dx` of [`Rotate::backward_into`] in a buffer from the pool.
    pub fn backward<'c>(
        &self,
        x: Option<View<'_>>,
        grad: View<'_>,
        angles: impl Into<Angles<'c>>,
    ) -> Result<Buffer> {
        let angles = angles.into();
        Buffer::filled(grad.dtype(), grad.shape(), |dx| {
            self.backward_into(RotateBackward { x, grad, angles, dx: Some(dx), dtheta: None })
        })
    }
}

impl Options for Rotate<'_> {
    type Encoding = Rotation;

    fn common(&self) -> Common<'_> {
        let Self { act, layout, positions, extra_tokens, sequences, .. } = *self;
        Common { act, layout, placement: Placement { positions, extra_tokens, sequences } }
    }

    /// Which features turn.
    fn encoding(&self, angles: Angles<'_>, d: usize) -> Result<Rotation> {
        let (axes, most) = (self.common().placement.axes(), d / 2);
        let given = match angles {
            Angles::Table(table) => table.count(),
            Angles::Theta(theta) => match theta.shape() {
                [_, 1] => most,
                [_, columns] => columns.saturating_mul(axes).min(most),
                _ => 0, // refused when the angles are checked
            },
        };
        let too_many = |argument, got: String, of: &str| {
            let expected = format!("at most {most} ({of} {d} features)");
            Err(Error::new("rotate", argument, got, expected))
        };
        // Frequencies for pairs that do not exist are a mistake, but a grid's may not come out even.
        if let Angles::Theta(theta) = angles
            && let [_, columns] = *theta.shape()
            && columns > most.max(1)
        {
            return too_many("theta", format!("has {columns} frequencies"), "pairs of");
        }
        let pairs = self.pairs.unwrap_or(given);
        if pairs > most {
            return too_many("pairs", format!("is {pairs}"), "half of");
        }
        let second = match (self.pairing, self.partial) {
            (Pairing::Interleaved, _) => None,
            (Pairing::Half, Partial::Pairs) => Some(most),
            (Pairing::Half, Partial::RotaryDim) => Some(pairs),
        };
        Ok(Rotation { features: d, pairs, second })
    }

    fn reference_forward(&self, plan: &plan::Encoding, input: &Input<'_>) -> Vec<f64> {
        reference::rotate::forward(&self.of_pairs(plan), input)
    }

    fn reference_backward(
        &self,
        plan: &plan::Encoding,
        input: &Input<'_>,
        grad: &[f64],
    ) -> reference::angles::Gradients {
        reference::rotate::backward(&self.of_pairs(plan), input, grad)
    }
}

impl Rotate<'_> {
    /// These options with the number of pairs that the call came to.
    fn of_pairs(&self, plan: &plan::Encoding) -> Self {
        Self { pairs: plan.pairs.map(|pairs| pairs.count), ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AngleTable;
    use std::f64::consts::FRAC_PI_2;

    /// A quarter turn per position, one head, tokens of `d` features counted up from 1.
    fn quarter_turns(options: Rotate<'_>, n: usize, d: usize, theta: &[f64]) -> Vec<Vec<f64>> {
        let x: Vec<f64> = (0..n * d).map(|i| (i % d + 1) as f64).collect();
        let x = View::new(&x, &[1, n, 1, d]).unwrap();
        let o = options.forward(x, View::new(theta, &[1, theta.len()]).unwrap()).unwrap();
        let rounded = o.as_slice::<f64>().unwrap().iter().map(|v| (v * 1e9).round() / 1e9 + 0.0);
        rounded.collect::<Vec<_>>().chunks(d).map(<[f64]>::to_vec).collect()
    }

    #[test]
    fn pairs_and_parts() {
        let q = FRAC_PI_2;
        let at = |options, theta: &[f64]| quarter_turns(options, 2, 4, theta)[1].clone();
        let half = Rotate::default();
        let interleaved = Rotate { pairing: Pairing::Interleaved, ..half };
        let rotary_dim = Rotate { partial: Partial::RotaryDim, pairs: Some(1), ..half };
        // (1, 3) and (2, 4) are pairs, or (1, 2) and (3, 4); (a, b) becomes (-b, a).
        assert_eq!(at(half, &[q, q]), [-3.0, -4.0, 1.0, 2.0]);
        assert_eq!(at(half, &[q]), [-3.0, -4.0, 1.0, 2.0]); // one frequency for every pair
        assert_eq!(at(half, &[q, 0.0]), [-3.0, 2.0, 1.0, 4.0]);
        assert_eq!(at(Rotate { pairs: Some(1), ..half }, &[q]), [-3.0, 2.0, 1.0, 4.0]);
        assert_eq!(at(interleaved, &[q, q]), [-2.0, 1.0, -4.0, 3.0]);
        assert_eq!(at(Rotate { pairs: Some(1), ..interleaved }, &[q]), [-2.0, 1.0, 3.0, 4.0]);
        assert_eq!(at(rotary_dim, &[q]), [-2.0, 1.0, 3.0, 4.0]);
    }

    #[test]
    fn heads_with_the_same_frequencies() -> Result<()> {
        let (n, h, d) = (9, 2, 20);
        let x: Vec<f32> = (0..n * h * d).map(|i| (i % 17) as f32 - 8.0).collect();
        let grad: Vec<f32> = (0..n * h * d).map(|i| (i % 13) as f32 - 6.0).collect();
        let (x, grad) = (View::new(&x, &[1, n, h, d])?, View::new(&grad, &[1, n, h, d])?);
        let one: Vec<f32> = (0..d / 2).map(|k| 0.7f32.powi(k as i32)).collect();
        let two = [&one[..], &one[..]].concat();
        let other: Vec<f32> = one.iter().map(|theta| 3.0 * theta).collect();
        let mixed = [&one[..], &other[..]].concat();
        let run = |theta: &[f32]| -> Result<(Vec<f32>, Vec<f32>, Vec<f32>)> {
            let rows = theta.len() / (d / 2);
            let theta = View::new(theta, &[rows, d / 2])?;
            let o = Rotate::default().forward(x, theta)?.as_slice::<f32>()?.to_vec();
            let (mut dx, mut dtheta) = (vec![0.0; n * h * d], vec![0.0; theta.len()]);
            Rotate::default().backward_into(RotateBackward {
                x: Some(x),
                grad,
                angles: theta.into(),
                dx: Some(ViewMut::new(&mut dx, &[1, n, h, d])?),
                dtheta: Some(ViewMut::new(&mut dtheta, &[rows, d / 2])?),
            })?;
            Ok((o, dx, dtheta))
        };
        let ((o, dx, _), (o2, dx2, dtheta2), (o3, dx3, dtheta3)) =
            (run(&one)?, run(&two)?, run(&mixed)?);
        assert_eq!((&o, &dx), (&o2, &dx2));
        // The first head is what it is beside one with other frequencies; each has its own gradient.
        for row in (0..n * h * d).step_by(h * d) {
            assert_eq!(
                (&o2[row..row + d], &dx2[row..row + d]),
                (&o3[row..row + d], &dx3[row..row + d])
            );
        }
        assert_eq!(dtheta2[..d / 2], dtheta3[..d / 2]);
        assert_ne!(dtheta2[..d / 2], dtheta2[d / 2..]);
        Ok(())
    }

    #[test]
    fn positions_of_all_kinds() {
        let turns = |options| -> Vec<f64> {
            quarter_turns(options, 4, 2, &[FRAC_PI_2]).iter().map(|o| o[0]).collect()
        };
        let options = Rotate::default();
        // (1, 2) turned by 0, 1, 2, 3 quarters starts with 1, -2, -1, 2.
        assert_eq!(turns(options), [1.0, -2.0, -1.0, 2.0]);
        assert_eq!(
            turns(Rotate { positions: Positions::From(-1), ..options }),
            [2.0, 1.0, -2.0, -1.0]
        );
        let given = Positions::PerToken(&[3, 0, 0, 5]);
        assert_eq!(turns(Rotate { positions: given, ..options }), [2.0, 1.0, 1.0, -2.0]);
        let packed = Rotate { sequences: Some(&[0, 1, 1, 4]), ..options };
        assert_eq!(turns(packed), [1.0, 1.0, -2.0, -1.0]);
        assert_eq!(turns(Rotate { extra_tokens: 2, ..options }), [1.0, 1.0, 1.0, -2.0]);
        // One pair, two axes: the pair belongs to the first axis, the slow one.
        let grid = Rotate { positions: Positions::Grid(&[2, 2]), ..options };
        assert_eq!(turns(grid), [1.0, 1.0, -2.0, -2.0]);
    }

    #[test]
    fn tables_say_what_they_lack() {
        let theta = [1.0f32, 0.5];
        let theta = View::new(&theta, &[1, 2]).unwrap();
        let table = AngleTable::for_sequence(theta, 2, 0..4, crate::DType::F32).unwrap();
        let x = [1.0f32; 5 * 4];
        let x = View::new(&x, &[1, 5, 1, 4]).unwrap();
        let error = Rotate::default().forward(x, &table).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rotate: angle table holds coordinates 0..4, expected those from 0 to 4, which the \
             call needs"
        );
        let wide = [1.0f32; 3 * 6];
        let wide = View::new(&wide, &[1, 3, 1, 6]).unwrap();
        let options = Rotate { pairs: Some(3), ..Rotate::default() };
        assert_eq!(options.forward(wide, &table).unwrap_err().argument(), "angle table");
    }
}
