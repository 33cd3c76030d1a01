//! Random shapes, strides, dtypes, options and special values. For each call: nothing beside the
//! outputs is written and everything in them is, inputs stay as they were, strided views give the
//! bits that dense copies give, and the results are those of the reference.

mod common;

use common::{Call, Input, Output, Tokens, assert_near, cases};
use fuselane::reference::{self, Random, angles};
use fuselane::{
    Act, Cosine, DType, EncodingBackward, FusedAct, GatePosition, Normalize, NormalizeBackward,
    NormalizeForward, Pairing, Partial, Residual, Result, Rotate, RotateBackward, Softmax, ViewMut,
    WeightForm,
};
use proptest::prelude::*;

/// Ulps of the arithmetic that are allowed beside the rounding of the output: loose, the tight
/// bounds are in the option matrix.
const ULPS: f64 = 64.0;

/// The same where short forms take part: those of 16-bit types are right to a quarter of an ulp.
fn stored(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 16_000.0,
        DType::F16 => 2_500.0,
        _ => ULPS,
    }
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
    #![proptest_config(cases(1500))]

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
            assert_near("o", dtype, &results.values(0), &truth, &sizes, stored(dtype));
        }

        let pairs = || x.values.iter().zip(&grad.values);
        let truth: Vec<f64> =
            pairs().map(|(&x, &grad)| reference::act::backward(act, x, grad)).collect();
        let sizes: Vec<f64> = pairs()
            .map(|(&x, &grad)| grad.abs() * reference::act::slope_magnitude(act, x))
            .collect();
        // For the largest x the reference leaves f64 itself, where cubes and doubles overflow.
        let silent = |i: usize| x.values[i].abs() > 1e100 && !truth[i].is_finite();
        let call = Call::new(vec![x.clone(), grad.clone()], out(), |i, mut o| {
            act.backward_into(i[0], i[1], o.remove(0))
        });
        for results in call.everywhere(random) {
            let mut dx = results.values(0);
            for i in (0..dx.len()).filter(|&i| silent(i)) {
                dx[i] = truth[i];
            }
            assert_near("dx", dtype, &dx, &truth, &sizes, stored(dtype));
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
    #![proptest_config(cases(1000))]

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
        let input = encoding_input(&tokens, &x_tokens, &theta);
        let truth = reference::rotate::forward(&options, &input);
        let sizes = reference::rotate::forward_magnitude(&options, &input);
        let out = vec![Output::new(dtype, &shape)];
        let call = Call::new(vec![x.clone(), theta.clone()], out, |i, mut o| {
            options.forward_into(i[0], i[1], o.remove(0))
        });
        for results in call.everywhere(random) {
            if tells(tokens.act, specials) {
                let got = tokens.tokens_first(&results.values(0), d);
                assert_near(&format!("o of {what}"), dtype, &got, &truth, &sizes, stored(dtype));
            }
        }

        let truth = reference::rotate::backward(&options, &input, &grad_tokens);
        let sizes = reference::rotate::backward_magnitude(&options, &input, &grad_tokens);
        let dtheta_dtype = DType::ALL[random.below(4)];
        let out = [Output::new(dtype, &shape), Output::new(dtheta_dtype, &theta.shape).parameter()];
        let call = encoding_backward([&x, &theta, &grad], out, |call| options.backward_into(call));
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
                let [dx, dtheta] = [results.values(0), results.values(1)];
                gradients_near(&what, &tokens, dtheta_dtype, [dx, dtheta], [&truth, &sizes]);
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
        let input = encoding_input(&tokens, &x_tokens, &theta);
        let truth = reference::cosine::forward(&options, &input);
        let sizes = reference::cosine::forward_magnitude(&options, &input);
        let out = vec![Output::new(dtype, &wide)];
        let call = Call::new(vec![x.clone(), theta.clone()], out, |i, mut o| {
            options.forward_into(i[0], i[1], o.remove(0))
        });
        for results in call.everywhere(random) {
            if tells(tokens.act, specials) {
                let got = tokens.tokens_first(&results.values(0), 2 * d);
                assert_near(&format!("o of {what}"), dtype, &got, &truth, &sizes, stored(dtype));
            }
        }

        let truth = reference::cosine::backward(&options, &input, &grad_tokens);
        let sizes = reference::cosine::backward_magnitude(&options, &input, &grad_tokens);
        let dtheta_dtype = DType::ALL[random.below(4)];
        let out = [Output::new(dtype, &shape), Output::new(dtheta_dtype, &theta.shape).parameter()];
        let call = encoding_backward([&x, &theta, &grad], out, |call| options.backward_into(call));
        for results in call.everywhere(random) {
            if !specials {
                let [dx, dtheta] = [results.values(0), results.values(1)];
                gradients_near(&what, &tokens, dtheta_dtype, [dx, dtheta], [&truth, &sizes]);
            }
        }
    }
}

