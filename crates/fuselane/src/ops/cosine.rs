//! Cosine encoding: features times the cosines and times the sines of position angles.

use crate::ops::rotate::{FusedAct, Positions};

/// Options of the cosine encoding.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cosine<'a> {
    /// The activation applied first.
    pub act: FusedAct,
    /// Where each token stands.
    pub positions: Positions<'a>,
    /// The first tokens, which have angle 0 (class or condition tokens).
    pub extra_tokens: usize,
    /// Ends of packed sequences along the token dimension (`cu_seqlens`).
    pub sequences: Option<&'a [usize]>,
}
