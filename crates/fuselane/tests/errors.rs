//! Every refusal: it names the operator and the argument, reads well, and nothing was written. And
//! whatever comes in, no panic comes out.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{Call, Input, Layout, Memory, Output, assert_refused, cases, poison};
use fuselane::reference::Random;
use fuselane::{
    Act, AngleTable, Buffer, Cosine, CosineBackward, DType, FusedAct, Isa, Normalize,
    NormalizeBackward, NormalizeForward, Pairing, Partial, Positions, Residual, Result, Rotate,
    RotateBackward, Softmax, TokenLayout, View, ViewMut, with_isa,
};
use proptest::prelude::*;

const F32: DType = DType::F32;

fn input(dtype: DType, shape: &[usize]) -> Input {
    Input::new(dtype, shape, &vec![0.5; shape.iter().product()])
}

/// A call on dense operands of these shapes has to be refused, with nothing written.
fn refuse(
    (operator, argument): (&str, &str),
    inputs: &[(DType, &[usize])],
    outputs: &[(DType, &[usize])],
    run: impl Fn(&[View<'_>], Vec<ViewMut<'_>>) -> Result<()> + Sync,
) -> String {
    let inputs = inputs.iter().map(|&(dtype, shape)| input(dtype, shape)).collect();
    let outputs = outputs.iter().map(|&(dtype, shape)| Output::new(dtype, shape)).collect();
    let call = Call::new(inputs, outputs, run);
    assert_refused(call.dense(), operator, argument).to_string()
}

#[test]
fn act() {
    let forward = |what, x: (DType, &[usize]), o: (DType, &[usize])| {
        refuse(("act", what), &[x], &[o], |i, mut o| Act::Silu.forward_into(i[0], o.remove(0)))
    };
    assert_eq!(
        forward("o", (F32, &[2, 3]), (F32, &[3, 2])),
        "act: o has shape [3, 2], expected [2, 3] (from x [2, 3])"
    );
    forward("o", (F32, &[2, 3]), (F32, &[2, 3, 1]));
    forward("o", (F32, &[2, 3]), (F32, &[]));
    forward("o", (F32, &[2, 0]), (F32, &[2, 1]));
    assert_eq!(
        forward("o", (F32, &[2, 3]), (DType::BF16, &[2, 3])),
        "act: o has dtype bf16, expected f32 (dtype of x)"
    );
    let backward = |what, grad: (DType, &[usize]), dx: (DType, &[usize])| {
        refuse(("act", what), &[(F32, &[4, 5]), grad], &[dx], |i, mut o| {
            Act::Gelu.backward_into(i[0], i[1], o.remove(0))
        })
    };
    backward("grad", (F32, &[4, 4]), (F32, &[4, 5]));
    backward("grad", (DType::F16, &[4, 5]), (F32, &[4, 5]));
    backward("dx", (F32, &[4, 5]), (F32, &[5, 5]));
    backward("dx", (F32, &[4, 5]), (DType::F64, &[4, 5]));
    // No dimension that is contiguous in both.
    refuse(("act", "x"), &[(F32, &[4, 6])], &[(F32, &[6, 4])], |i, mut o| {
        Act::Relu.forward_into(i[0].permute(&[1, 0])?, o.remove(0))
    });
    assert_refused("swish".parse::<Act>(), "act", "name");
}

#[test]
fn softmax() {
    for dim in [2, -3, isize::MAX, isize::MIN] {
        for softmax in [Softmax::over(dim), Softmax::log_over(dim)] {
            refuse(("softmax", "dim"), &[(F32, &[2, 3])], &[(F32, &[2, 3])], |i, mut o| {
                softmax.forward_into(i[0], o.remove(0))
            });
            refuse(("softmax", "dim"), &[(F32, &[2, 3])], &[(F32, &[2, 3])], |i, mut o| {
                softmax.backward_into(i[0], i[0], o.remove(0))
            });
            refuse(("softmax", "dim"), &[(F32, &[2, 3])], &[(F32, &[2, 3])], |i, mut o| {
                softmax.backward_from_input_into(i[0], i[0], o.remove(0))
            });
        }
    }
    refuse(("softmax", "x"), &[(F32, &[])], &[(F32, &[])], |i, mut o| {
        Softmax::over(-1).forward_into(i[0], o.remove(0))
    });
    for dim in [0, 1] {
        let softmax = Softmax::over(dim);
        let forward = |o: (DType, &[usize])| {
            refuse(("softmax", "o"), &[(F32, &[4, 6])], &[o], |i, mut o| {
                softmax.forward_into(i[0], o.remove(0))
            });
        };
        forward((F32, &[6, 4]));
        forward((F32, &[4, 6, 1]));
        forward((DType::F16, &[4, 6]));
        let backward = |what, grad: (DType, &[usize]), dx: (DType, &[usize])| {
            refuse(("softmax", what), &[(F32, &[4, 6]), grad], &[dx], |i, mut o| {
                softmax.backward_into(i[0], i[1], o.remove(0))
            });
            refuse(("softmax", what), &[(F32, &[4, 6]), grad], &[dx], |i, mut o| {
                softmax.backward_from_input_into(i[0], i[1], o.remove(0))
            });
        };
        backward("grad", (F32, &[4, 7]), (F32, &[4, 6]));
        backward("grad", (DType::BF16, &[4, 6]), (F32, &[4, 6]));
        backward("dx", (F32, &[4, 6]), (F32, &[4, 5]));
        backward("dx", (F32, &[4, 6]), (DType::F64, &[4, 6]));
        refuse(("softmax", "x"), &[(F32, &[4, 6])], &[(F32, &[6, 4])], |i, mut o| {
            softmax.forward_into(i[0].permute(&[1, 0])?, o.remove(0))
        });
    }
}

#[test]
fn normalize() {
    const X: (DType, &[usize]) = (F32, &[3, 8]);
    const KEPT: (DType, &[usize]) = (F32, &[3, 1]);
    let (rms, layer) = (Normalize::rms_norm(), Normalize::layer_norm());
    for (argument, norm) in [
        ("eps", rms.with_eps(-1e-9)),
        ("eps", rms.with_eps(f64::NAN)),
        ("eps", rms.with_eps(f64::INFINITY)),
        ("scale", Normalize { scale: f64::NAN, ..rms }),
        ("scale", Normalize { scale: f64::NEG_INFINITY, ..rms }),
        ("groups", rms.with_groups(0)),
        ("groups", rms.with_groups(3)),
        ("groups", rms.with_groups(16)),
        ("groups", rms.with_groups(usize::MAX)),
    ] {
        refuse(("normalize", argument), &[X], &[X], |i, mut o| {
            norm.forward_into(NormalizeForward::new(i[0], o.remove(0)))
        });
        refuse(("normalize", argument), &[X, KEPT], &[X], |i, mut o| {
            let dx = o.pop();
            norm.backward_into(NormalizeBackward { dx, ..NormalizeBackward::new(i[0], i[0], i[1]) })
        });
    }
    refuse(("normalize", "x"), &[(F32, &[])], &[(F32, &[])], |i, mut o| {
        rms.forward_into(NormalizeForward::new(i[0], o.remove(0)))
    });
    refuse(("normalize", "x"), &[(F32, &[8, 3])], &[X], |i, mut o| {
        rms.forward_into(NormalizeForward::new(i[0].permute(&[1, 0])?, o.remove(0)))
    });
    refuse(("normalize", "o"), &[X], &[(F32, &[8, 3])], |i, mut o| {
        rms.forward_into(NormalizeForward::new(i[0], o.remove(0).permute(&[1, 0])?))
    });

    // Each operand of the forward with a wrong shape and, but for parameters, a wrong dtype.
    let wrong: [(DType, &[usize]); 4] =
        [(F32, &[3, 7]), (F32, &[24]), (F32, &[8, 3]), (DType::F16, &[3, 8])];
    for bad in wrong {
        refuse(("normalize", "o"), &[X], &[bad], |i, mut o| {
            rms.forward_into(NormalizeForward::new(i[0], o.remove(0)))
        });
        refuse(("normalize", "gate"), &[X, bad], &[X], |i, mut o| {
            let gate = Some(i[1]);
            rms.forward_into(NormalizeForward { gate, ..NormalizeForward::new(i[0], o.remove(0)) })
        });
        refuse(("normalize", "residual"), &[X, bad], &[X], |i, mut o| {
            let residual = Residual::Add(i[1]);
            rms.forward_into(NormalizeForward {
                residual,
                ..NormalizeForward::new(i[0], o.remove(0))
            })
        });
        refuse(("normalize", "residual"), &[X], &[X, bad], |i, mut o| {
            let residual = Residual::AddInPlace(o.remove(1));
            rms.forward_into(NormalizeForward {
                residual,
                ..NormalizeForward::new(i[0], o.remove(0))
            })
        });
        refuse(("normalize", "residual_out"), &[X, X], &[X, bad], |i, mut o| {
            let residual = Residual::AddInto(i[1], o.remove(1));
            rms.forward_into(NormalizeForward {
                residual,
                ..NormalizeForward::new(i[0], o.remove(0))
            })
        });
    }
    let wrong: [(DType, &[usize]); 3] = [(F32, &[7]), (F32, &[1, 8]), (F32, &[])];
    for bad in wrong {
        refuse(("normalize", "weight"), &[X, bad], &[X], |i, mut o| {
            let weight = Some(i[1]);
            rms.forward_into(NormalizeForward {
                weight,
                ..NormalizeForward::new(i[0], o.remove(0))
            })
        });
        refuse(("normalize", "bias"), &[X, bad], &[X], |i, mut o| {
            let bias = Some(i[1]);
            rms.forward_into(NormalizeForward { bias, ..NormalizeForward::new(i[0], o.remove(0)) })
        });
    }
    let wrong: [(DType, &[usize]); 4] =
        [(F32, &[3]), (F32, &[3, 8]), (F32, &[1, 3]), (DType::F64, &[3, 1])];
    for bad in wrong {
        refuse(("normalize", "rstd"), &[X], &[X, bad], |i, mut o| {
            let rstd = o.pop();
            layer
                .forward_into(NormalizeForward { rstd, ..NormalizeForward::new(i[0], o.remove(0)) })
        });
        refuse(("normalize", "mean"), &[X], &[X, bad], |i, mut o| {
            let mean = o.pop();
            layer
                .forward_into(NormalizeForward { mean, ..NormalizeForward::new(i[0], o.remove(0)) })
        });
    }
    refuse(("normalize", "mean"), &[X], &[X, KEPT], |i, mut o| {
        let mean = o.pop();
        rms.forward_into(NormalizeForward { mean, ..NormalizeForward::new(i[0], o.remove(0)) })
    });

    // Each operand of the backward.
    let operands = [
        "grad",
        "residual",
        "gate",
        "weight",
        "bias",
        "rstd",
        "mean",
        "grad_residual_out",
        "dx",
        "dresidual",
        "dgate",
        "dweight",
        "dbias",
    ];
    let cases: [(&str, (DType, &[usize])); 20] = [
        ("grad", (F32, &[3, 7])),
        ("grad", (DType::F64, &[3, 8])),
        ("residual", (F32, &[24])),
        ("residual", (DType::BF16, &[3, 8])),
        ("gate", (F32, &[8])),
        ("weight", (F32, &[3, 8])),
        ("bias", (F32, &[9])),
        ("rstd", (F32, &[3])),
        ("rstd", (DType::F16, &[3, 1])),
        ("mean", (F32, &[3, 2])),
        ("mean", (DType::F64, &[3, 1])),
        ("grad_residual_out", (F32, &[3, 9])),
        ("dx", (F32, &[3, 9])),
        ("dx", (DType::BF16, &[3, 8])),
        ("dresidual", (F32, &[3])),
        ("dgate", (F32, &[4, 8])),
        ("dgate", (DType::F64, &[3, 8])),
        ("dweight", (F32, &[3, 8])),
        ("dbias", (F32, &[7])),
        ("dbias", (F32, &[])),
    ];
    for (argument, bad) in cases {
        let vector: (DType, &[usize]) = (F32, &[8]);
        let at = operands.iter().position(|name| *name == argument).unwrap();
        let mut inputs = [X, X, X, vector, vector, KEPT, KEPT, X];
        let mut outputs = [X, X, X, vector, vector];
        match at {
            0..8 => inputs[at] = bad,
            _ => outputs[at - 8] = bad,
        }
        let mut inputs = inputs.to_vec();
        inputs.push(X);
        refuse(("normalize", argument), &inputs, &outputs, |i, o| {
            let mut o = o.into_iter();
            layer.backward_into(NormalizeBackward {
                grad: i[0],
                residual: Some(i[1]),
                gate: Some(i[2]),
                weight: Some(i[3]),
                bias: Some(i[4]),
                rstd: i[5],
                mean: Some(i[6]),
                grad_residual_out: Some(i[7]),
                x: i[8],
                dx: o.next(),
                dresidual: o.next(),
                dgate: o.next(),
                dweight: o.next(),
                dbias: o.next(),
            })
        });
    }
    // What must or must not be there.
    refuse(("normalize", "mean"), &[X, KEPT], &[X], |i, mut o| {
        let dx = o.pop();
        layer.backward_into(NormalizeBackward { dx, ..NormalizeBackward::new(i[0], i[0], i[1]) })
    });
    refuse(("normalize", "mean"), &[X, KEPT], &[X], |i, mut o| {
        let (dx, mean) = (o.pop(), Some(i[1]));
        rms.backward_into(NormalizeBackward {
            dx,
            mean,
            ..NormalizeBackward::new(i[0], i[0], i[1])
        })
    });
    refuse(("normalize", "dgate"), &[X, KEPT], &[X], |i, mut o| {
        let dgate = o.pop();
        rms.backward_into(NormalizeBackward { dgate, ..NormalizeBackward::new(i[0], i[0], i[1]) })
    });
    refuse(("normalize", "dweight"), &[X, KEPT], &[(F32, &[8])], |i, mut o| {
        let dweight = o.pop();
        rms.backward_into(NormalizeBackward { dweight, ..NormalizeBackward::new(i[0], i[0], i[1]) })
    });

    // Overlaps.
    let spare = [0.5f32; 24];
    let other = View::new(&spare, &[3, 8]).unwrap();
    let kept = View::new(&spare[..3], &[3, 1]).unwrap();
    let over = |argument, run: &dyn Fn(View<'_>, ViewMut<'_>) -> Result<()>| {
        for step in [0, 5, 23] {
            overlapping(24, step, &[3, 8], ("normalize", argument), run);
        }
    };
    over("o", &|x, o| rms.forward_into(NormalizeForward::new(x, o)));
    over("o", &|gate, o| {
        rms.forward_into(NormalizeForward { gate: Some(gate), ..NormalizeForward::new(other, o) })
    });
    over("o", &|view, o| {
        let residual = Residual::Add(view);
        rms.forward_into(NormalizeForward { residual, ..NormalizeForward::new(other, o) })
    });
    over("dx", &|x, o| {
        rms.backward_into(NormalizeBackward {
            dx: Some(o),
            ..NormalizeBackward::new(other, x, kept)
        })
    });
    over("dx", &|grad, o| {
        rms.backward_into(NormalizeBackward {
            dx: Some(o),
            ..NormalizeBackward::new(grad, other, kept)
        })
    });
    over("dresidual", &|more, o| {
        rms.backward_into(NormalizeBackward {
            grad_residual_out: Some(more),
            dresidual: Some(o),
            ..NormalizeBackward::new(other, other, kept)
        })
    });
    overlapping(24, 0, &[3, 8], ("normalize", "o"), |memory, o| {
        let weight = Some(memory.narrow(0, 2, 1)?.reshape(&[8])?);
        rms.forward_into(NormalizeForward { weight, ..NormalizeForward::new(other, o) })
    });
    overlapping(24, 0, &[3, 8], ("normalize", "dbias"), |memory, o| {
        let dbias = Some(o.narrow(0, 2, 1)?.reshape(&[8])?);
        rms.backward_into(NormalizeBackward {
            dbias,
            ..NormalizeBackward::new(memory, other, kept)
        })
    });
}

const X: (DType, &[usize]) = (F32, &[2, 6, 3, 8]);

/// Refusals that rotate and cosine share, for their own shape of theta and output.
fn positions_are_checked(
    operator: &str,
    theta: (DType, &[usize]),
    o: (DType, &[usize]),
    run: impl Fn(Positions<'_>, usize, Option<&[usize]>, &[View<'_>], ViewMut<'_>) -> Result<()> + Sync,
) {
    let refuse = |what, positions: Positions<'_>, extra, sequences: Option<&[usize]>| {
        refuse((operator, what), &[X, theta], &[o], |i, mut o| {
            run(positions, extra, sequences, i, o.remove(0))
        })
    };
    let numbers = [7i64; 20];
    refuse("positions", Positions::PerToken(&numbers[..5]), 0, None);
    refuse("positions", Positions::PerToken(&[]), 0, None);
    refuse("positions", Positions::PerBatch(&numbers[..6]), 0, None);
    refuse("positions", Positions::PerBatch(&numbers[..13]), 0, None);
    refuse("positions", Positions::From(i64::MAX - 3), 0, None);
    refuse("extra_tokens", Positions::From(0), 7, None);
    refuse("extra_tokens", Positions::From(0), usize::MAX, None);
    refuse("extra_tokens", Positions::PerToken(&numbers[..6]), 1, None);
    refuse("grid", Positions::Grid(&[2, 2]), 0, None);
    refuse("grid", Positions::Grid(&[2, 3]), 1, None);
    refuse("grid", Positions::Grid(&[]), 6, None);
    refuse("grid", Positions::Grid(&[6, 0]), 0, None);
    refuse("grid", Positions::Grid(&[1; 17]), 5, None);
    refuse("grid", Positions::Grid(&[usize::MAX, 7]), 0, None);
    refuse("grid", Positions::Grid(&[6]), usize::MAX, None);
    for bad in [&[][..], &[0], &[6], &[0, 5], &[0, 7], &[1, 6], &[0, 4, 3, 6], &[0, 9, 6]] {
        refuse("sequences", Positions::From(0), 0, Some(bad));
    }
    refuse("sequences", Positions::Grid(&[6]), 0, Some(&[0, 6]));
    refuse("sequences", Positions::From(0), 1, Some(&[0, 6]));
}

