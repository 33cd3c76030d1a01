//! `rotate`: all activations, placements, pairings, partial rotations, shapes of theta, orders of
//! memory, with angles from theta and from a table.

use fuselane::reference;
use fuselane::{Pairing, Partial, Rotate};

use crate::Case;
pub use crate::bounds::ROTATE as BOUNDS;
use crate::encoding::{self, Encoding, Tokens, Variant};

/// How many pairs rotate.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Extent {
    /// All of them.
    All,
    /// Those that theta has frequencies for.
    ByTheta,
    /// As many as the option says.
    Given,
}

/// Features around the widths of lanes (4, 8, 16) for pairs and for features.
const FEATURES: [usize; 13] = [8, 16, 34, 6, 32, 9, 18, 2, 30, 20, 14, 10, 33];

pub(crate) fn cases() -> Vec<Box<dyn Case>> {
    let mut variants = Vec::new();
    for pairing in [Pairing::Half, Pairing::Interleaved] {
        for (extent, partial) in [
            (Extent::All, Partial::Pairs),
            (Extent::ByTheta, Partial::Pairs),
            (Extent::ByTheta, Partial::RotaryDim),
            (Extent::Given, Partial::Pairs),
            (Extent::Given, Partial::RotaryDim),
        ] {
            variants.push((pairing, extent, partial));
        }
    }
    encoding::cases(&variants, &FEATURES, &BOUNDS, |(pairing, extent, partial), tokens| {
        let &Tokens { act, placement, order, dims: [.., d], shared_frequency, .. } = tokens;
        let (all, axes) = (d / 2, placement.axes());
        let given = 2 * all / 3;
        let frequencies = match extent {
            _ if shared_frequency => 1,
            Extent::All => all.div_ceil(axes),
            Extent::ByTheta => (all / axes / 2).max(1),
            Extent::Given => given.div_ceil(axes).max(1),
        };
        let options = Rotate {
            act,
            layout: order.layout,
            positions: placement.positions,
            extra_tokens: placement.extra_tokens,
            sequences: placement.sequences,
            pairing,
            partial,
            pairs: (extent == Extent::Given).then_some(given),
        };
        Variant {
            encoding: Encoding::Rotate(options),
            name: format!(" pairing={pairing:?} pairs={extent:?} partial={partial:?}"),
            frequencies,
            angles: reference::rotate::pairs(&options, d, frequencies),
        }
    })
}
