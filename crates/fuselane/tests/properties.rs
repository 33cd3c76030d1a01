//! Random shapes, strides, dtypes, options and special values. For each call: nothing beside the
//! outputs is written and everything in them is, inputs stay as they were, strided views give the
//! bits that dense copies give, and the results are those of the reference.

mod common;

use common::{Call, Input, Output, Tokens, assert_near};
use fuselane::reference::{self, Random, angles};
use fuselane::{
    Act, Cosine, CosineBackward, DType, FusedAct, Pairing, Partial, Rotate, RotateBackward,
};
use proptest::prelude::*;

/// Ulps of the arithmetic that are allowed beside the rounding of the output: loose, the tight
/// bounds are in the option matrix.
const ULPS: f64 = 64.0;

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Shapes of up to five dimensions with zeros, ones and odd sizes, of at most a few thousand
/// elements.
fn shapes(least: usize) -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![1 => Just(0usize), 3 => Just(1), 12 => 2usize..10, 2 => 10usize..70];
    prop::collection::vec(size, least..=5)
        .prop_filter("small", |shape| shape.iter().product::<usize>() <= 4000)
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop::sample::select(DType::ALL.to_vec())
}

/// A dimension that is longer than 1, if there is one.
fn long_dimension(random: &mut Random, shape: &[usize]) -> usize {
    let long: Vec<usize> = (0..shape.len()).filter(|&d| shape[d] > 1).collect();
    long.get(random.below(long.len())).copied().unwrap_or(shape.len().saturating_sub(1))
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn act(shape in shapes(0), dtype in dtypes(), act in prop::sample::select(Act::ALL.to_vec()),
           specials: bool, seed: u64) {
        let random = &mut Random::new(seed);
        let inner = long_dimension(random, &shape);
        let x = Input::random(random, dtype, &shape, specials).inner(inner).repeated(random);
        let grad = Input::random(random, dtype, &shape, specials).inner(inner).repeated(random);
        let out = || vec![Output::new(dtype, &shape).inner(inner)];

        let truth: Vec<f64> = x.values.iter().map(|&x| reference::act::forward(act, x)).collect();
        let sizes: Vec<f64> = truth.iter().map(|v| v.abs()).collect();
        let call = Call::new(vec![x.clone()], out(), |i, mut o| act.forward_into(i[0], o.remove(0)));
        for results in call.everywhere(random) {
            assert_near("o", dtype, &results.values(0), &truth, &sizes, ULPS);
        }

        let pairs = || x.values.iter().zip(&grad.values);
        let truth: Vec<f64> =
            pairs().map(|(&x, &grad)| reference::act::backward(act, x, grad)).collect();
        let sizes: Vec<f64> = pairs()
            .map(|(&x, &grad)| grad.abs() * reference::act::slope_magnitude(act, x))
            .collect();
        let call = Call::new(vec![x.clone(), grad.clone()], out(), |i, mut o| {
            act.backward_into(i[0], i[1], o.remove(0))
        });
        for results in call.everywhere(random) {
            assert_near("dx", dtype, &results.values(0), &truth, &sizes, ULPS);
        }
    }

    #[test]
    fn act_in_place(shape in shapes(0), dtype in dtypes(),
                    act in prop::sample::select(Act::ALL.to_vec()), seed: u64) {
        let random = &mut Random::new(seed);
        let inner = long_dimension(random, &shape);
        let x = Input::random(random, dtype, &shape, true);
        let into = Call::new(vec![x.clone()], vec![Output::new(dtype, &shape)], |i, mut o| {
            act.forward_into(i[0], o.remove(0))
        });
        let chosen = Some(inner).filter(|&d| d < shape.len());
        let layout = common::Layout::random(random, &shape, chosen, &[]);
        for isa in fuselane::Isa::available() {
            fuselane::with_isa(isa, || {
                let want = into.dense().unwrap();
                let before = x.memory(&layout);
                let mut memory = before.clone();
                act.forward_in_place(memory.view_mut(&layout)).unwrap();
                for (i, place) in layout.places().into_iter().enumerate() {
                    assert_eq!(memory.bits_but_one_nan(place), want.bits[0][i], "element {i}");
                    memory.set_bits(place, before.bits(place));
                }
                assert_eq!(memory, before, "written beside the view");
            }).unwrap();
        }
    }
}