/// What the reference of an encoding reads.
fn encoding_input<'a>(tokens: &Tokens, x: &'a [f64], theta: &'a Input) -> angles::Input<'a> {
    let theta_dims = [theta.shape[0], theta.shape[1]];
    angles::Input { x, dims: tokens.dims, theta: &theta.values, theta_dims, dtype: tokens.dtype }
}

/// A backward of an encoding, for dx and dtheta.
fn encoding_backward<'c>(
    inputs: [&Input; 3],
    outputs: [Output; 2],
    run: impl Fn(EncodingBackward<'_>) -> Result<()> + Sync + 'c,
) -> Call<'c> {
    Call::new(inputs.map(Input::clone).into(), outputs.into(), move |i, mut o| {
        let (dtheta, dx) = (o.pop(), o.pop());
        run(EncodingBackward { x: Some(i[0]), grad: i[2], angles: i[1].into(), dx, dtheta })
    })
}

/// Compares dx, in the call's layout, and dtheta, in its own dtype, with the truth and its sizes.
fn gradients_near(
    what: &str,
    tokens: &Tokens,
    dtheta_dtype: DType,
    [dx, dtheta]: [Vec<f64>; 2],
    [truth, sizes]: [&angles::Gradients; 2],
) {
    let (dtype, ulps) = (tokens.dtype, stored(tokens.dtype));
    let dx = tokens.tokens_first(&dx, tokens.dims[3]);
    assert_near(&format!("dx of {what}"), dtype, &dx, &truth.dx, &sizes.dx, ulps);
    let dtypes = (dtheta_dtype, dtype);
    gradient_near(
        &format!("dtheta of {what}"),
        dtypes,
        &dtheta,
        &truth.dtheta,
        &sizes.dtheta,
        ulps,
    );
}

/// A parameter's gradient: rounded to its own dtype, summed in the arithmetic type of the
/// activations.
fn gradient_near(
    what: &str,
    (own, activations): (DType, DType),
    got: &[f64],
    truth: &[f64],
    sizes: &[f64],
    ulps: f64,
) {
    use reference::ulp::ulp;
    for (i, (&got, &truth)) in got.iter().zip(truth).enumerate() {
        let truth_in_range = truth.abs() < 6e4 || own != DType::F16;
        let allowed = ulp(own, truth) + ulps * ulp(activations.real(), sizes[i]);
        let near = (got - truth).abs() <= allowed || !truth_in_range;
        assert!(near, "{what}: [{i}] is {got:e}, the reference {truth:e} (terms {:e})", sizes[i]);
    }
}

/// A dimension to be contiguous for a softmax over `dim`: that one itself if it is in dense memory,
/// else another. The two ways through memory sum in different orders.
fn beside(random: &mut Random, shape: &[usize], dim: usize) -> usize {
    let long: Vec<usize> = (0..shape.len()).filter(|&d| shape[d] > 1).collect();
    match long.last() {
        None => shape.len() - 1,
        Some(&last) if last == dim => dim,
        Some(_) => {
            let others: Vec<usize> = long.into_iter().filter(|&d| d != dim).collect();
            others[random.below(others.len())]
        }
    }
}

