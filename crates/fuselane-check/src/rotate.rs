//! `rotate`: all activations, placements, pairings, partial rotations, shapes of theta, orders of
//! memory, with angles from theta and from a table.

use std::fmt;

use fuselane::reference::angles::{Gradients, Input};
use fuselane::reference::{self};
use fuselane::{
    Angles, DType, FusedAct, Pairing, Partial, Result, Rotate, RotateBackward, View, ViewMut,
};

use crate::backend::{Backend, Runner};
use crate::encoding::{self, BATCH, Encode, ORDERS, PLACEMENTS, THETA_DTYPES, Tokens, fused_acts};
use crate::outcome::Outcomes;
use crate::{Bound, Case};

/// What is promised of the rotation. The terms of o and dx are both elements of their pair, each
/// times 1 for the sine or the cosine, after the terms of the activation; those of dtheta are the
/// products of the coordinate, both gradients and both elements of a pair. Activations with short
/// forms (`encoding::has_short_forms`) have bounds of their own.
pub const BOUNDS: [Bound; 5] = [
    Bound { output: "o", f32: 7.5, f16: 7.5, bf16: 7.5, f64: 25.0 },
    Bound { output: "dx", f32: 5.5, f16: 5.5, bf16: 5.5, f64: 20.0 },
    Bound { output: "o of short forms", f32: 7.5, f16: 2500.0, bf16: 9000.0, f64: 25.0 },
    Bound { output: "dx of short forms", f32: 5.5, f16: 2500.0, bf16: 14000.0, f64: 20.0 },
    Bound { output: "dtheta", f32: 3.5, f16: 3.5, bf16: 3.5, f64: 4.0 },
];

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

struct Rotation {
    options: Rotate<'static>,
    extent: Extent,
    tokens: Tokens,
}

/// Features around the widths of lanes (4, 8, 16) for pairs and for features.
const FEATURES: [usize; 13] = [8, 16, 34, 6, 32, 9, 18, 2, 30, 20, 14, 10, 33];

pub(crate) fn cases() -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for act in fused_acts() {
        for placement in PLACEMENTS {
            for pairing in [Pairing::Half, Pairing::Interleaved] {
                for (extent, partial) in [
                    (Extent::All, Partial::Pairs),
                    (Extent::ByTheta, Partial::Pairs),
                    (Extent::ByTheta, Partial::RotaryDim),
                    (Extent::Given, Partial::Pairs),
                    (Extent::Given, Partial::RotaryDim),
                ] {
                    for shared_head in [false, true] {
                        for shared_frequency in [false, true] {
                            for order in ORDERS {
                                for table in [false, true] {
                                    if !placement.suits(act, order, table) {
                                        continue;
                                    }
                                    let i = cases.len();
                                    let d = FEATURES[i % FEATURES.len()];
                                    let heads = 1 + i % 3;
                                    let (all, axes) = (d / 2, placement.axes());
                                    let columns = match extent {
                                        _ if shared_frequency => 1,
                                        Extent::All => all.div_ceil(axes),
                                        Extent::ByTheta => (all / axes / 2).max(1),
                                        Extent::Given => (2 * all / 3).div_ceil(axes).max(1),
                                    };
                                    let given = (extent == Extent::Given).then_some(2 * all / 3);
                                    let options = Rotate {
                                        act,
                                        layout: order.layout,
                                        positions: placement.positions,
                                        extra_tokens: placement.extra_tokens,
                                        sequences: placement.sequences,
                                        pairing,
                                        partial,
                                        pairs: given,
                                    };
                                    let tokens = Tokens {
                                        placement,
                                        order,
                                        dims: [BATCH, placement.tokens, heads, d],
                                        theta_dims: [if shared_head { 1 } else { heads }, columns],
                                        theta_dtype: THETA_DTYPES[i / 3 % 4],
                                        count: reference::rotate::pairs(&options, d, columns),
                                        table,
                                        with_x: i.is_multiple_of(5),
                                        seed: i as u64,
                                    };
                                    cases.push(Box::new(Rotation { options, extent, tokens }));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    cases
}

impl fmt::Display for Rotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rotate { act, pairing, partial, .. } = self.options;
        let pairs = self.extent;
        write!(f, "rotate act={act} pairing={pairing:?} pairs={pairs:?} partial={partial:?} ")?;
        self.tokens.fmt(f)
    }
}

impl Case for Rotation {
    fn parameter_dtypes(&self) -> Vec<DType> {
        vec![self.tokens.theta_dtype]
    }

    fn run(&self, dtype: DType, runners: &[Runner<'_>], outcomes: &mut Outcomes) {
        encoding::run((self, &self.tokens, &BOUNDS), &self.options, dtype, runners, outcomes);
    }
}

impl Encode for Rotate<'_> {
    fn width(&self, d: usize) -> usize {
        d
    }

    fn act(&self) -> FusedAct {
        self.act
    }

    fn forward(
        &self,
        backend: &dyn Backend,
        x: View<'_>,
        angles: Angles<'_>,
        o: ViewMut<'_>,
    ) -> Result<()> {
        backend.rotate_forward(self, x, angles, o)
    }

    fn backward(
        &self,
        backend: &dyn Backend,
        x: Option<View<'_>>,
        grad: View<'_>,
        angles: Angles<'_>,
        dx: Option<ViewMut<'_>>,
        dtheta: Option<ViewMut<'_>>,
    ) -> Result<()> {
        backend.rotate_backward(self, RotateBackward { x, grad, angles, dx, dtheta })
    }

    fn reference(&self, input: &Input<'_>) -> [Vec<f64>; 2] {
        use reference::rotate::{forward, forward_magnitude};
        [forward(self, input), forward_magnitude(self, input)]
    }

    fn reference_gradients(&self, input: &Input<'_>, grad: &[f64]) -> [Gradients; 2] {
        use reference::rotate::{backward, backward_magnitude};
        [backward(self, input, grad), backward_magnitude(self, input, grad)]
    }
}