/// Whether results of a call on special values can be told from the reference: f32 has to hold
/// what f64 does in between.
fn tells(act: FusedAct, specials: bool) -> bool {
    !specials || !matches!(act, FusedAct::Elementwise(Act::ReluSquared))
}

/// Draws a rotation: its tokens, theta and the options beside those of the tokens.
fn rotation(random: &mut Random, size: usize) -> (Tokens, Input, Pairing, Partial, Option<usize>) {
    let tokens = Tokens::random(random, size);
    let most = tokens.dims[3] / 2;
    let count = random.below(most + 1);
    let mut theta = tokens.theta(random, count);
    if theta.shape[1] > most.max(1) {
        theta = Input::new(theta.dtype, &[1, 1], &[0.5]).parameter();
    }
    let room = if theta.shape[1] == 1 { most } else { most.min(theta.shape[1] * tokens.axes()) };
    let pairs = match random.below(2) {
        0 => None,
        _ => Some(random.below(room + 1)),
    };
    let pairing = [Pairing::Half, Pairing::Interleaved][random.below(2)];
    let partial = [Partial::Pairs, Partial::RotaryDim][random.below(2)];
    (tokens, theta, pairing, partial, pairs)
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn rotate(size in 1usize..24, specials: bool, seed: u64) {
        let random = &mut Random::new(seed);
        let (tokens, theta, pairing, partial, pairs) = rotation(random, size);
        let (dtype, d) = (tokens.dtype, tokens.dims[3]);
        let options = Rotate {
            act: tokens.act,
            layout: tokens.layout,
            positions: tokens.positions(),
            extra_tokens: tokens.extra_tokens,
            sequences: tokens.sequences.as_deref(),
            pairing,
            partial,
            pairs,
        };
        let shape = tokens.shape(d);
        let x = Input::random(random, dtype, &shape, specials).repeated(random);
        let grad = Input::random(random, dtype, &shape, specials).repeated(random);
        let what = format!("{options:?} {tokens:?} theta {:?}", theta.shape);

        let x_tokens = tokens.tokens_first(&x.values, d);
        let grad_tokens = tokens.tokens_first(&grad.values, d);
        let input = angles::Input {
            x: &x_tokens,
            dims: tokens.dims,
            theta: &theta.values,
            theta_dims: [theta.shape[0], theta.shape[1]],
            dtype,
        };
        let truth = reference::rotate::forward(&options, &input);
        let sizes = reference::rotate::forward_magnitude(&options, &input);
        let out = vec![Output::new(dtype, &shape)];
        let call = Call::new(vec![x.clone(), theta.clone()], out, |i, mut o| {
            options.forward_into(i[0], i[1], o.remove(0))
        });
        for results in call.everywhere(random) {
            if tells(tokens.act, specials) {
                let got = tokens.tokens_first(&results.values(0), d);
                assert_near(&format!("o of {what}"), dtype, &got, &truth, &sizes, ULPS);
            }
        }

        let truth = reference::rotate::backward(&options, &input, &grad_tokens);
        let sizes = reference::rotate::backward_magnitude(&options, &input, &grad_tokens);
        let dtheta_dtype = DType::ALL[random.below(4)];
        let out = vec![
            Output::new(dtype, &shape),
            Output::new(dtheta_dtype, &theta.shape).parameter(),
        ];
        let call = Call::new(vec![x.clone(), theta.clone(), grad.clone()], out, |i, mut o| {
            options.backward_into(RotateBackward {
                x: Some(i[0]),
                grad: i[2],
                angles: i[1].into(),
                dtheta: o.pop(),
                dx: o.pop(),
            })
        });
        let only_dx = Call::new(
            vec![x.clone(), theta.clone(), grad.clone()],
            vec![Output::new(dtype, &shape)],
            |i, mut o| {
                let x = Some(i[0]).filter(|_| tokens.act != FusedAct::default());
                let (angles, dx) = (i[1].into(), o.pop());
                options.backward_into(RotateBackward { x, grad: i[2], angles, dx, dtheta: None })
            },
        );
        let alone = only_dx.everywhere(random);
        for (results, alone) in call.everywhere(random).into_iter().zip(alone) {
            assert_eq!(results.bits[0], alone.bits[0], "dx with and without dtheta: {what}");
            if !specials {
                let dx = tokens.tokens_first(&results.values(0), d);
                assert_near(&format!("dx of {what}"), dtype, &dx, &truth.dx, &sizes.dx, ULPS);
                gradient_near(
                    &format!("dtheta of {what}"),
                    (dtheta_dtype, dtype),
                    &results.values(1),
                    &truth.dtheta,
                    &sizes.dtheta,
                );
            }
        }
    }

    #[test]
    fn cosine(size in 1usize..20, specials: bool, seed: u64) {
        let random = &mut Random::new(seed);
        let tokens = Tokens::random(random, size);
        let (dtype, d) = (tokens.dtype, tokens.dims[3]);
        let theta = tokens.theta(random, d);
        let options = Cosine {
            act: tokens.act,
            layout: tokens.layout,
            positions: tokens.positions(),
            extra_tokens: tokens.extra_tokens,
            sequences: tokens.sequences.as_deref(),
        };
        let (shape, wide) = (tokens.shape(d), tokens.shape(2 * d));
        let x = Input::random(random, dtype, &shape, specials).repeated(random);
        let grad = Input::random(random, dtype, &wide, specials).repeated(random);
        let what = format!("{options:?} {tokens:?} theta {:?}", theta.shape);

        let x_tokens = tokens.tokens_first(&x.values, d);
        let grad_tokens = tokens.tokens_first(&grad.values, 2 * d);
        let input = angles::Input {
            x: &x_tokens,
            dims: tokens.dims,
            theta: &theta.values,
            theta_dims: [theta.shape[0], theta.shape[1]],
            dtype,
        };
        let truth = reference::cosine::forward(&options, &input);
        let sizes = reference::cosine::forward_magnitude(&options, &input);
        let out = vec![Output::new(dtype, &wide)];
        let call = Call::new(vec![x.clone(), theta.clone()], out, |i, mut o| {
            options.forward_into(i[0], i[1], o.remove(0))
        });
        for results in call.everywhere(random) {
            if tells(tokens.act, specials) {
                let got = tokens.tokens_first(&results.values(0), 2 * d);
                assert_near(&format!("o of {what}"), dtype, &got, &truth, &sizes, ULPS);
            }
        }

        let truth = reference::cosine::backward(&options, &input, &grad_tokens);
        let sizes = reference::cosine::backward_magnitude(&options, &input, &grad_tokens);
        let dtheta_dtype = DType::ALL[random.below(4)];
        let out = vec![
            Output::new(dtype, &shape),
            Output::new(dtheta_dtype, &theta.shape).parameter(),
        ];
        let call = Call::new(vec![x.clone(), theta.clone(), grad.clone()], out, |i, mut o| {
            options.backward_into(CosineBackward {
                x: Some(i[0]),
                grad: i[2],
                angles: i[1].into(),
                dtheta: o.pop(),
                dx: o.pop(),
            })
        });
        for results in call.everywhere(random) {
            if !specials {
                let dx = tokens.tokens_first(&results.values(0), d);
                assert_near(&format!("dx of {what}"), dtype, &dx, &truth.dx, &sizes.dx, ULPS);
                gradient_near(
                    &format!("dtheta of {what}"),
                    (dtheta_dtype, dtype),
                    &results.values(1),
                    &truth.dtheta,
                    &sizes.dtheta,
                );
            }
        }
    }
}

/// A parameter's gradient: rounded to its own dtype, summed in the arithmetic type of the
/// activations.
fn gradient_near(
    what: &str,
    (own, activations): (DType, DType),
    got: &[f64],
    truth: &[f64],
    sizes: &[f64],
) {
    use reference::ulp::ulp;
    for (i, (&got, &truth)) in got.iter().zip(truth).enumerate() {
        let truth_in_range = truth.abs() < 6e4 || own != DType::F16;
        let allowed = ulp(own, truth) + ULPS * ulp(activations.real(), sizes[i]);
        let near = (got - truth).abs() <= allowed || !truth_in_range;
        assert!(near, "{what}: [{i}] is {got:e}, the reference {truth:e} (terms {:e})", sizes[i]);
    }
}
