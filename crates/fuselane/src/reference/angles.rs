//! The angles of `rotate` and `cosine`: which frequency and which coordinate make each of them.
//!
//! ```text
//! A_j = coordinate of the token along axis(j) * theta[head][frequency(j)],   j in 0..count
//!
//! axis(j)      = j / e      (always 0 without a grid)
//! frequency(j) = j mod e
//! ```
//!
//! where e is the number of frequencies in theta. A theta of a single frequency serves all angles:
//! then e, for the axes, is ceil(count / axes).
//!
//! Coordinates, for the token that is number t of its sequence (packed sequences are numbered each
//! by itself, as if it were alone), with l `extra_tokens`:
//!
//! ```text
//! t < l                 0, whatever the positions say
//! From(offset)          t - l + offset
//! PerToken, PerBatch    as given
//! Grid(n1, ..., nm)     the digits of t - l, the last axis fastest
//! ```

use super::fused_act::sequence_bounds;
use crate::dtype::DType;
use crate::ops::angles::Positions;

/// What `rotate` and `cosine` read.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The activations, of shape `dims`.
    pub x: &'a [f64],
    /// (b, n, h, d)
    pub dims: [usize; 4],
    /// The frequencies, of shape `theta_dims`.
    pub theta: &'a [f64],
    /// (h or 1, e)
    pub theta_dims: [usize; 2],
    /// The dtype of the activations, which decides how angles are rounded: the product of the
    /// position and theta is formed in f64 for [`DType::F64`] and in f32 for all others, from
    /// factors rounded to f32. Its sine and cosine are then those of that very angle.
    pub dtype: DType,
}

/// The gradients of `rotate` and `cosine`, or the magnitudes of their terms.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// In the shape of x.
    pub dx: Vec<f64>,
    /// In the shape of theta.
    pub dtheta: Vec<f64>,
}

/// The rule at the head of this file, for one call.
#[derive(Debug, Clone)]
pub struct Angles<'a> {
    input: Input<'a>,
    count: usize,
    /// b * n tokens with one coordinate for each axis.
    coordinates: Vec<Vec<i64>>,
}

impl<'a> Angles<'a> {
    /// `count` angles for each token and head.
    ///
    /// # Panics
    ///
    /// Where a length does not match, theta has too few frequencies, or a sequence does not fill
    /// its extra tokens and its grid exactly.
    pub fn new(
        input: &Input<'a>,
        count: usize,
        positions: &Positions,
        extra_tokens: usize,
        sequences: Option<&[usize]>,
    ) -> Self {
        let [b, n, h, d] = input.dims;
        let [theta_heads, frequencies] = input.theta_dims;
        assert_eq!(input.x.len(), b * n * h * d, "elements of x");
        assert_eq!(input.theta.len(), theta_heads * frequencies, "elements of theta");
        assert!(theta_heads == h || theta_heads == 1, "theta has {theta_heads} heads, x has {h}");
        assert!(
            frequencies == 1 || frequencies * axes(positions) >= count,
            "theta has {frequencies} frequencies for {count} angles"
        );
        match positions {
            Positions::PerToken(given) => assert_eq!(given.len(), n, "positions"),
            Positions::PerBatch(given) => assert_eq!(given.len(), b * n, "positions"),
            Positions::From(_) | Positions::Grid(_) => {}
        }
        let mut coordinates = vec![vec![]; b * n];
        for batch in 0..b {
            for (start, end) in sequence_bounds(sequences, n) {
                if let Positions::Grid(grid) = positions {
                    let expected = extra_tokens + grid.iter().product::<usize>();
                    assert!(start == end || end - start == expected, "tokens of a grid");
                }
                for token in start..end {
                    coordinates[batch * n + token] = if token - start < extra_tokens {
                        vec![0; axes(positions)]
                    } else {
                        let s = token - start - extra_tokens;
                        match positions {
                            Positions::From(offset) => vec![s as i64 + offset],
                            Positions::PerToken(given) => vec![given[token]],
                            Positions::PerBatch(given) => vec![given[batch * n + token]],
                            Positions::Grid(grid) => digits(s, grid),
                        }
                    };
                }
            }
        }
        Self { input: *input, count, coordinates }
    }