#[test]
fn rotate() {
    for act in [FusedAct::default(), FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence] {
        let theta: (DType, &[usize]) = (F32, &[1, 4]);
        positions_are_checked("rotate", theta, X, |positions, extra_tokens, sequences, i, o| {
            let rotate = Rotate { act, positions, extra_tokens, sequences, ..Rotate::default() };
            rotate.forward_into(i[0], i[1], o)
        });
        positions_are_checked("rotate", theta, X, |positions, extra_tokens, sequences, i, o| {
            let rotate = Rotate { act, positions, extra_tokens, sequences, ..Rotate::default() };
            let (x, grad, angles) = (Some(i[0]), i[0], i[1].into());
            rotate.backward_into(RotateBackward { x, grad, angles, dx: Some(o), dtheta: None })
        });
        let forward = |what, x: (DType, &[usize]), theta: (DType, &[usize]), o| {
            refuse(("rotate", what), &[x, theta], &[o], |i, mut o| {
                Rotate { act, ..Rotate::default() }.forward_into(i[0], i[1], o.remove(0))
            })
        };
        assert_eq!(
            forward("x", (F32, &[6, 3, 8]), theta, X),
            "rotate: x has shape [6, 3, 8], expected (batch, tokens, heads, features)"
        );
        forward("x", (F32, &[]), theta, X);
        forward("x", (F32, &[1, 2, 6, 3, 8]), theta, X);
        forward("o", X, theta, (F32, &[2, 6, 3, 9]));
        forward("o", X, theta, (F32, &[2, 3, 6, 8]));
        forward("o", X, theta, (F32, &[2, 6, 24]));
        forward("o", X, theta, (DType::F16, &[2, 6, 3, 8]));
        forward("theta", X, (F32, &[4]), X);
        forward("theta", X, (F32, &[1, 1, 4]), X);
        forward("theta", X, (F32, &[2, 4]), X);
        forward("theta", X, (F32, &[0, 4]), X);
        forward("theta", X, (F32, &[1, 5]), X);
        for (positions, theta) in [(Positions::Grid(&[2, 3]), [1, 1]), (Positions::From(0), [1, 4])]
        {
            let theta: &[usize] = &theta;
            refuse(("rotate", "pairs"), &[X, (F32, theta)], &[X], |i, mut o| {
                let rotate = Rotate { act, positions, pairs: Some(5), ..Rotate::default() };
                rotate.forward_into(i[0], i[1], o.remove(0))
            });
        }
        // Too few frequencies for the pairs that are asked for.
        refuse(("rotate", "theta"), &[X, (F32, &[1, 2])], &[X], |i, mut o| {
            let rotate = Rotate { act, pairs: Some(3), ..Rotate::default() };
            rotate.forward_into(i[0], i[1], o.remove(0))
        });
        // Rows that are not contiguous.
        for last in ["x", "o"] {
            refuse(
                ("rotate", last),
                &[(F32, &[2, 6, 8, 3]), X, theta],
                &[X, (F32, &[2, 6, 8, 3])],
                {
                    |i, mut o| {
                        let (turned, straight) = (o.pop().unwrap(), o.pop().unwrap());
                        let order = [0, 1, 3, 2];
                        let rotate = Rotate { act, ..Rotate::default() };
                        match last {
                            "x" => rotate.forward_into(i[0].permute(&order)?, i[2], straight),
                            _ => rotate.forward_into(i[1], i[2], turned.permute(&order)?),
                        }
                    }
                },
            );
        }
        let backward = |what, x: Option<(DType, &[usize])>, grad, dx, dtheta: (DType, &[usize])| {
            let inputs = [x.unwrap_or(X), grad, theta];
            refuse(("rotate", what), &inputs, &[dx, dtheta], |i, mut o| {
                Rotate { act, ..Rotate::default() }.backward_into(RotateBackward {
                    x: x.map(|_| i[0]),
                    grad: i[1],
                    angles: i[2].into(),
                    dtheta: o.pop(),
                    dx: o.pop(),
                })
            })
        };
        assert_eq!(
            backward("x", None, X, X, theta),
            "rotate: x is missing, expected it (the backward of an activation and dtheta need it)"
        );
        backward("grad", Some(X), (F32, &[2, 6, 3, 7]), X, theta);
        backward("grad", Some(X), (F32, &[6, 3, 8]), X, theta);
        backward("grad", Some(X), (DType::BF16, X.1), X, theta);
        backward("dx", Some(X), X, (F32, &[2, 6, 3, 9]), theta);
        backward("dx", Some(X), X, (DType::F64, X.1), theta);
        backward("dtheta", Some(X), X, X, (F32, &[4]));
        backward("dtheta", Some(X), X, X, (F32, &[3, 4]));
    }
    assert_refused("relux".parse::<FusedAct>(), "act", "name");
}

