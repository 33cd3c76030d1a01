//! What a checked call of `rotate` or `cosine` comes to, for backends other than this CPU.
//!
//! Every `_into` call has a `check_` twin ([`Act::check_forward`](crate::Act::check_forward), ...) with
//! the same checks in the same order, which reads and writes no element. A backend makes views of its own
//! memory with [`View::from_raw`](crate::View::from_raw), whatever the addresses mean, lets the core
//! refuse what is wrong, and runs the rest by itself. For most operators the options say all there is to
//! know; how the angles of the two encodings are made is here.

pub use crate::ops::angles::{AngleSplit, TableAxis};

use crate::ops::angles::{Placement, Positions};

/// A checked call of `rotate` or `cosine`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoding {
    /// Batch entries.
    pub batch: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Heads of each token.
    pub heads: usize,
    /// Features of each head of x.
    pub features: usize,
    /// Features of each head of o: as many, or twice as many for `cosine`.
    pub output_features: usize,
    /// Which features turn; `None` for `cosine`, which has an angle for each feature.
    pub pairs: Option<Pairs>,
    /// How the angles spread over theta and the axes.
    pub split: AngleSplit,
}

impl Encoding {
    /// Whether there is no element to work on. (A dtheta that was asked for is then zero.)
    pub fn is_empty(&self) -> bool {
        [self.batch, self.tokens, self.heads, self.features].contains(&0)
    }
}

/// Which features `rotate` turns. The others pass through, with the activation applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pairs {
    /// How many pairs turn.
    pub count: usize,
    /// Pair k is (k, k + second), or (2k, 2k + 1) if this is `None`.
    pub second: Option<usize>,
}

/// The integer coordinates of token `token` of batch entry `batch`, one for each axis: angle j of
/// the token is the coordinate on axis `j / split.per_axis` times column `split.column(j)` of theta.
///
/// `positions`, `extra_tokens` and `sequences` are the options of a call that was checked, and
/// `tokens` is the number of its tokens.
///
/// ```
/// use fuselane::Positions;
/// use fuselane::plan::coordinates;
/// assert_eq!(coordinates(Positions::From(7), 0, Some(&[0, 2, 6]), 6, 0, 3), [8]);
/// assert_eq!(coordinates(Positions::PerBatch(&[4, 5, -6, 3]), 0, None, 2, 1, 0), [-6]);
/// // On a grid behind one extra token.
/// assert_eq!(coordinates(Positions::Grid(&[2, 3]), 1, None, 7, 0, 6), [1, 2]);
/// ```
///
/// # Panics
///
/// It may panic where the check would have refused the call, or where there is no such token.
pub fn coordinates(
    positions: Positions<'_>,
    extra_tokens: usize,
    sequences: Option<&[usize]>,
    tokens: usize,
    batch: usize,
    token: usize,
) -> Vec<i64> {
    let placement = Placement { positions, extra_tokens, sequences };
    placement.coordinates(tokens, batch, token)[..placement.axes()].to_vec()
}