/// Folds a shape around dimension `dim`, as the softmax reference has it.
fn folded(shape: &[usize], dim: usize) -> [usize; 3] {
    [shape[..dim].iter().product(), shape[dim], shape[dim + 1..].iter().product()]
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn softmax(shape in shapes(1), dtype in dtypes(), log: bool, zero_masked_rows: bool,
               specials: bool, seed: u64) {
        let random = &mut Random::new(seed);
        let dim = random.below(shape.len());
        let inner = beside(random, &shape, dim);
        let from_last = random.below(2) == 0;
        let options = Softmax {
            dim: dim as isize - if from_last { shape.len() as isize } else { 0 },
            log,
            zero_masked_rows,
        };
        let dims = folded(&shape, dim);
        let mut x = Input::random(random, dtype, &shape, specials).inner(inner).repeated(random);
        if specials && random.below(2) == 0 {
            // Masks: many rows of nothing but minus infinity.
            let plain = Input::random(random, dtype, &shape, false).values;
            let masked = (0..dims[0] * dims[2]).map(|_| random.below(3) == 0).collect::<Vec<_>>();
            x = Input::new(dtype, &shape, &plain).inner(inner);
            for (i, value) in x.values.iter_mut().enumerate() {
                let row = i / (dims[1] * dims[2]) * dims[2] + i % dims[2];
                if masked[row] || random.below(4) == 0 {
                    *value = f64::NEG_INFINITY;
                }
            }
        }
        let grad = Input::random(random, dtype, &shape, false).inner(inner).repeated(random);
        let out = || vec![Output::new(dtype, &shape).inner(inner)];
        let what = format!("{options:?} {dtype} {shape:?}");

        let truth = reference::softmax::forward(&options, &x.values, dims);
        let sizes = reference::softmax::forward_magnitude(&options, &x.values, dims);
        let call = Call::new(vec![x.clone()], out(), |i, mut o| {
            options.forward_into(i[0], o.remove(0))
        });
        let outputs = call.everywhere(random);
        for results in &outputs {
            let bound = stored(dtype);
            assert_near(&format!("o of {what}"), dtype, &results.values(0), &truth, &sizes, bound);
        }

        // Backward from the output, as it was rounded.
        let o = Input::new(dtype, &shape, &outputs[0].values(0)).inner(inner);
        let truth = reference::softmax::backward_from_output(&options, &o.values, &grad.values, dims);
        let sizes = reference::softmax::backward_from_output_magnitude(
            &options, &o.values, &grad.values, dims,
        );
        let call = Call::new(vec![o, grad.clone()], out(), |i, mut o| {
            options.backward_into(i[0], i[1], o.remove(0))
        });
        for results in call.everywhere(random) {
            assert_near(&format!("dx of {what}"), dtype, &results.values(0), &truth, &sizes, ULPS);
        }

        let truth = reference::softmax::backward_from_input(&options, &x.values, &grad.values, dims);
        let sizes = reference::softmax::backward_from_input_magnitude(
            &options, &x.values, &grad.values, dims,
        );
        let call = Call::new(vec![x, grad], out(), |i, mut o| {
            options.backward_from_input_into(i[0], i[1], o.remove(0))
        });
        for results in call.everywhere(random) {
            assert_near(&format!("dx from x of {what}"), dtype, &results.values(0), &truth, &sizes, ULPS);
        }
    }
}