#[test]
fn cosine() {
    let theta: (DType, &[usize]) = (F32, &[1, 8]);
    let wide: (DType, &[usize]) = (F32, &[2, 6, 3, 16]);
    let layout = TokenLayout::TokensHeads;
    for act in [FusedAct::default(), FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence] {
        positions_are_checked("cosine", theta, wide, |positions, extra_tokens, sequences, i, o| {
            Cosine { act, layout, positions, extra_tokens, sequences }.forward_into(i[0], i[1], o)
        });
        let cosine = Cosine { act, layout, ..Cosine::default() };
        let forward = |what, x: (DType, &[usize]), theta: (DType, &[usize]), o| {
            refuse(("cosine", what), &[x, theta], &[o], |i, mut o| {
                cosine.forward_into(i[0], i[1], o.remove(0))
            })
        };
        forward("x", (F32, &[6, 3, 8]), theta, wide);
        forward("o", X, theta, X);
        forward("o", X, theta, (F32, &[2, 6, 3, 15]));
        forward("o", X, theta, (DType::F16, wide.1));
        forward("theta", X, (F32, &[8]), wide);
        forward("theta", X, (F32, &[2, 8]), wide);
        forward("theta", X, (F32, &[1, 7]), wide);
        forward("theta", X, (F32, &[1, 0]), wide);
        let backward = |what, x: Option<(DType, &[usize])>, grad, dx, dtheta: (DType, &[usize])| {
            let inputs = [x.unwrap_or(X), grad, theta];
            refuse(("cosine", what), &inputs, &[dx, dtheta], |i, mut o| {
                cosine.backward_into(CosineBackward {
                    x: x.map(|_| i[0]),
                    grad: i[1],
                    angles: i[2].into(),
                    dtheta: o.pop(),
                    dx: o.pop(),
                })
            })
        };
        backward("x", None, wide, X, theta);
        backward("grad", Some(X), X, X, (F32, &[1, 4]));
        backward("grad", Some(X), (F32, &[2, 6, 3, 17]), X, theta);
        backward("grad", Some(X), (DType::F64, wide.1), X, theta);
        backward("dx", Some(X), wide, wide, theta);
        backward("dtheta", Some(X), wide, X, (F32, &[8, 1]));
    }
}

