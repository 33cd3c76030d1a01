//! Softmax and log-softmax over one dimension.

/// Softmax over dimension `dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Softmax {
    /// The dimension that is summed over; negative ones count from the last.
    pub dim: isize,
    /// Gives the logarithm of the softmax instead.
    pub log: bool,
    /// A row of nothing but minus infinity gives zeros (minus infinities for the logarithm) and
    /// zero gradients, instead of NaN.
    pub zero_masked_rows: bool,
}

impl Default for Softmax {
    fn default() -> Self {
        Self { dim: -1, log: false, zero_masked_rows: false }
    }
}