/// Operands of a call by their names, some of which are not there.
struct Named<T>(Vec<(&'static str, T)>);

impl<T: Clone> Named<T> {
    fn values(&self) -> Vec<T> {
        self.0.iter().map(|(_, value)| value.clone()).collect()
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|(other, _)| *other == name)
    }

    fn get(&self, name: &str) -> Option<&T> {
        self.index(name).map(|i| &self.0[i].1)
    }
}

/// Takes an output of a call by its name.
fn take<'v>(
    names: &Named<Output>,
    views: &mut [Option<ViewMut<'v>>],
    name: &str,
) -> Option<ViewMut<'v>> {
    views[names.index(name)?].take()
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn normalize(shape in shapes(1), dtype in dtypes(), center: bool, specials: bool, seed: u64) {
        let random = &mut Random::new(seed);
        let d = *shape.last().unwrap();
        let divisors: Vec<usize> = (1..=d.max(1)).filter(|g| d % g == 0).collect();
        let groups = divisors[random.below(divisors.len())];
        let options = Normalize {
            center,
            eps: [1e-6, 1e-5, 0.1][random.below(3)],
            scale: [1.0, 1.0, -0.7][random.below(3)],
            groups,
            weight_form: [WeightForm::Plain, WeightForm::OnePlus][random.below(2)],
            gate_position: [GatePosition::Pre, GatePosition::Post][random.below(2)],
            gate_act: Act::ALL[random.below(9)],
        };
        let rows = shape[..shape.len() - 1].iter().product::<usize>();
        let mut kept_shape = shape.clone();
        *kept_shape.last_mut().unwrap() = groups;
        let real = dtype.real();
        let [weighted, biased, gated, added, kept_sum] = [(); 5].map(|()| random.below(2) == 0);
        let kept_sum = added && kept_sum;

        let mut inputs = Named(vec![("x", Input::random(random, dtype, &shape, specials).repeated(random))]);
        let mut tensor = |random: &mut Random, name, wanted: bool| if wanted {
            inputs.0.push((name, Input::random(random, dtype, &shape, specials).repeated(random)));
        };
        tensor(random, "residual", added);
        tensor(random, "gate", gated);
        for (name, wanted) in [("weight", weighted), ("bias", biased)] {
            if wanted {
                let own = DType::ALL[random.below(4)];
                let vector = Input::random(random, own, &[d], false).parameter().repeated(random);
                inputs.0.push((name, vector));
            }
        }
        let mut outputs = Named(vec![("o", Output::new(dtype, &shape))]);
        outputs.0.push(("rstd", Output::new(real, &kept_shape)));
        if center {
            outputs.0.push(("mean", Output::new(real, &kept_shape)));
        }
        if kept_sum {
            outputs.0.push(("sum", Output::new(dtype, &shape)));
        }
        let call = Call::new(inputs.values(), outputs.values(), |i, o| {
            let input = |name| inputs.index(name).map(|k| i[k]);
            let mut o: Vec<_> = o.into_iter().map(Some).collect();
            let mut output = |name| take(&outputs, &mut o, name);
            options.forward_into(NormalizeForward {
                x: i[0],
                weight: input("weight"),
                bias: input("bias"),
                gate: input("gate"),
                residual: match (input("residual"), output("sum")) {
                    (None, _) => Residual::None,
                    (Some(residual), None) => Residual::Add(residual),
                    (Some(residual), Some(sum)) => Residual::AddInto(residual, sum),
                },
                o: output("o").unwrap(),
                rstd: output("rstd"),
                mean: output("mean"),
            })
        });
        let forward = call.everywhere(random);
        drop(call);

        let values = |name| inputs.get(name).map(|input: &Input| &input.values[..]);
        let input = reference::normalize::Input {
            x: &inputs.0[0].1.values,
            residual: values("residual"),
            gate: values("gate"),
            weight: values("weight"),
            bias: values("bias"),
            rows,
            d,
        };
        let what = format!("{options:?} {dtype} {shape:?} {:?}", inputs.0.iter().map(|(n, i)| (n, i.dtype)).collect::<Vec<_>>());
        let truth = reference::normalize::forward(&options, &input);
        for results in &forward {
            let o = results.values(0);
            if specials {
                nan_fills_its_group(&what, &o, &input, d / groups);
                continue;
            }
            let sizes = reference::normalize::forward_magnitude(&options, &input);
            assert_near(&format!("o of {what}"), dtype, &o, &truth.o, &sizes, stored(dtype));
            if d > 0 {
                let sizes: Vec<f64> = truth.rstd.iter().map(|v| v.abs()).collect();
                let rstd = results.values(outputs.index("rstd").unwrap());
                assert_near(&format!("rstd of {what}"), real, &rstd, &truth.rstd, &sizes, 1e4);
            }
            if let Some(k) = outputs.index("sum") {
                let sizes: Vec<f64> = truth.residual_out.iter().map(|v| v.abs()).collect();
                let sum = results.values(k);
                assert_near(&format!("sum of {what}"), dtype, &sum, &truth.residual_out, &sizes, 1.0);
            }
        }

        // Backward, from what the forward kept.
        let first = &forward[0];
        let mut kept = |name: &'static str, output: &str| if let Some(k) = outputs.index(output) {
            inputs.0.push((name, Input::new(real, &kept_shape, &first.values(k))));
        };
        kept("rstd", "rstd");
        kept("mean", "mean");
        let grad = Input::random(random, dtype, &shape, specials).repeated(random);
        inputs.0.push(("grad", grad));
        if random.below(2) == 0 {
            let grad = Input::random(random, dtype, &shape, specials).repeated(random);
            inputs.0.push(("grad_residual_out", grad));
        }
        let mut outputs = Named(vec![]);
        for (name, possible) in [("dx", true), ("dresidual", true), ("dgate", gated)] {
            if possible && random.below(4) > 0 {
                outputs.0.push((name, Output::new(dtype, &shape)));
            }
        }
        for (name, possible) in [("dweight", weighted), ("dbias", true)] {
            if possible && random.below(4) > 0 {
                let own = DType::ALL[random.below(4)];
                outputs.0.push((name, Output::new(own, &[d]).parameter()));
            }
        }
        let call = Call::new(inputs.values(), outputs.values(), |i, o| {
            let input = |name| inputs.index(name).map(|k| i[k]);
            let mut o: Vec<_> = o.into_iter().map(Some).collect();
            let mut output = |name| take(&outputs, &mut o, name);
            options.backward_into(NormalizeBackward {
                grad: input("grad").unwrap(),
                x: i[0],
                residual: input("residual"),
                gate: input("gate"),
                weight: input("weight"),
                bias: input("bias"),
                rstd: input("rstd").unwrap(),
                mean: input("mean"),
                grad_residual_out: input("grad_residual_out"),
                dx: output("dx"),
                dresidual: output("dresidual"),
                dgate: output("dgate"),
                dweight: output("dweight"),
                dbias: output("dbias"),
            })
        });
        let backward = call.everywhere(random);
        if specials {
            return Ok(());
        }
        let values = |name| inputs.get(name).map(|input: &Input| &input.values[..]);
        let (grad, more) = (values("grad").unwrap(), values("grad_residual_out"));
        // The bias has a gradient whether it is there or not.
        let zeros = vec![0.0; d];
        let input = reference::normalize::Input {
            x: &inputs.0[0].1.values,
            residual: values("residual"),
            gate: values("gate"),
            weight: values("weight"),
            bias: Some(values("bias").unwrap_or(&zeros)),
            rows,
            d,
        };
        let truth = reference::normalize::backward(&options, &input, grad, more);
        let sizes = reference::normalize::backward_magnitude(&options, &input, grad, more);
        for results in backward {
            for (k, (name, output)) in outputs.0.iter().enumerate() {
                let of = |gradients: &reference::normalize::Gradients| match *name {
                    "dx" | "dresidual" => gradients.dx.clone(),
                    "dgate" => gradients.dgate.clone().unwrap(),
                    "dweight" => gradients.dweight.clone().unwrap(),
                    _ => gradients.dbias.clone().unwrap(),
                };
                let (truth, sizes) = (of(&truth), of(&sizes));
                let what = format!("{name} of {what}");
                // The kept statistics were rounded, and a deviation near 0 magnifies that.
                gradient_near(&what, (output.dtype, dtype), &results.values(k), &truth, &sizes, 4.0 * stored(dtype));
            }
        }
    }
}