#[test]
fn tables() {
    let theta = [0.5f32; 12];
    let theta = View::new(&theta, &[3, 4]).unwrap();
    let table = |count, range, dtype| AngleTable::for_sequence(theta, count, range, dtype).unwrap();
    let rotate = |table: &AngleTable, rotate: Rotate<'_>| {
        refuse(("rotate", "angle table"), &[X], &[X], |i, mut o| {
            rotate.forward_into(i[0], table, o.remove(0))
        })
    };
    let plain = Rotate::default();
    rotate(&table(4, 0..5, F32), plain);
    rotate(&table(4, 1..9, F32), plain);
    rotate(&table(4, 0..6, DType::F64), plain);
    rotate(&table(4, 0..6, F32), Rotate { positions: Positions::From(1), ..plain });
    rotate(&table(4, 0..6, F32), Rotate { positions: Positions::From(-1), ..plain });
    rotate(&table(4, 0..6, F32), Rotate { pairs: Some(3), ..plain });
    rotate(&table(4, 0..6, F32), Rotate { positions: Positions::Grid(&[2, 3]), ..plain });
    let far = [0, 1, 2, 3, 4, 1 << 40];
    rotate(&table(4, 0..6, F32), Rotate { positions: Positions::PerToken(&far), ..plain });
    let grid = AngleTable::for_grid(theta, 4, &[2, 2], F32).unwrap();
    rotate(&grid, Rotate { positions: Positions::Grid(&[2, 3]), ..plain });
    let two_heads = View::strided(&[0.5f32; 4], &[2, 4], &[0, 1], 0).unwrap();
    let two_heads = AngleTable::for_sequence(two_heads, 4, 0..6, F32).unwrap();
    rotate(&two_heads, plain);

    let refused = |result: Result<AngleTable>, argument| {
        assert_refused(result, "angle_table", argument);
    };
    refused(AngleTable::for_sequence(theta, 5, 0..6, F32), "theta");
    refused(AngleTable::for_grid(theta, 9, &[2, 2], F32), "theta");
    refused(
        AngleTable::for_sequence(
            theta.narrow(0, 0, 1).unwrap().reshape(&[4]).unwrap(),
            4,
            0..6,
            F32,
        ),
        "theta",
    );
    // Tables that no memory holds.
    refused(AngleTable::for_sequence(theta, 4, 0..i64::MAX, F32), "positions");
    refused(AngleTable::for_sequence(theta, 4, 0..1 << 50, F32), "positions");
    refused(AngleTable::for_grid(theta, 8, &[1 << 51, 2], DType::F64), "positions");
    // Of no angles there can be any number.
    let one = View::new(&[1.0f32], &[1, 1]).unwrap();
    assert_eq!(AngleTable::for_sequence(one, 0, 0..i64::MAX, F32).unwrap().bytes(), 0);
}