    /// The axis that angle j belongs to.
    fn axis(&self, token: usize, j: usize) -> usize {
        let axes = self.coordinates[token].len();
        let [_, frequencies] = self.input.theta_dims;
        let per_axis = if frequencies == 1 { self.count.div_ceil(axes) } else { frequencies };
        j / per_axis
    }

    /// The coordinate that angle `j` of token `token` of batch entry `batch` multiplies, rounded as
    /// the angle's factors are.
    pub fn coordinate(&self, batch: usize, token: usize, j: usize) -> f64 {
        let [_, n, ..] = self.input.dims;
        let token = batch * n + token;
        let coordinate = self.coordinates[token][self.axis(token, j)];
        match self.input.dtype {
            DType::F64 => coordinate as f64,
            _ => f64::from(coordinate as f32),
        }
    }

    /// Where in theta the frequency of angle `j` of `head` is.
    pub fn theta_index(&self, head: usize, j: usize) -> usize {
        let [theta_heads, frequencies] = self.input.theta_dims;
        let row = if theta_heads == 1 { 0 } else { head };
        row * frequencies + j % frequencies
    }

    /// Calls `f` with each angle of each token and head, the angles of one head one after the other.
    pub(super) fn for_each(&self, mut f: impl FnMut(Angle)) {
        let [b, n, h, _] = self.input.dims;
        for batch in 0..b {
            for token in 0..n {
                for head in 0..h {
                    for j in 0..self.count {
                        f(Angle {
                            at: [(batch * n + token) * h + head, j],
                            value: self.angle(batch, token, head, j),
                            coordinate: self.coordinate(batch, token, j),
                            theta_index: self.theta_index(head, j),
                        });
                    }
                }
            }
        }
    }

    /// Angle `j`.
    pub fn angle(&self, batch: usize, token: usize, head: usize, j: usize) -> f64 {
        let coordinate = self.coordinate(batch, token, j);
        let theta = self.input.theta[self.theta_index(head, j)];
        match self.input.dtype {
            DType::F64 => coordinate * theta,
            _ => f64::from(coordinate as f32 * theta as f32),
        }
    }
}

/// One angle of one token and head.
pub(super) struct Angle {
    /// The row of features that it belongs to, and which of the row's angles it is.
    pub(super) at: [usize; 2],
    pub(super) value: f64,
    /// Its factors: the token's coordinate, and where in theta the frequency is.
    pub(super) coordinate: f64,
    pub(super) theta_index: usize,
}

/// The number of axes that share the angles: those of the grid, or the line that tokens stand on.
pub(super) fn axes(positions: &Positions) -> usize {
    match positions {
        Positions::Grid(grid) => {
            assert!(!grid.is_empty(), "a grid has at least one axis");
            grid.len()
        }
        _ => 1,
    }
}

