//! The same bits on every run, for any number of threads, for any cut of the batch, and for any
//! strides; on every instruction set. Tensors are large enough to be shared out among threads.

mod common;

use common::{Call, Input, Output, Results, assert_same_bits, each_isa, on_threads};
use fuselane::reference::Random;
use fuselane::{
    Act, Angles, Cosine, CosineBackward, DType, Element, FusedAct, GatePosition, Isa, Normalize,
    NormalizeBackward, NormalizeForward, Pairing, Positions, Residual, Result, Rotate,
    RotateBackward, Softmax, TokenLayout, View, ViewMut, with_isa,
};

/// A call on tensors of more than the megabyte from which threads are woken, for every number of
/// threads, twice, and on strided memory.
fn same_on_any_threads(what: &str, call: &Call<'_>) -> Vec<Results> {
    let bytes: usize = call
        .inputs
        .iter()
        .map(|input| input.values.len() * input.dtype.size())
        .chain(call.outputs.iter().map(|o| o.shape.iter().product::<usize>() * o.dtype.size()))
        .sum();
    assert!(bytes > 1 << 20, "{what}: too small to be shared out");
    let results: Vec<(Isa, Results)> = Isa::available()
        .map(|isa| {
            let run = |threads: usize, strided: bool| {
                on_threads(threads, || {
                    with_isa(isa, || match strided {
                        true => call.strided(&mut Random::new(threads as u64)).unwrap(),
                        false => call.dense().unwrap(),
                    })
                    .unwrap()
                })
            };
            let one = run(1, false);
            for threads in [1, 2, 3, 7] {
                assert_same_bits(
                    &one,
                    &run(threads, false),
                    &format!("{what} {isa} {threads} threads"),
                );
            }
            for threads in [2, 7] {
                let what = format!("{what} {isa} {threads} threads, strided");
                assert_same_bits(&one, &run(threads, true), &what);
            }
            (isa, one)
        })
        .collect();
    // These are the same lanes, compiled twice.
    let of = |isa: Isa| results.iter().find(|(other, _)| *other == isa).map(|(_, result)| result);
    if let (Some(a), Some(b)) = (of(Isa::Avx2), of(Isa::Avx512)) {
        assert_same_bits(a, b, &format!("{what} avx2 and avx512"));
    }
    // In f32, wide registers hold the same lanes, whose sums are formed in the same order, though by
    // other loops: those that work on several rows at once.
    let exact = call.inputs.iter().all(|input| input.dtype == DType::F32);
    if let (true, Some(a), Some(b)) = (exact, of(Isa::Avx2), of(Isa::Avx512Wide)) {
        assert_same_bits(a, b, &format!("{what} avx2 and avx512_wide"));
    }
    results.into_iter().map(|(_, result)| result).collect()
}