#[test]
fn views() {
    let data = [0.0f32; 12];
    let mut out = [0.0f32; 12];
    let refused = |result: Result<View<'_>>, argument| {
        assert_refused(result, "view", argument);
    };
    refused(View::new(&data, &[5]), "shape");
    refused(View::new(&data, &[1; 9]), "shape");
    refused(View::new(&data, &[usize::MAX, 2]), "shape");
    refused(View::new(&data, &[1 << 40, 1 << 40, 0]), "shape");
    refused(View::strided(&data, &[3, 4], &[4], 0), "strides");
    refused(View::strided(&data, &[3, 4], &[4, 1], 1), "strides");
    refused(View::strided(&data, &[3, 4], &[-4, 1], 7), "strides");
    refused(View::strided(&data, &[3], &[isize::MIN], 11), "strides");
    refused(View::strided(&data, &[3, 3], &[isize::MAX, isize::MAX], 0), "strides");
    refused(View::strided(&data, &[2], &[1], usize::MAX), "strides");
    let view = View::new(&data, &[3, 4]).unwrap();
    refused(view.permute(&[0]), "order");
    refused(view.permute(&[0, 2]), "order");
    refused(view.permute(&[1, 1]), "order");
    refused(view.narrow(2, 0, 1), "narrow");
    refused(view.narrow(1, 3, 2), "narrow");
    refused(view.narrow(1, usize::MAX, 2), "narrow");
    refused(view.reshape(&[5]), "shape");
    refused(view.permute(&[1, 0]).unwrap().reshape(&[12]), "reshape");
    refused(view.broadcast(&[4]), "broadcast");
    refused(view.broadcast(&[2, 4]), "broadcast");
    refused(view.broadcast(&[usize::MAX, 3, 4]), "shape");
    refused(view.broadcast(&[1, 1, 1, 1, 1, 1, 1, 3, 4]), "broadcast");
    assert_refused(ViewMut::strided(&mut out, &[2, 4], &[3, 1], 0), "view", "strides");
    assert_refused(ViewMut::strided(&mut out, &[2, 4], &[0, 1], 0), "view", "strides");
    assert_refused(ViewMut::new(&mut out, &[13]), "view", "shape");
    assert_refused("sse".parse::<Isa>(), "isa", "name");
}

#[test]
fn strides_that_no_index_uses_may_be_anything() {
    let data = [1.0f32, 2.0];
    for far in [isize::MAX, isize::MIN, isize::MAX / 4] {
        let one = View::strided(&data, &[2, 1], &[1, far], 0).unwrap();
        assert_eq!(one.to_f64_vec(), [1.0, 2.0]);
        let none = View::strided(&data, &[3, 0], &[far, 1], 0).unwrap();
        assert!(none.to_f64_vec().is_empty());
        assert!(none.narrow(0, 2, 1).unwrap().is_empty());
        let mut nothing = [0.0f32; 0];
        let o = ViewMut::strided(&mut nothing, &[3, 0], &[far, 1], 0).unwrap();
        Act::Silu.forward_into(none, o).unwrap();
        let o = ViewMut::strided(&mut nothing, &[3, 0], &[far, 1], 0).unwrap();
        Softmax::over(-1).forward_into(none, o).unwrap();
        let o = ViewMut::strided(&mut nothing, &[3, 0], &[far, 1], 0).unwrap();
        Softmax::over(0).forward_into(none, o).unwrap();
        let none = View::strided(&data, &[3, 2, 2, 0], &[far, far, far, 1], 0).unwrap();
        let o = ViewMut::strided(&mut nothing, &[3, 2, 2, 0], &[far, far, far, 1], 0).unwrap();
        let theta = View::strided(&data, &[2, 1], &[1, far], 0).unwrap();
        Rotate::default().forward_into(none, theta, o).unwrap();
    }
}

