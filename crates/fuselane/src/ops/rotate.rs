//! Rotary position encoding with a fused activation.

use crate::ops::act::Act;

/// The activation that `rotate` and `cosine` apply to their input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FusedAct {
    /// An elementwise one.
    Elementwise(Act),
    /// Softmax over the features of each token and head.
    SoftmaxFeatures,
    /// Softmax over the tokens of each sequence, for each head and feature.
    SoftmaxSequence,
}

impl Default for FusedAct {
    fn default() -> Self {
        Self::Elementwise(Act::None)
    }
}

/// Where each token stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions<'a> {
    /// Token t stands at t + offset (within its packed sequence, if there are several).
    From(i64),
    /// One position for each of the n tokens, the same for every batch entry.
    PerToken(&'a [i64]),
    /// b * n positions, one for each batch entry and token.
    PerBatch(&'a [i64]),
    /// Tokens on a grid of this shape, the last axis fastest; the angles are split among the axes.
    Grid(&'a [usize]),
}

impl Default for Positions<'_> {
    fn default() -> Self {
        Self::From(0)
    }
}

/// Which features form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pairing {
    /// k and k + d/2.
    #[default]
    Half,
    /// 2k and 2k + 1.
    Interleaved,
}

/// What a theta with fewer than d/2 frequencies rotates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Partial {
    /// The first e of the d/2 pairs.
    #[default]
    Pairs,
    /// The first 2e features, paired among themselves, as NeoX does.
    RotaryDim,
}

/// Options of the rotation.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rotate<'a> {
    /// The activation applied first.
    pub act: FusedAct,
    /// Where each token stands.
    pub positions: Positions<'a>,
    /// The first tokens of a grid that have angle 0 (class or condition tokens).
    pub extra_tokens: usize,
    /// Ends of packed sequences along the token dimension: starts with 0, ends with n, never falls
    /// (`cu_seqlens`).
    pub sequences: Option<&'a [usize]>,
    /// Which features form a pair.
    pub pairing: Pairing,
    /// What fewer than d/2 frequencies rotate.
    pub partial: Partial,
    /// How many pairs rotate. By default as many as theta has frequencies (times the axes of a grid, at most d/2), or all
    /// d/2 where theta has a single one, which then serves every pair.
    pub pairs: Option<usize>,
}
