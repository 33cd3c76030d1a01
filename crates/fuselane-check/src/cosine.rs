//! `cosine`: all activations, placements, shapes of theta, orders of memory, with angles from theta
//! and from a table.

use fuselane::Cosine;

use crate::Case;
pub use crate::bounds::COSINE as BOUNDS;
use crate::encoding::{self, Encoding, Tokens, Variant};

/// Features around the widths of lanes (4, 8, 16).
const FEATURES: [usize; 13] = [8, 16, 17, 3, 15, 4, 9, 1, 31, 33, 7, 5, 32];

pub(crate) fn cases() -> Vec<Box<dyn Case>> {
    encoding::cases(&[()], &FEATURES, &BOUNDS, |(), tokens| {
        let &Tokens { act, placement, order, dims: [.., d], shared_frequency, index, .. } = tokens;
        // Now and then theta has more frequencies than there are features for.
        let more = usize::from(index.is_multiple_of(7));
        let options = Cosine {
            act,
            layout: order.layout,
            positions: placement.positions,
            extra_tokens: placement.extra_tokens,
            sequences: placement.sequences,
        };
        Variant {
            encoding: Encoding::Cosine(options),
            name: String::new(),
            frequencies: if shared_frequency { 1 } else { d.div_ceil(placement.axes()) + more },
            angles: d,
        }
    })
}