#[test]
fn empty_tensors_cost_nothing_however_large_their_other_dimensions() {
    let many = 1 << 45;
    let nothing: [f32; 0] = [];
    let theta = [0.5f32];
    let theta = View::new(&theta, &[1, 1]).unwrap();
    for zero in 0..4 {
        for large in (0..4).filter(|&d| d != zero) {
            let mut shape = [1; 4];
            (shape[zero], shape[large]) = (0, many);
            let x = View::new(&nothing, &shape).unwrap();
            let o = || Buffer::zeros(F32, &shape).unwrap();
            let mut wide = shape;
            wide[3] *= 2;
            Act::Silu.forward_into(x, o().view_mut()).unwrap();
            Act::Silu.backward_into(x, x, o().view_mut()).unwrap();
            for dim in 0..4 {
                Softmax::over(dim).forward_into(x, o().view_mut()).unwrap();
                Softmax::over(dim).backward_into(x, x, o().view_mut()).unwrap();
                Softmax::over(dim).backward_from_input_into(x, x, o().view_mut()).unwrap();
            }
            for act in [FusedAct::default(), FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence] {
                let layout = TokenLayout::TokensHeads;
                let rotate = Rotate { act, ..Rotate::default() };
                let cosine = Cosine { act, layout, ..Cosine::default() };
                rotate.forward_into(x, theta, o().view_mut()).unwrap();
                let mut encoded = Buffer::zeros(F32, &wide).unwrap();
                cosine.forward_into(x, theta, encoded.view_mut()).unwrap();
                let mut dtheta = [f32::NAN; 1];
                let (mut dx, angles) = (o(), theta.into());
                rotate
                    .backward_into(RotateBackward {
                        x: Some(x),
                        grad: x,
                        angles,
                        dx: Some(dx.view_mut()),
                        dtheta: Some(ViewMut::new(&mut dtheta, &[1, 1]).unwrap()),
                    })
                    .unwrap();
                assert_eq!(dtheta, [0.0]);
                dtheta = [f32::NAN];
                cosine
                    .backward_into(CosineBackward {
                        x: Some(x),
                        grad: encoded.view(),
                        angles,
                        dx: Some(dx.view_mut()),
                        dtheta: Some(ViewMut::new(&mut dtheta, &[1, 1]).unwrap()),
                    })
                    .unwrap();
                assert_eq!(dtheta, [0.0]);
            }
        }
    }
}

/// Two tensors of one memory, `step` elements apart.
fn overlapping(
    len: usize,
    step: usize,
    shape: &[usize],
    (operator, argument): (&str, &str),
    run: impl Fn(View<'_>, ViewMut<'_>) -> Result<()>,
) {
    let mut memory = Memory::poisoned(F32, len + step);
    let before = memory.clone();
    let layout = Layout::dense(shape);
    let p = memory.pointer_mut();
    // SAFETY: both lie in the memory. That they overlap is what the call has to refuse before it
    // touches them.
    let (input, output) = unsafe {
        (
            View::from_raw(p, F32, shape, &layout.strides).unwrap(),
            ViewMut::from_raw(p.add(4 * step), F32, shape, &layout.strides).unwrap(),
        )
    };
    let error = assert_refused(run(input, output), operator, argument);
    assert!(error.to_string().contains("overlaps"), "{error}");
    assert_eq!(memory, before, "{error}");
}

#[test]
fn outputs_over_inputs() {
    for step in [0, 1, 59] {
        let over = |operator, argument, run: &dyn Fn(View<'_>, ViewMut<'_>) -> Result<()>| {
            overlapping(60, step, &[3, 20], (operator, argument), run);
        };
        over("act", "o", &|x, o| Act::Relu.forward_into(x, o));
        over("act", "dx", &|x, o| {
            Act::Relu.backward_into(x, View::new(&[0.0f32; 60], &[3, 20])?, o)
        });
        over("act", "dx", &|g, o| {
            Act::Relu.backward_into(View::new(&[0.0f32; 60], &[3, 20])?, g, o)
        });
        for softmax in [Softmax::over(0), Softmax::log_over(1)] {
            let other = View::new(&[0.0f32; 60], &[3, 20]).unwrap();
            over("softmax", "o", &|x, o| softmax.forward_into(x, o));
            over("softmax", "dx", &|x, o| softmax.backward_into(x, other, o));
            over("softmax", "dx", &|g, o| softmax.backward_into(other, g, o));
            over("softmax", "dx", &|x, o| softmax.backward_from_input_into(x, other, o));
        }
    }
    let theta = View::new(&[0.5f32; 2], &[1, 2]).unwrap();
    let long = View::new(&[0.5f32; 4], &[1, 4]).unwrap();
    for act in [
        FusedAct::default(),
        Act::Silu.into(),
        FusedAct::SoftmaxFeatures,
        FusedAct::SoftmaxSequence,
    ] {
        // By whole sequences: each by itself would find its own output free.
        for (step, sequences) in
            [(0, None), (5, None), (8, Some(&[0, 2, 4][..])), (4, Some(&[0, 1, 4]))]
        {
            let shape = [1, 4, 1, 4];
            overlapping(16, step, &shape, ("rotate", "o"), |x, o| {
                Rotate { act, sequences, ..Rotate::default() }.forward_into(x, theta, o)
            });
            let layout = TokenLayout::TokensHeads;
            let wide = [0.5f32; 32];
            overlapping(16, step, &shape, ("cosine", "dx"), |x, o| {
                Cosine { act: Act::Silu.into(), layout, sequences, ..Cosine::default() }
                    .backward_into(CosineBackward {
                        x: Some(x),
                        grad: View::new(&wide, &[1, 4, 1, 8])?,
                        angles: long.into(),
                        dx: Some(o),
                        dtheta: None,
                    })
            });
            overlapping(16, step, &shape, ("rotate", "dx"), |grad, o| {
                Rotate { act, sequences, ..Rotate::default() }.backward_into(RotateBackward {
                    x: Some(View::new(&wide[..16], &[1, 4, 1, 4])?),
                    grad,
                    angles: theta.into(),
                    dx: Some(o),
                    dtheta: None,
                })
            });
        }
    }
}

