//! `cosine`: all activations, placements, shapes of theta, orders of memory, with angles from theta
//! and from a table.

use std::fmt;

use fuselane::reference::angles::{Gradients, Input};
use fuselane::reference::{self};
use fuselane::{Angles, Cosine, CosineBackward, DType, FusedAct, Result, View, ViewMut};

use crate::backend::{Backend, Runner};
use crate::encoding::{self, BATCH, Encode, ORDERS, PLACEMENTS, THETA_DTYPES, Tokens, fused_acts};
use crate::outcome::Outcomes;
use crate::{Bound, Case};

/// What is promised of the encoding. The terms of o are the element times 1 for the sine or the
/// cosine, after the terms of the activation; those of dx both gradients of the element, those of
/// dtheta the products of the coordinate, the element and both its gradients. Activations with short
/// forms (`encoding::has_short_forms`) have bounds of their own.
pub const BOUNDS: [Bound; 5] = [
    Bound { output: "o", f32: 6.5, f16: 6.5, bf16: 6.5, f64: 20.0 },
    Bound { output: "dx", f32: 4.5, f16: 4.5, bf16: 4.5, f64: 14.0 },
    Bound { output: "o of short forms", f32: 6.5, f16: 2500.0, bf16: 9000.0, f64: 20.0 },
    Bound { output: "dx of short forms", f32: 4.5, f16: 2500.0, bf16: 10000.0, f64: 14.0 },
    Bound { output: "dtheta", f32: 3.5, f16: 3.5, bf16: 3.5, f64: 3.0 },
];

struct Waves {
    options: Cosine<'static>,
    tokens: Tokens,
}

/// Features around the widths of lanes (4, 8, 16).
const FEATURES: [usize; 13] = [8, 16, 17, 3, 15, 4, 9, 1, 31, 33, 7, 5, 32];

pub(crate) fn cases() -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for act in fused_acts() {
        for placement in PLACEMENTS {
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
                            let columns = match shared_frequency {
                                true => 1,
                                // Now and then more than there are features for.
                                false => {
                                    d.div_ceil(placement.axes()) + usize::from(i.is_multiple_of(7))
                                }
                            };
                            let options = Cosine {
                                act,
                                layout: order.layout,
                                positions: placement.positions,
                                extra_tokens: placement.extra_tokens,
                                sequences: placement.sequences,
                            };
                            let tokens = Tokens {
                                placement,
                                order,
                                dims: [BATCH, placement.tokens, heads, d],
                                theta_dims: [if shared_head { 1 } else { heads }, columns],
                                theta_dtype: THETA_DTYPES[i / 3 % 4],
                                count: d,
                                table,
                                with_x: i.is_multiple_of(5),
                                seed: i as u64,
                            };
                            cases.push(Box::new(Waves { options, tokens }));
                        }
                    }
                }
            }
        }
    }
    cases
}

impl fmt::Display for Waves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cosine act={} {}", self.options.act, self.tokens)
    }
}

impl Case for Waves {
    fn parameter_dtypes(&self) -> Vec<DType> {
        vec![self.tokens.theta_dtype]
    }

    fn run(&self, dtype: DType, runners: &[Runner<'_>], outcomes: &mut Outcomes) {
        encoding::run((self, &self.tokens, &BOUNDS), &self.options, dtype, runners, outcomes);
    }
}

impl Encode for Cosine<'_> {
    fn width(&self, d: usize) -> usize {
        2 * d
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
        backend.cosine_forward(self, x, angles, o)
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
        backend.cosine_backward(self, CosineBackward { x, grad, angles, dx, dtheta })
    }

    fn reference(&self, input: &Input<'_>) -> [Vec<f64>; 2] {
        use reference::cosine::{forward, forward_magnitude};
        [forward(self, input), forward_magnitude(self, input)]
    }

    fn reference_gradients(&self, input: &Input<'_>, grad: &[f64]) -> [Gradients; 2] {
        use reference::cosine::{backward, backward_magnitude};
        [backward(self, input, grad), backward_magnitude(self, input, grad)]
    }
}