/// Every element of a group with a NaN is NaN.
fn nan_fills_its_group(what: &str, o: &[f64], input: &reference::normalize::Input<'_>, e: usize) {
    for start in (0..o.len()).step_by(e.max(1)) {
        let group = start..start + e;
        let operands = [Some(input.x), input.residual, input.gate];
        let bad = operands.iter().flatten().any(|v| v[group.clone()].iter().any(|v| v.is_nan()));
        let gate_only_after = input.gate.is_some();
        if bad && !gate_only_after {
            assert!(o[group].iter().all(|v| v.is_nan()), "{what}: group at {start}");
        }
    }
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn a_residual_in_place_is_one_that_is_not(shape in shapes(1), dtype in dtypes(), seed: u64) {
        let random = &mut Random::new(seed);
        let norm = Normalize::layer_norm();
        let x = Input::random(random, dtype, &shape, false);
        let residual = Input::random(random, dtype, &shape, false);
        let out = vec![Output::new(dtype, &shape), Output::new(dtype, &shape)];
        let call = Call::new(vec![x.clone(), residual.clone()], out, |i, mut o| {
            let sum = o.remove(1);
            norm.forward_into(NormalizeForward {
                residual: Residual::AddInto(i[1], sum),
                ..NormalizeForward::new(i[0], o.remove(0))
            })
        });
        let want = call.dense().unwrap();
        let last = Some(shape.len() - 1);
        let layouts = [(); 3].map(|()| common::Layout::random(random, &shape, last, &[]));
        let x = x.memory(&layouts[0]);
        let before = residual.memory(&layouts[1]);
        let mut sum = before.clone();
        let mut o = common::Memory::poisoned(dtype, layouts[2].extent);
        norm.forward_into(NormalizeForward {
            residual: Residual::AddInPlace(sum.view_mut(&layouts[1])),
            ..NormalizeForward::new(x.view(&layouts[0]), o.view_mut(&layouts[2]))
        }).unwrap();
        for (i, place) in layouts[2].places().into_iter().enumerate() {
            prop_assert_eq!(o.bits_but_one_nan(place), want.bits[0][i]);
        }
        for (i, place) in layouts[1].places().into_iter().enumerate() {
            prop_assert_eq!(sum.bits_but_one_nan(place), want.bits[1][i]);
            sum.set_bits(place, before.bits(place));
        }
        prop_assert!(sum == before, "written beside the residual");
    }
}