#[test]
fn parameters_and_their_gradients_overlap_nothing() {
    let x = [0.5f32; 16];
    let x = View::new(&x, &[1, 4, 1, 4]).unwrap();
    // theta inside the output.
    overlapping(16, 0, &[1, 4, 1, 4], ("rotate", "o"), |memory, o| {
        let theta = memory.narrow(1, 0, 1)?.narrow(3, 0, 2)?.reshape(&[1, 2])?;
        Rotate::default().forward_into(x, theta, o)
    });
    overlapping(16, 0, &[1, 4, 1, 4], ("cosine", "o"), |memory, o| {
        let theta = memory.narrow(1, 0, 1)?.narrow(3, 0, 2)?.reshape(&[1, 2])?;
        let x = x.narrow(3, 0, 2)?;
        Cosine { layout: TokenLayout::TokensHeads, ..Cosine::default() }.forward_into(x, theta, o)
    });
    // dtheta over dx, x, grad and theta.
    fn backward<'a>(
        [x, grad, theta]: [View<'a>; 3],
        dx: Option<ViewMut<'a>>,
        dtheta: ViewMut<'a>,
    ) -> Result<()> {
        let (angles, dtheta) = (theta.into(), Some(dtheta));
        Rotate::default().backward_into(RotateBackward { x: Some(x), grad, angles, dx, dtheta })
    }
    let theta = View::new(&[0.5f32; 2], &[1, 2]).unwrap();
    fn short(o: ViewMut<'_>) -> Result<ViewMut<'_>> {
        o.narrow(1, 0, 1)?.narrow(3, 0, 2)?.reshape(&[1, 2])
    }
    for which in ["x", "grad", "theta", "dx"] {
        overlapping(16, 0, &[1, 4, 1, 4], ("rotate", "dtheta"), |memory, o| {
            // SAFETY: the same memory once more, for the call to refuse.
            let dx = unsafe {
                ViewMut::from_raw(memory.as_ptr().cast_mut(), F32, &[1, 4, 1, 4], &[16, 4, 4, 1])?
            };
            match which {
                "x" => backward([memory, x, theta], None, short(o)?),
                "grad" => backward([x, memory, theta], None, short(o)?),
                "theta" => {
                    let theta = memory.narrow(1, 0, 1)?.narrow(3, 0, 2)?.reshape(&[1, 2])?;
                    backward([x, x, theta], None, short(o)?)
                }
                _ => backward([x, x, theta], Some(dx), short(o)?),
            }
        });
    }
}

#[test]
fn an_instruction_set_that_the_cpu_lacks_is_refused() {
    for isa in Isa::ALL {
        let result = with_isa(isa, || ());
        if isa.is_available() {
            result.unwrap();
        } else {
            assert_refused(result, "isa", "name");
        }
    }
}

/// A shape, strides and place that may fit the memory or not.
fn garbage(random: &mut Random, rank: usize, len: usize) -> (Vec<usize>, Vec<isize>, usize) {
    let size = |random: &mut Random| match random.below(20) {
        0 => 0,
        1 => usize::MAX >> random.below(60),
        _ => 1 + random.below(5),
    };
    let stride = |random: &mut Random| match random.below(12) {
        0 => 0,
        1 => isize::MAX >> random.below(60),
        2 => isize::MIN >> random.below(60),
        3 | 4 => -(random.below(30) as isize),
        _ => random.below(40) as isize,
    };
    let shape: Vec<usize> = (0..rank).map(|_| size(random)).collect();
    let mut strides: Vec<isize> = (0..rank).map(|_| stride(random)).collect();
    if random.below(3) > 0 {
        strides = Layout::dense(&shape.iter().map(|s| s % 1000).collect::<Vec<_>>()).strides;
    } else if let Some(last) = strides.last_mut().filter(|_| random.below(4) > 0) {
        *last = 1;
    }
    let offset = if random.below(20) == 0 { random.bits() as usize } else { random.below(len) };
    (shape, strides, offset)
}

/// The same shape for most operands, so that many calls get past the first checks.
struct Garbage {
    rank: usize,
    like: (Vec<usize>, Vec<isize>, usize),
}

const LEN: usize = 4096;

impl Garbage {
    fn new(random: &mut Random) -> Self {
        let rank = match random.below(3) {
            0 => random.below(9),
            _ => 4,
        };
        let (shape, ..) = garbage(random, rank, LEN);
        let strides = Layout::dense(&shape.iter().map(|s| s % 1000).collect::<Vec<_>>()).strides;
        Self { rank, like: (shape, strides, 50) }
    }

    fn next(&self, random: &mut Random) -> (Vec<usize>, Vec<isize>, usize) {
        if random.below(6) > 0 { self.like.clone() } else { garbage(random, self.rank, LEN) }
    }
}

/// Memory to make views of, as each dtype.
struct Heap {
    words: Vec<u64>,
}

impl Heap {
    fn new() -> Self {
        // NaN in every dtype, and none that an operator makes.
        Self { words: vec![0x7fed_7fed_7fed_7fed; LEN + 256] }
    }

    fn slice<T>(&self) -> &[T] {
        // SAFETY: LEN elements of at most eight bytes, behind 128 words; any bits are a number.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().add(128).cast(), LEN) }
    }

    fn slice_mut<T>(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().add(128).cast(), LEN) }
    }

    fn view(&self, dtype: DType, at: &(Vec<usize>, Vec<isize>, usize)) -> Result<View<'_>> {
        let (shape, strides, offset) = at;
        match dtype {
            DType::F32 => View::strided(self.slice::<f32>(), shape, strides, *offset),
            DType::F16 => View::strided(self.slice::<half::f16>(), shape, strides, *offset),
            DType::BF16 => View::strided(self.slice::<half::bf16>(), shape, strides, *offset),
            DType::F64 => View::strided(self.slice::<f64>(), shape, strides, *offset),
        }
    }

    fn view_mut(
        &mut self,
        dtype: DType,
        at: &(Vec<usize>, Vec<isize>, usize),
    ) -> Result<ViewMut<'_>> {
        let (shape, strides, offset) = at;
        match dtype {
            DType::F32 => ViewMut::strided(self.slice_mut::<f32>(), shape, strides, *offset),
            DType::F16 => ViewMut::strided(self.slice_mut::<half::f16>(), shape, strides, *offset),
            DType::BF16 => {
                ViewMut::strided(self.slice_mut::<half::bf16>(), shape, strides, *offset)
            }
            DType::F64 => ViewMut::strided(self.slice_mut::<f64>(), shape, strides, *offset),
        }
    }

    fn guards_stand(&self) -> bool {
        let (head, tail) = (&self.words[..128], &self.words[128 + LEN..]);
        head.iter().chain(tail).all(|&word| word == 0x7fed_7fed_7fed_7fed)
    }
}