/// The coordinates of cell `s` of a grid, the last axis fastest.
fn digits(mut s: usize, grid: &[usize]) -> Vec<i64> {
    let mut coordinates = vec![0; grid.len()];
    for (coordinate, size) in coordinates.iter_mut().zip(grid).rev() {
        *coordinate = (s % size) as i64;
        s /= size;
    }
    coordinates
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input<'a>(dims: [usize; 4], x: &'a [f64], theta: &'a [f64], dtype: DType) -> Input<'a> {
        Input { x, dims, theta, theta_dims: [1, theta.len()], dtype }
    }

    fn all(angles: &Angles, batch: usize, token: usize) -> Vec<f64> {
        (0..angles.count).map(|j| angles.angle(batch, token, 0, j)).collect()
    }

    #[test]
    fn positions_of_a_line() {
        let (x, theta) = ([0.0; 12], [1.0, 10.0]);
        let input = input([2, 6, 1, 1], &x, &theta, DType::F64);
        let line = |positions, extra_tokens, sequences| -> Vec<f64> {
            let angles = Angles::new(&input, 2, &positions, extra_tokens, sequences);
            for token in 0..6 {
                let angle = angles.angle(0, token, 0, 0);
                assert_eq!(angles.angle(0, token, 0, 1), 10.0 * angle);
            }
            (0..12).map(|t| angles.angle(t / 6, t % 6, 0, 0)).collect()
        };
        let twice = |line: [f64; 6]| [line, line].concat();
        let from = |offset| Positions::From(offset);
        assert_eq!(line(from(0), 0, None), twice([0., 1., 2., 3., 4., 5.]));
        assert_eq!(line(from(-2), 0, None), twice([-2., -1., 0., 1., 2., 3.]));
        assert_eq!(line(from(7), 2, None), twice([0., 0., 7., 8., 9., 10.]));
        // Packed sequences are numbered as if each were alone, extra tokens included.
        let packed = Some(&[0, 2, 2, 6][..]);
        assert_eq!(line(from(3), 0, packed), twice([3., 4., 3., 4., 5., 6.]));
        assert_eq!(line(from(3), 1, packed), twice([0., 3., 0., 3., 4., 5.]));
        let given = [5, 4, 3, 2, 1, 0, 10, 11, 12, 13, 14, 15];
        let per_token = Positions::PerToken(&given[..6]);
        assert_eq!(line(per_token, 0, packed), twice([5., 4., 3., 2., 1., 0.]));
        assert_eq!(line(per_token, 1, None), twice([0., 4., 3., 2., 1., 0.]));
        let per_batch = Positions::PerBatch(&given);
        assert_eq!(line(per_batch, 0, packed), given.map(|p| p as f64));
    }

    #[test]
    fn axes_of_a_grid() {
        // One extra token, then 2 x 3 cells; 3 angles from 2 frequencies: the third is the first
        // frequency on the second axis.
        let (x, theta) = ([0.0; 7], [1.0, 10.0]);
        let input7 = input([1, 7, 1, 1], &x, &theta, DType::F64);
        let angles = Angles::new(&input7, 3, &Positions::Grid(&[2, 3]), 1, None);
        let expected = [
            [0., 0., 0.],
            [0., 0., 0.],
            [0., 0., 1.],
            [0., 0., 2.],
            [1., 10., 0.],
            [1., 10., 1.],
            [1., 10., 2.],
        ];
        for (token, expected) in expected.iter().enumerate() {
            assert_eq!(all(&angles, 0, token), expected, "token {token}");
        }
        // A single frequency for 5 angles on 2 axes: three on the first, two on the second.
        let single = input([1, 6, 1, 1], &x[..6], &theta[1..], DType::F64);
        let angles = Angles::new(&single, 5, &Positions::Grid(&[2, 3]), 0, None);
        assert_eq!(all(&angles, 0, 5), [10., 10., 10., 20., 20.]);
        assert_eq!(digits(23, &[2, 3, 4]), [1, 2, 3]);
        assert_eq!(digits(6, &[2, 3, 4]), [0, 1, 2]);
    }

    #[test]
    fn angles_are_rounded_once_to_f32() {
        let (x, theta) = ([0.0], [f64::from(0.1f32)]);
        let position = (1 << 24) + 1;
        for (dtype, expected) in [
            (DType::F64, position as f64 * theta[0]),
            (DType::F32, f64::from(16_777_216.0f32 * 0.1f32)),
            (DType::BF16, f64::from(16_777_216.0f32 * 0.1f32)),
        ] {
            let input = input([1, 1, 1, 1], &x, &theta, dtype);
            let angles = Angles::new(&input, 1, &Positions::From(position), 0, None);
            assert_eq!(angles.angle(0, 0, 0, 0), expected);
        }
    }

    #[test]
    fn heads_have_their_own_frequencies() {
        let input = Input {
            x: &[0.0; 2],
            dims: [1, 1, 2, 1],
            theta: &[1.0, 2.0, 3.0, 4.0],
            theta_dims: [2, 2],
            dtype: DType::F64,
        };
        let angles = Angles::new(&input, 2, &Positions::From(1), 0, None);
        let got = [0, 1].map(|head| [0, 1].map(|j| angles.angle(0, 0, head, j)));
        assert_eq!(got, [[1.0, 2.0], [3.0, 4.0]]);
    }
}