/// Forward and backward of an encoding, with tensors of the shapes of x, o and theta.
fn encoding_on_any_threads(
    (what, dtype, [x, o, theta]): (&str, DType, [&[usize]; 3]),
    forward: impl Fn(View<'_>, View<'_>, ViewMut<'_>) -> Result<()> + Sync,
    backward: impl Fn(
        View<'_>,
        View<'_>,
        Angles<'_>,
        Option<ViewMut<'_>>,
        Option<ViewMut<'_>>,
    ) -> Result<()>
    + Sync,
) {
    let inputs = || vec![random(dtype, x, 1), random(dtype, o, 2), random(DType::F32, theta, 3)];
    let call = Call::new(inputs(), vec![Output::new(dtype, o)], |i, mut o| {
        forward(i[0], i[2], o.remove(0))
    });
    same_on_any_threads(what, &call);
    let gradients = vec![Output::new(dtype, x), Output::new(DType::F32, theta).parameter()];
    let call = Call::new(inputs(), gradients, |i, mut o| {
        let (dtheta, dx) = (o.pop(), o.pop());
        backward(i[0], i[1], i[2].into(), dx, dtheta)
    });
    same_on_any_threads(&format!("{what} backward"), &call);
}

fn random(dtype: DType, shape: &[usize], seed: u64) -> Input {
    Input::random(&mut Random::new(seed), dtype, shape, false)
}

#[test]
fn act() {
    for (dtype, shape) in [(DType::F32, [3, 81, 701]), (DType::BF16, [3, 201, 701])] {
        for act in [Act::Relu, Act::Gelu] {
            let inputs = || vec![random(dtype, &shape, 1), random(dtype, &shape, 2)];
            let out = || vec![Output::new(dtype, &shape)];
            let forward =
                Call::new(inputs(), out(), |i, mut o| act.forward_into(i[0], o.remove(0)));
            same_on_any_threads(&format!("{act} {dtype}"), &forward);
            let backward =
                Call::new(inputs(), out(), |i, mut o| act.backward_into(i[0], i[1], o.remove(0)));
            same_on_any_threads(&format!("{act} backward {dtype}"), &backward);
        }
    }
}

#[test]
fn softmax() {
    for dtype in [DType::F32, DType::BF16] {
        for (dim, shape) in
            [(2, [3, 99, 903]), (1, [2, 699, 201]), (0, [400, 3, 257]), (2, [2, 2, 70_001])]
        {
            for log in [false, true] {
                let softmax = Softmax { log, ..Softmax::over(dim) };
                let what = format!("softmax {softmax:?} {dtype}");
                let inputs = || vec![random(dtype, &shape, 1), random(dtype, &shape, 2)];
                let out = || vec![Output::new(dtype, &shape)];
                let call =
                    Call::new(inputs(), out(), |i, mut o| softmax.forward_into(i[0], o.remove(0)));
                same_on_any_threads(&what, &call);
                let call = Call::new(inputs(), out(), |i, mut o| {
                    softmax.backward_into(i[0], i[1], o.remove(0))
                });
                same_on_any_threads(&format!("{what} backward"), &call);
                let call = Call::new(inputs(), out(), |i, mut o| {
                    softmax.backward_from_input_into(i[0], i[1], o.remove(0))
                });
                same_on_any_threads(&format!("{what} backward from x"), &call);
            }
        }
    }
}

fn acts() -> [FusedAct; 4] {
    [FusedAct::default(), Act::Silu.into(), FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence]
}

#[test]
fn rotate() {
    let ends = [0, 17, 200, 311];
    for (dtype, act) in [DType::BF16, DType::F32, DType::F32, DType::F16].into_iter().zip(acts()) {
        for (layout, shape, theta) in [
            (TokenLayout::TokensHeads, [3, 311, 5, 66], [1, 33]),
            (TokenLayout::HeadsTokens, [3, 5, 311, 66], [5, 33]),
            (TokenLayout::HeadsTokens, [3, 5, 311, 66], [1, 33]),
            (TokenLayout::TokensHeads, [64, 3, 31, 66], [1, 33]), // fewer tokens than threads
        ] {
            let pairing = if theta[0] == 1 { Pairing::Half } else { Pairing::Interleaved };
            let sequences = Some(&ends[..]).filter(|_| shape.contains(&311));
            let rotate = Rotate { act, layout, sequences, pairing, ..Rotate::default() };
            let what = format!("rotate {act} {dtype} {layout:?} theta {theta:?}");
            encoding_on_any_threads(
                (&what, dtype, [&shape, &shape, &theta]),
                |x, theta, o| rotate.forward_into(x, theta, o),
                |x, grad, angles, dx, dtheta| {
                    rotate.backward_into(RotateBackward { x: Some(x), grad, angles, dx, dtheta })
                },
            );
            let [x, grad] = [1, 2].map(|seed| random(dtype, &shape, seed));
            let inputs = vec![x, grad, random(DType::F32, &theta, 3)];
            // Without dtheta, rows of several batch entries may take turns.
            let call = Call::new(inputs, vec![Output::new(dtype, &shape)], |i, mut o| {
                let (x, grad, angles) = (Some(i[0]), i[1], i[2].into());
                rotate.backward_into(RotateBackward { x, grad, angles, dx: o.pop(), dtheta: None })
            });
            same_on_any_threads(&format!("{what} backward, dx alone"), &call);
        }
    }
}

#[test]
fn cosine() {
    for (dtype, act) in [DType::BF16, DType::F32, DType::F32, DType::F16].into_iter().zip(acts()) {
        for (layout, shape) in [
            (TokenLayout::TokensHeads, [3, 291, 5, 66]),
            (TokenLayout::HeadsTokens, [3, 5, 291, 66]),
        ] {
            let cosine = Cosine {
                act,
                layout,
                positions: Positions::Grid(&[17, 17]),
                extra_tokens: 2,
                ..Cosine::default()
            };
            let mut wide = shape;
            wide[3] *= 2;
            let what = format!("cosine {act} {dtype} {layout:?}");
            encoding_on_any_threads(
                (&what, dtype, [&shape, &wide, &[5, 33]]),
                |x, theta, o| cosine.forward_into(x, theta, o),
                |x, grad, angles, dx, dtheta| {
                    cosine.backward_into(CosineBackward { x: Some(x), grad, angles, dx, dtheta })
                },
            );
        }
    }
}

#[test]
fn normalize() {
    for (dtype, norm) in [
        (DType::F32, Normalize::rms_norm()),
        (DType::BF16, Normalize::layer_norm()),
        (
            DType::F16,
            Normalize {
                gate_position: GatePosition::Post,
                ..Normalize::layer_norm().with_groups(4)
            },
        ),
    ] {
        for (shape, gated) in [([201, 3, 404], false), ([201, 3, 404], true), ([3, 9, 9000], true)]
        {
            let d = shape[2];
            let what = format!("normalize {norm:?} {dtype} {shape:?}");
            let kept = [shape[0], shape[1], norm.groups];
            let inputs = || {
                vec![
                    random(dtype, &shape, 1),
                    random(dtype, &shape, 2),
                    random(dtype, &shape, 3),
                    random(DType::F32, &[d], 4).parameter(),
                    random(DType::F32, &[d], 5).parameter(),
                ]
            };
            let mut out = vec![Output::new(dtype, &shape); 2];
            out.push(Output::new(DType::F32, &kept));
            if norm.center {
                out.push(Output::new(DType::F32, &kept));
            }
            let call = Call::new(inputs(), out, |i, o| {
                let mut o = o.into_iter();
                let (result, sum) = (o.next().unwrap(), o.next().unwrap());
                norm.forward_into(NormalizeForward {
                    gate: Some(i[1]).filter(|_| gated),
                    residual: Residual::AddInto(i[2], sum),
                    weight: Some(i[3]),
                    bias: Some(i[4]),
                    rstd: o.next(),
                    mean: o.next(),
                    ..NormalizeForward::new(i[0], result)
                })
            });
            let forward = same_on_any_threads(&what, &call);

            let mut inputs = inputs();
            inputs.push(Input::new(DType::F32, &kept, &forward[0].values(2)));
            if norm.center {
                inputs.push(Input::new(DType::F32, &kept, &forward[0].values(3)));
            }
            let mut out = vec![Output::new(DType::F32, &[d]).parameter(); 2];
            out.push(Output::new(dtype, &shape));
            if gated {
                out.push(Output::new(dtype, &shape));
            }
            let call = Call::new(inputs, out, |i, o| {
                let mut o = o.into_iter();
                norm.backward_into(NormalizeBackward {
                    gate: Some(i[1]).filter(|_| gated),
                    weight: Some(i[3]),
                    bias: Some(i[4]),
                    mean: i.get(6).copied(),
                    dweight: o.next(),
                    dbias: o.next(),
                    dx: o.next(),
                    dgate: o.next(),
                    ..NormalizeBackward::new(i[2], i[0], i[5])
                })
            });
            same_on_any_threads(&format!("{what} backward"), &call);
        }
    }
}

/// Several threads call at once, some of them from a pool of their own: whoever has the helpers, and
/// whoever has to do without them, gets the same bits.
#[test]
fn callers_at_once() {
    let (dtype, shape, d) = (DType::BF16, [5, 301, 520], 520);
    let inputs = || {
        let mut inputs = vec![random(dtype, &shape, 1), random(dtype, &shape, 2)];
        inputs.push(random(dtype, &[d], 3));
        inputs.push(random(DType::F32, &[5, 301, 1], 4));
        inputs
    };
    let outputs = || vec![Output::new(dtype, &shape), Output::new(dtype, &[d])];
    let norm = Normalize::rms_norm();
    let backward = Call::new(inputs(), outputs(), |i, mut o| {
        let (dweight, dx) = (o.pop(), o.pop());
        norm.backward_into(NormalizeBackward {
            weight: Some(i[2]),
            dx,
            dweight,
            ..NormalizeBackward::new(i[1], i[0], i[3])
        })
    });
    let softmax = Call::new(inputs(), vec![Output::new(dtype, &shape)], |i, mut o| {
        Softmax::over(1).forward_into(i[0], o.remove(0))
    });
    let silu = Call::new(inputs(), vec![Output::new(dtype, &shape)], |i, mut o| {
        Act::Silu.backward_into(i[0], i[1], o.remove(0))
    });
    let calls = [("norm backward", backward), ("softmax", softmax), ("silu backward", silu)];
    let alone: Vec<Results> = calls.iter().map(|(_, call)| call.dense().unwrap()).collect();
    std::thread::scope(|scope| {
        for caller in 0..6 {
            let (calls, alone) = (&calls, &alone);
            scope.spawn(move || {
                for round in 0..12 {
                    let which = (caller + round) % calls.len();
                    let (name, call) = &calls[which];
                    let got = match caller % 3 {
                        0 => on_threads(2, || call.dense().unwrap()),
                        _ => call.dense().unwrap(),
                    };
                    let what = format!("{name}, caller {caller}, round {round}");
                    assert_same_bits(&alone[which], &got, &what);
                }
            });
        }
    });
}

/// A tensor cut into parts along its first dimension.
fn cut(input: &Input, range: std::ops::Range<usize>) -> Input {
    let step: usize = input.shape[1..].iter().product();
    let mut shape = input.shape.clone();
    shape[0] = range.len();
    Input::new(input.dtype, &shape, &input.values[range.start * step..range.end * step])
}

/// A call on all of a batch gives what calls on parts of it give. All operands are cut along their
/// first dimension but the last `shared`.
fn same_in_parts(
    what: &str,
    inputs: Vec<Input>,
    shared: usize,
    o_shape: &[usize],
    run: impl Fn(&[fuselane::View<'_>], fuselane::ViewMut<'_>) -> fuselane::Result<()> + Sync,
) {
    let (dtype, b) = (inputs[0].dtype, o_shape[0]);
    let call = |inputs: Vec<Input>, batch: usize| {
        let shape = [&[batch], &o_shape[1..]].concat();
        let call =
            Call::new(inputs, vec![Output::new(dtype, &shape)], |i, mut o| run(i, o.remove(0)));
        call.dense().unwrap().bits.remove(0)
    };
    each_isa(|isa| {
        let whole = call(inputs.clone(), b);
        for parts in [vec![0, b / 2, b], vec![0, 1, b], (0..=b).collect()] {
            let mut together = Vec::new();
            for pair in parts.windows(2) {
                let cut_count = inputs.len() - shared;
                let mut own: Vec<Input> =
                    inputs[..cut_count].iter().map(|input| cut(input, pair[0]..pair[1])).collect();
                own.extend_from_slice(&inputs[cut_count..]);
                together.extend(call(own, pair[1] - pair[0]));
            }
            assert!(together == whole, "{what} {isa}: parts {parts:?}");
        }
    });
}

#[test]
fn a_row_does_not_depend_on_the_others() {
    for dtype in DType::ALL {
        let b = 9;
        let shape = [b, 37, 3, 26];
        let two = || vec![random(dtype, &shape, 1), random(dtype, &shape, 2)];
        for act in Act::ALL {
            same_in_parts(&format!("{act} {dtype}"), two(), 0, &shape, |i, o| {
                act.backward_into(i[0], i[1], o)
            });
        }
        for dim in 1..4 {
            let softmax = Softmax::over(dim);
            let what = format!("softmax {dim} {dtype}");
            same_in_parts(&what, two(), 0, &shape, |i, o| softmax.forward_into(i[0], o));
            same_in_parts(&what, two(), 0, &shape, |i, o| softmax.backward_into(i[0], i[1], o));
            same_in_parts(&what, two(), 0, &shape, |i, o| {
                softmax.backward_from_input_into(i[0], i[1], o)
            });
        }
        for act in acts() {
            let with_theta = || {
                let mut inputs = two();
                inputs.push(random(DType::F32, &[3, 13], 3));
                inputs
            };
            let what = format!("rotate {act} {dtype}");
            let rotate = Rotate { act, ..Rotate::default() };
            same_in_parts(&what, with_theta(), 1, &shape, |i, o| {
                rotate.forward_into(i[0], i[2], o)
            });
            same_in_parts(&what, with_theta(), 1, &shape, |i, o| {
                let (x, grad, angles) = (Some(i[0]), i[1], i[2].into());
                rotate.backward_into(RotateBackward { x, grad, angles, dx: Some(o), dtheta: None })
            });
            let mut inputs = two();
            inputs.push(random(DType::F32, &[1, 26], 3));
            let cosine = Cosine { act, layout: TokenLayout::TokensHeads, ..Cosine::default() };
            same_in_parts(&format!("cosine {act} {dtype}"), inputs, 1, &[b, 37, 3, 52], |i, o| {
                cosine.forward_into(i[0], i[2], o)
            });
        }
        for norm in [Normalize::rms_norm(), Normalize::layer_norm().with_groups(2)] {
            let mut inputs = two();
            inputs.push(random(DType::F32, &[26], 3));
            same_in_parts(&format!("{norm:?} {dtype}"), inputs, 1, &shape, |i, o| {
                norm.forward_into(NormalizeForward {
                    weight: Some(i[2]),
                    residual: Residual::Add(i[1]),
                    ..NormalizeForward::new(i[0], o)
                })
            });
        }
    }
}

/// A row that the fast forms of a tile do not serve leaves the bits of the others as they are.
#[test]
fn rows_out_of_range_leave_the_others() {
    fn check<T: Element + PartialEq>(act: FusedAct) {
        let shape = [2, 5, 3, 64];
        let d = shape[3];
        let mut random = Random::new(7);
        let x: Vec<T> = (0..2 * 5 * 3 * d).map(|_| T::from_f64(3.0 * random.normal())).collect();
        let theta = vec![0.3f32; d / 2];
        let rotate = Rotate { act, ..Rotate::default() };
        let rotated = |x: &[T]| {
            let mut o = vec![T::from_f64(f64::NAN); x.len()];
            let theta = View::new(&theta, &[1, d / 2]).unwrap();
            let (x, o_view) = (View::new(x, &shape).unwrap(), ViewMut::new(&mut o, &shape));
            rotate.forward_into(x, theta, o_view.unwrap()).unwrap();
            o
        };
        each_isa(|isa| {
            let want = rotated(&x);
            for bad in [81.0, -300.0, f64::INFINITY, f64::NAN] {
                let mut x = x.clone();
                x[4 * d + 9] = T::from_f64(bad);
                let got = rotated(&x);
                for row in (0..x.len() / d).filter(|&row| row != 4) {
                    let range = row * d..(row + 1) * d;
                    let what = format!("{isa} {act} {} {bad}, row {row}", T::DTYPE);
                    assert!(got[range.clone()] == want[range], "{what}");
                }
            }
        });
    }
    let acts = [Act::Sigmoid, Act::Silu].map(FusedAct::Elementwise);
    for act in acts.into_iter().chain([FusedAct::SoftmaxFeatures]) {
        check::<half::bf16>(act);
        check::<half::f16>(act);
    }
}

/// Rows that take turns with others, of the batch or of a norm, are as they are alone.
#[test]
fn rows_in_turns_do_not_depend_on_each_other() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (b, features) in [(9, 128), (6, 64), (5, 96)] {
            let (shape, wide) = ([b, 5, 3, features], [b, 5, 3, 2 * features]);
            let inputs = |grad: &[usize], count: usize| {
                let theta = random(DType::F32, &[1, count], 3);
                vec![random(dtype, &shape, 1), random(dtype, grad, 2), theta]
            };
            for pairing in [Pairing::Half, Pairing::Interleaved] {
                let rotate = Rotate { pairing, ..Rotate::default() };
                let what = format!("rotate {pairing:?} {dtype} {features}");
                let rotated = || inputs(&shape, features / 2);
                same_in_parts(&what, rotated(), 1, &shape, |i, o| {
                    rotate.forward_into(i[0], i[2], o)
                });
                same_in_parts(&what, rotated(), 1, &shape, |i, o| {
                    let (grad, angles) = (i[1], i[2].into());
                    let of = RotateBackward { x: None, grad, angles, dx: Some(o), dtheta: None };
                    rotate.backward_into(of)
                });
            }
            for layout in [TokenLayout::HeadsTokens, TokenLayout::TokensHeads] {
                let cosine = Cosine { layout, ..Cosine::default() };
                let what = format!("cosine {layout:?} {dtype} {features}");
                let waved = || inputs(&wide, features);
                same_in_parts(&what, waved(), 1, &wide, |i, o| cosine.forward_into(i[0], i[2], o));
                same_in_parts(&what, waved(), 1, &shape, |i, o| {
                    let (grad, angles) = (i[1], i[2].into());
                    let of = CosineBackward { x: None, grad, angles, dx: Some(o), dtheta: None };
                    cosine.backward_into(of)
                });
            }
        }
        for (rows, features) in
            [(41, 64), (37, 128), (23, 768), (9, 1024), (6, 1280), (9, 2048), (6, 4096)]
        {
            let shape = [rows, features];
            let inputs = vec![random(dtype, &shape, 1), random(DType::F32, &[features], 2)];
            let what = format!("norm {dtype} {features}");
            same_in_parts(&what, inputs, 1, &shape, |i, o| {
                let call =
                    NormalizeForward { weight: Some(i[1]), ..NormalizeForward::new(i[0], o) };
                Normalize::rms_norm().forward_into(call)
            });
        }
    }
}