/// Makes any call of garbage; true if it was accepted.
fn anything(random: &mut Random) -> Result<bool> {
    let garbage = Garbage::new(random);
    let main = DType::ALL[random.below(4)];
    let mut dtype = || if random.below(12) == 0 { DType::ALL[random.below(4)] } else { main };
    let types = [dtype(), dtype(), dtype(), dtype(), dtype()];
    let mut heaps = [(); 5].map(|()| Heap::new());
    let places = [(); 3].map(|()| garbage.next(random));
    let act = match random.below(4) {
        0 => FusedAct::SoftmaxFeatures,
        1 => FusedAct::SoftmaxSequence,
        _ => FusedAct::Elementwise(Act::ALL[random.below(9)]),
    };
    let result = {
        let [x, grad, theta, o, dtheta] = &mut heaps;
        let (x, grad) = (x.view(types[0], &places[0]), grad.view(types[1], &places[1]));
        let mut wide = places[2].clone();
        if random.below(2) == 0 {
            if let Some(last) = wide.0.last_mut() {
                *last = last.wrapping_mul(2);
            }
            let sizes: Vec<usize> = wide.0.iter().map(|s| s % 1000).collect();
            wide.1 = Layout::dense(&sizes).strides;
        }
        let o = o.view_mut(types[2], &wide);
        let columns = places[0].0.last().map_or(1, |d| d / 2).min(20);
        let theta_at = match random.below(6) {
            0 => super_garbage(random),
            1 => (vec![1, 1], vec![1, 1], 0),
            _ => (vec![1, columns], vec![columns as isize, 1], 3),
        };
        let (theta, dtheta) =
            (theta.view(types[3], &theta_at), dtheta.view_mut(types[4], &theta_at));
        let (Ok(x), Ok(grad), Ok(o), Ok(theta), Ok(dtheta)) = (x, grad, o, theta, dtheta) else {
            return Ok(false);
        };
        // A broadcast of a huge shape would take its time, by right.
        if x.len() > 10_000 || grad.len() > 10_000 || theta.len() > 10_000 {
            return Ok(false);
        }
        let mut number = |most: usize| match random.below(15) {
            0 => random.bits() as usize,
            _ => random.below(most),
        };
        let numbers: Vec<i64> = (0..number(40) % 1000).map(|_| number(1000) as i64).collect();
        let mut ends: Vec<usize> = (0..number(4) % 100).map(|_| number(6)).collect();
        if number(3) > 0 {
            let tokens = x.shape().get(1).copied().unwrap_or(0);
            ends.sort_unstable();
            ends.retain(|&end| end <= tokens);
            ends.insert(0, 0);
            ends.push(tokens);
        }
        let grid: Vec<usize> = (0..number(4) % 20).map(|_| number(4)).collect();
        let positions = match number(8) {
            0 => Positions::PerToken(&numbers),
            1 => Positions::PerBatch(&numbers),
            2 => Positions::Grid(&grid),
            _ => Positions::From(number(100) as i64),
        };
        let extra_tokens = if number(3) == 0 { number(4) } else { 0 };
        let sequences = Some(&ends[..]).filter(|_| number(3) == 0);
        let layout = [TokenLayout::TokensHeads, TokenLayout::HeadsTokens][number(2) % 2];
        let rotate = Rotate {
            act,
            layout,
            positions,
            extra_tokens,
            sequences,
            pairing: [Pairing::Half, Pairing::Interleaved][number(2) % 2],
            partial: [Partial::Pairs, Partial::RotaryDim][number(2) % 2],
            pairs: Some(number(5)).filter(|_| number(3) == 0),
        };
        let cosine = Cosine { act, layout, positions, extra_tokens, sequences };
        let softmax = Softmax {
            dim: (number(4) as isize).wrapping_sub(number(4) as isize),
            log: number(2) == 0,
            zero_masked_rows: number(2) == 0,
        };
        let angles = theta.into();
        let (dx, dtheta) = (Some(o), Some(dtheta).filter(|_| number(2) == 0));
        let norm = Normalize {
            center: number(2) == 0,
            eps: [1e-6, 0.0, -1.0, f64::NAN][number(4) % 4],
            groups: number(4),
            ..Normalize::default()
        };
        match number(11) {
            9 => norm.forward_into(NormalizeForward {
                gate: Some(grad).filter(|_| number(2) == 0),
                weight: Some(theta).filter(|_| number(4) == 0),
                residual: if number(2) == 0 { Residual::None } else { Residual::Add(grad) },
                ..NormalizeForward::new(x, dx.unwrap())
            }),
            10 => norm.backward_into(NormalizeBackward {
                gate: Some(grad).filter(|_| number(2) == 0),
                mean: Some(theta).filter(|_| norm.center),
                dbias: dtheta,
                dx,
                ..NormalizeBackward::new(grad, x, theta)
            }),
            0 => Act::Gelu.forward_into(x, dx.unwrap()),
            1 => Act::ALL[number(9) % 9].backward_into(x, grad, dx.unwrap()),
            2 => softmax.forward_into(x, dx.unwrap()),
            3 => softmax.backward_into(x, grad, dx.unwrap()),
            4 => softmax.backward_from_input_into(x, grad, dx.unwrap()),
            5 => rotate.forward_into(x, theta, dx.unwrap()),
            6 => {
                let x = Some(x).filter(|_| number(8) > 0);
                rotate.backward_into(RotateBackward { x, grad, angles, dx, dtheta })
            }
            7 => cosine.forward_into(x, theta, dx.unwrap()),
            _ => {
                let x = Some(x).filter(|_| number(8) > 0);
                cosine.backward_into(CosineBackward { x, grad, angles, dx, dtheta })
            }
        }
    };
    for (i, heap) in heaps.iter().enumerate() {
        assert!(heap.guards_stand(), "operand {i} was written outside");
        let untouched = heap.words.iter().all(|&word| word == 0x7fed_7fed_7fed_7fed);
        let is_output = i >= 3;
        assert!(untouched || (is_output && result.is_ok()), "operand {i} was written");
    }
    result.map(|()| true)
}

fn super_garbage(random: &mut Random) -> (Vec<usize>, Vec<isize>, usize) {
    let rank = random.below(4);
    garbage(random, rank, LEN)
}

proptest! {
    #![proptest_config(cases(50_000))]

    #[test]
    fn whatever_comes_in_no_panic_comes_out(seed: u64) {
        let outcome = catch_unwind(AssertUnwindSafe(|| anything(&mut Random::new(seed))));
        prop_assert!(outcome.is_ok(), "a panic came out");
        if let Ok(Err(error)) = outcome {
            prop_assert!(!error.operator().is_empty() && !error.argument().is_empty());
        }
    }
}

#[test]
fn garbage_is_often_accepted() {
    // Else the test above would test the first check only.
    let accepted =
        (0..2000).filter(|&seed| matches!(anything(&mut Random::new(seed)), Ok(true))).count();
    assert!(accepted > 100, "{accepted} of 2000");
    assert_eq!(poison(DType::BF16), 0x7fed);
}
