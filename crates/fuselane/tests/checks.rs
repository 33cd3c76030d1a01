//! The `check_` functions: each says what its call says, word for word, and touches no memory.

use fuselane::plan::{self, Pairs};
use fuselane::{
    Act, AngleTable, Angles, Cosine, CosineBackward, DType, Error, FusedAct, Normalize,
    NormalizeBackward, NormalizeForward, Pairing, Partial, Positions, Residual, Result, Rotate,
    RotateBackward, Softmax, TokenLayout, View, ViewMut,
};

const F32: DType = DType::F32;
/// Bytes between the tensors of a call.
const SLOT: usize = 1024;
/// Tensors that a call may have.
const SLOTS: usize = 16;
/// What the memory holds before a call: 1 in f32, nearly.
const FILL: u64 = 0x3f80_3f80_3f80_3f80;

/// Where the tensors of a call lie: in memory, or where there is none.
#[derive(Clone, Copy)]
struct Place(usize);

fn strides(shape: &[usize]) -> Vec<isize> {
    (0..shape.len()).map(|d| shape[d + 1..].iter().product::<usize>() as isize).collect()
}

impl Place {
    fn input(self, slot: usize, dtype: DType, shape: &[usize]) -> View<'static> {
        let at = (self.0 + slot * SLOT) as *const u8;
        // SAFETY: `run` gives places in memory to calls, and others to checks only.
        unsafe { View::from_raw(at, dtype, shape, &strides(shape)) }.unwrap()
    }

    fn output(self, slot: usize, dtype: DType, shape: &[usize]) -> ViewMut<'static> {
        let at = (self.0 + slot * SLOT) as *mut u8;
        // SAFETY: as for `input`; no call gets one slot twice, unless it refuses that.
        unsafe { ViewMut::from_raw(at, dtype, shape, &strides(shape)) }.unwrap()
    }
}

/// Runs the check in memory, which has to stay as it is, and at a made-up address; then the call
/// itself. All have to say the same.
fn run<T: PartialEq + std::fmt::Debug>(
    check: impl Fn(Place) -> Result<T>,
    call: impl Fn(Place) -> Result<()>,
) -> Result<T> {
    let mut memory = vec![FILL; SLOTS * SLOT / 8];
    let place = Place(memory.as_mut_ptr() as usize);
    let checked = check(place);
    assert!(memory.iter().all(|&word| word == FILL), "a check wrote");
    assert_eq!(check(Place(0x10_0000)), checked);
    assert_eq!(call(place), checked.as_ref().map(drop).map_err(Error::clone));
    checked
}

/// The same for a call that has to be refused; gives the argument at fault.
fn fault<T: PartialEq + std::fmt::Debug>(
    check: impl Fn(Place) -> Result<T>,
    call: impl Fn(Place) -> Result<()>,
) -> &'static str {
    run(check, call).unwrap_err().argument()
}

/// The tensors of a call, two of which are read.
type Three = (View<'static>, View<'static>, ViewMut<'static>);

/// [`run`] for functions of some options and of such tensors.
fn run_three<O: Copy, T: PartialEq + std::fmt::Debug>(
    options: O,
    views: impl Fn(Place) -> Three,
    check: impl Fn(O, View<'static>, View<'static>, ViewMut<'static>) -> Result<T>,
    call: impl Fn(O, View<'static>, View<'static>, ViewMut<'static>) -> Result<()>,
) -> Result<T> {
    let checked = |(a, b, output): Three| check(options, a, b, output);
    let called = |(a, b, output): Three| call(options, a, b, output);
    run(|at| checked(views(at)), |at| called(views(at)))
}

#[test]
fn act() {
    let forward = |act: Act, x: (usize, DType, &[usize]), o: (usize, DType, &[usize])| {
        run(
            |at| act.check_forward(at.input(x.0, x.1, x.2), at.output(o.0, o.1, o.2)),
            |at| act.forward_into(at.input(x.0, x.1, x.2), at.output(o.0, o.1, o.2)),
        )
    };
    let x = (0, F32, &[2usize, 3][..]);
    forward(Act::Silu, x, (1, F32, &[2, 3])).unwrap();
    forward(Act::Silu, (0, F32, &[]), (1, F32, &[])).unwrap();
    for wrong in [(1, F32, &[3usize, 2][..]), (1, DType::BF16, &[2, 3]), (0, F32, &[2, 3])] {
        assert_eq!(forward(Act::Silu, x, wrong).unwrap_err().argument(), "o");
    }
    let turned = |at: Place| at.input(0, F32, &[3, 2]).permute(&[1, 0]).unwrap();
    let wrong = fault(
        |at| Act::Relu.check_forward(turned(at), at.output(1, F32, &[2, 3])),
        |at| Act::Relu.forward_into(turned(at), at.output(1, F32, &[2, 3])),
    );
    assert_eq!(wrong, "x");

    for act in [Act::None, Act::Gelu] {
        // Strides are those of every second element.
        let spread = |at: Place| {
            let at = (at.0 + SLOT) as *mut u8;
            // SAFETY: as for `Place::output`.
            unsafe { ViewMut::from_raw(at, F32, &[4, 2], &[4, 2]) }.unwrap()
        };
        let in_place =
            run(|at| act.check_in_place(spread(at)), |at| act.forward_in_place(spread(at)));
        assert_eq!(in_place.is_ok(), act == Act::None);
        let dense = |at: Place| at.output(0, F32, &[4, 2]);
        run(|at| act.check_in_place(dense(at)), |at| act.forward_in_place(dense(at))).unwrap();
    }

    for (act, grad, dx) in [
        (Act::Tanh, &[4usize, 5][..], 2),
        (Act::Tanh, &[5, 4], 2),
        (Act::Tanh, &[4, 5], 1),
        (Act::Gelu, &[4, 5], 2),
    ] {
        let views = |at: Place| {
            (at.input(0, F32, &[4, 5]), at.input(1, F32, grad), at.output(dx, F32, &[4, 5]))
        };
        let from_input = run_three(act, views, Act::check_backward, Act::backward_into);
        let (check, call) = (Act::check_backward_from_output, Act::backward_from_output_into);
        let from_output = run_three(act, views, check, call);
        assert_eq!(from_input.is_ok(), grad == [4, 5] && dx == 2);
        assert_eq!(from_output.is_ok(), act == Act::Tanh && from_input.is_ok());
    }
}

#[test]
fn softmax() {
    let shape = [2, 3, 4];
    for (dim, given) in [(0, Some(0)), (-1, Some(2)), (-2, Some(1)), (3, None), (-4, None)] {
        for (grad_dtype, out) in [(F32, 2), (DType::F64, 2), (F32, 0)] {
            let softmax = Softmax::over(dim);
            let forward = run(
                |at| softmax.check_forward(at.input(0, F32, &shape), at.output(out, F32, &shape)),
                |at| softmax.forward_into(at.input(0, F32, &shape), at.output(out, F32, &shape)),
            );
            let views = |at: Place| {
                let (x, grad) = (at.input(0, F32, &shape), at.input(1, grad_dtype, &shape));
                (x, grad, at.output(out, F32, &shape))
            };
            let (check, call) = (Softmax::check_backward, Softmax::backward_into);
            let backward = run_three(&softmax, views, check, call);
            let (check, call) =
                (Softmax::check_backward_from_input, Softmax::backward_from_input_into);
            let from_input = run_three(&softmax, views, check, call);
            assert_eq!(forward.ok(), given.filter(|_| out == 2));
            let backward_given = given.filter(|_| out == 2 && grad_dtype == F32);
            assert_eq!((backward.ok(), from_input.ok()), (backward_given, backward_given));
        }
    }
    let no_dimensions = fault(
        |at| Softmax::over(0).check_forward(at.input(0, F32, &[]), at.output(1, F32, &[])),
        |at| Softmax::over(0).forward_into(at.input(0, F32, &[]), at.output(1, F32, &[])),
    );
    assert_eq!(no_dimensions, "x");
    // The dimension is told as the caller has it, wherever the contiguous one lies.
    let turned = |at: Place| {
        let order = [2, 0, 1];
        let x = at.input(0, F32, &shape).permute(&order).unwrap();
        (x, at.output(1, F32, &shape).permute(&order).unwrap())
    };
    for dim in 0..3 {
        let softmax = Softmax::over(dim);
        let checked = run(
            |at| softmax.check_forward(turned(at).0, turned(at).1),
            |at| softmax.forward_into(turned(at).0, turned(at).1),
        );
        assert_eq!(checked, Ok(dim as usize));
    }
}

/// The call that `base` makes, with this change.
fn changed<C>(base: impl Fn(Place) -> C, change: fn(Place, &mut C)) -> impl Fn(Place) -> C {
    move |at| {
        let mut call = base(at);
        change(at, &mut call);
        call
    }
}

type Change<T> = (&'static str, fn(Place, &mut T));

#[test]
fn normalize_forward() {
    let layer = Normalize::layer_norm();
    let base = |at: Place| NormalizeForward {
        weight: Some(at.input(2, DType::BF16, &[8])),
        bias: Some(at.input(3, DType::F64, &[8])),
        gate: Some(at.input(4, F32, &[3, 8])),
        residual: Residual::AddInto(at.input(5, F32, &[3, 8]), at.output(6, F32, &[3, 8])),
        rstd: Some(at.output(7, F32, &[3, 1])),
        mean: Some(at.output(8, F32, &[3, 1])),
        ..NormalizeForward::new(at.input(0, F32, &[3, 8]), at.output(1, F32, &[3, 8]))
    };
    run(|at| layer.check_forward(base(at)), |at| layer.forward_into(base(at))).unwrap();
    let changes: [Change<NormalizeForward<'static>>; 8] = [
        ("weight", |at, call| call.weight = Some(at.input(2, F32, &[7]))),
        ("bias", |at, call| call.bias = Some(at.input(3, F32, &[8, 1]))),
        ("gate", |at, call| call.gate = Some(at.input(4, DType::F16, &[3, 8]))),
        ("o", |at, call| call.o = at.output(2, F32, &[3, 8])),
        ("o", |at, call| call.o = at.output(0, F32, &[3, 8])),
        ("rstd", |at, call| call.rstd = Some(at.output(7, F32, &[3, 8]))),
        ("mean", |at, call| call.mean = Some(at.output(8, DType::F64, &[3, 1]))),
        ("residual", |at, call| {
            call.residual = Residual::AddInPlace(at.output(6, F32, &[8, 3]));
        }),
    ];
    for (argument, change) in changes {
        let changed = changed(&base, change);
        let wrong =
            fault(|at| layer.check_forward(changed(at)), |at| layer.forward_into(changed(at)));
        assert_eq!(wrong, argument);
    }
    for (argument, options) in [
        ("mean", Normalize { center: false, ..layer }),
        ("eps", layer.with_eps(f64::NAN)),
        ("scale", Normalize { scale: f64::INFINITY, ..layer }),
        ("groups", layer.with_groups(3)),
        ("groups", layer.with_groups(0)),
    ] {
        let wrong =
            fault(|at| options.check_forward(base(at)), |at| options.forward_into(base(at)));
        assert_eq!(wrong, argument);
    }
}

#[test]
fn normalize_backward() {
    let layer = Normalize::layer_norm();
    let base = |at: Place| {
        let [grad, x, gate] = [0, 1, 2].map(|slot| at.input(slot, F32, &[3, 8]));
        NormalizeBackward {
            gate: Some(gate),
            weight: Some(at.input(3, DType::BF16, &[8])),
            mean: Some(at.input(5, F32, &[3, 1])),
            dx: Some(at.output(6, F32, &[3, 8])),
            dresidual: Some(at.output(7, F32, &[3, 8])),
            dgate: Some(at.output(8, F32, &[3, 8])),
            dweight: Some(at.output(9, DType::BF16, &[8])),
            dbias: Some(at.output(10, DType::F64, &[8])),
            ..NormalizeBackward::new(grad, x, at.input(4, F32, &[3, 1]))
        }
    };
    run(|at| layer.check_backward(base(at)), |at| layer.backward_into(base(at))).unwrap();
    let changes: [Change<NormalizeBackward<'static>>; 10] = [
        ("grad", |at, call| call.grad = at.input(0, F32, &[3, 4])),
        ("dgate", |_, call| call.gate = None),
        ("dweight", |_, call| call.weight = None),
        ("mean", |_, call| call.mean = None),
        ("rstd", |at, call| call.rstd = at.input(4, F32, &[3])),
        ("dweight", |at, call| call.dweight = Some(at.output(9, F32, &[3]))),
        ("dbias", |at, call| call.dbias = Some(at.output(9, F32, &[8]))),
        ("dbias", |at, call| call.dbias = Some(at.output(5, F32, &[8]))),
        ("dx", |at, call| call.dx = Some(at.output(6, DType::F64, &[3, 8]))),
        ("dresidual", |at, call| call.dresidual = Some(at.output(6, F32, &[3, 8]))),
    ];
    for (argument, change) in changes {
        let changed = changed(&base, change);
        let wrong =
            fault(|at| layer.check_backward(changed(at)), |at| layer.backward_into(changed(at)));
        assert_eq!(wrong, argument);
    }
}

#[test]
fn rotate_forward() {
    let shape = [2, 5, 3, 10];
    let check = |options: Rotate<'_>, theta: (DType, &[usize]), o: (usize, DType, &[usize])| {
        let views = |at: Place| {
            (
                at.input(0, DType::BF16, &shape),
                at.input(2, theta.0, theta.1),
                at.output(o.0, o.1, o.2),
            )
        };
        run_three(
            &options,
            views,
            |options, x, theta, o| options.check_forward(x, theta.into(), o),
            |options, x, theta, o| options.forward_into(x, theta, o),
        )
    };
    let (plain, o) = (Rotate::default(), (1, DType::BF16, &shape[..]));
    let encoding = check(plain, (DType::F64, &[3, 2]), o).unwrap();
    assert_eq!(encoding.pairs, Some(Pairs { count: 2, second: Some(5) }));
    let split = encoding.split;
    assert_eq!((split.theta_heads, split.theta_columns, split.per_axis), (3, 2, 2));
    let plan::Encoding { batch, tokens, heads, features, output_features, .. } = encoding;
    assert_eq!([batch, tokens, heads, features, output_features], [2, 5, 3, 10, 10]);
    assert!(!encoding.is_empty());
    let second = |pairing, partial| {
        let options = Rotate { pairing, partial, pairs: Some(4), ..plain };
        check(options, (F32, &[1, 1]), o).unwrap().pairs.unwrap().second
    };
    assert_eq!(second(Pairing::Half, Partial::RotaryDim), Some(4));
    assert_eq!(second(Pairing::Interleaved, Partial::Pairs), None);
    let heads_first = Rotate { layout: TokenLayout::HeadsTokens, ..plain };
    let encoding = check(heads_first, (F32, &[1, 5]), o).unwrap();
    assert_eq!((encoding.tokens, encoding.heads), (3, 5));

    let theta = (F32, &[3usize, 5][..]);
    let at = |positions| Rotate { positions, ..plain };
    let softmax = FusedAct::SoftmaxSequence;
    let packed = |ends| Rotate { act: softmax, sequences: Some(ends), ..plain };
    check(at(Positions::Grid(&[5, 1])), theta, o).unwrap();
    check(packed(&[0, 2, 2, 5]), theta, o).unwrap();
    for (argument, options, theta, o) in [
        ("o", plain, theta, (1, DType::BF16, &[2usize, 5, 3, 9][..])),
        ("o", plain, theta, (1, F32, &shape)),
        ("o", packed(&[0, 2, 5]), theta, (1, F32, &shape)),
        ("o", plain, theta, (0, DType::BF16, &shape)),
        ("o", plain, theta, (2, DType::BF16, &shape)),
        ("theta", plain, (F32, &[2, 5]), o),
        ("theta", plain, (F32, &[5]), o),
        ("theta", plain, (F32, &[1, 6]), o),
        ("pairs", Rotate { pairs: Some(6), ..plain }, theta, o),
        ("positions", at(Positions::PerToken(&[1, 2, 3])), theta, o),
        ("grid", at(Positions::Grid(&[2, 2])), theta, o),
        ("sequences", packed(&[0, 4]), theta, o),
        // What is wrong with the angles comes before what is wrong with the dtype.
        ("theta", plain, (F32, &[2, 5]), (1, F32, &shape)),
    ] {
        assert_eq!(check(options, theta, o).unwrap_err().argument(), argument);
    }
}

#[test]
fn rotate_backward() {
    let shape = [1, 4, 2, 6];
    let plain = Rotate::default();
    let silu = Rotate { act: Act::Silu.into(), ..plain };
    let base = |at: Place| RotateBackward {
        x: Some(at.input(0, F32, &shape)),
        grad: at.input(1, F32, &shape),
        angles: at.input(2, F32, &[2, 3]).into(),
        dx: Some(at.output(3, F32, &shape)),
        dtheta: Some(at.output(4, DType::BF16, &[2, 3])),
    };
    let changes: [Change<RotateBackward<'static>>; 10] = [
        ("", |_, _| {}),
        ("x", |_, call| call.x = None),
        ("grad", |at, call| call.grad = at.input(1, F32, &[1, 4, 2, 8])),
        ("grad", |at, call| call.grad = at.input(1, DType::F16, &[1, 4, 2, 6])),
        ("dx", |at, call| call.dx = Some(at.output(3, DType::F16, &[1, 4, 2, 6]))),
        ("dx", |at, call| call.dx = Some(at.output(0, F32, &[1, 4, 2, 6]))),
        ("dtheta", |at, call| call.dtheta = Some(at.output(4, F32, &[1, 3]))),
        ("dtheta", |at, call| call.dtheta = Some(at.output(3, F32, &[2, 3]))),
        ("theta", |at, call| call.angles = at.input(2, F32, &[4, 3]).into()),
        // Without a gradient of theta, x may be left out if there is no activation.
        ("x", |_, call| (call.x, call.dtheta) = (None, None)),
    ];
    for (argument, change) in changes {
        for options in [plain, silu] {
            let changed = changed(&base, change);
            let checked = run(
                |at| options.check_backward(changed(at)),
                |at| options.backward_into(changed(at)),
            );
            let fine =
                argument.is_empty() || (options == plain && changed(Place(SLOT)).dtheta.is_none());
            match checked {
                Ok(encoding) => assert!(fine && encoding.features == 6 && encoding.tokens == 4),
                Err(error) => assert!(!fine && error.argument() == argument, "{error}"),
            }
        }
    }
    // Nothing is asked for, and theta is not looked at.
    let nothing = |at: Place| RotateBackward {
        x: None,
        dx: None,
        dtheta: None,
        angles: at.input(2, F32, &[7, 2]).into(),
        ..base(at)
    };
    let checked =
        run(|at| plain.check_backward(nothing(at)), |at| plain.backward_into(nothing(at)));
    assert!(checked.unwrap().is_empty());
    // With x too, which is all that says what the call is about.
    let only_x = |at: Place| RotateBackward { dx: None, dtheta: None, ..base(at) };
    assert!(base(Place(SLOT)).x.is_some());
    run(|at| plain.check_backward(only_x(at)), |at| plain.backward_into(only_x(at))).unwrap();
    // Only the statistics of a call without tokens are left: dtheta is zero.
    let none = |at: Place| RotateBackward {
        x: Some(at.input(0, F32, &[1, 0, 2, 6])),
        grad: at.input(1, F32, &[1, 0, 2, 6]),
        dx: None,
        ..base(at)
    };
    let checked = run(|at| plain.check_backward(none(at)), |at| plain.backward_into(none(at)));
    assert!(checked.unwrap().is_empty());
}

#[test]
fn cosine() {
    let (x, o) = ([1, 2, 4, 3], [1, 2, 4, 6]);
    let options = Cosine::default();
    let forward = |theta: &[usize], o: &[usize]| {
        let views =
            |at: Place| (at.input(0, F32, &x), at.input(2, F32, theta), at.output(1, F32, o));
        run_three(
            &options,
            views,
            |options, x, theta, o| options.check_forward(x, theta.into(), o),
            |options, x, theta, o| options.forward_into(x, theta, o),
        )
    };
    let encoding = forward(&[2, 3], &o).unwrap();
    assert_eq!((encoding.features, encoding.output_features, encoding.pairs), (3, 6, None));
    assert_eq!(forward(&[2, 2], &o).unwrap_err().argument(), "theta");
    assert_eq!(forward(&[2, 3], &x).unwrap_err().argument(), "o");

    let backward = |grad: &[usize], dx: DType, dtheta: &[usize]| {
        let call = |at: Place| CosineBackward {
            x: Some(at.input(0, F32, &x)),
            grad: at.input(1, F32, grad),
            angles: at.input(2, F32, &[2, 3]).into(),
            dx: Some(at.output(3, dx, &x)),
            dtheta: Some(at.output(4, F32, dtheta)),
        };
        run(|at| options.check_backward(call(at)), |at| options.backward_into(call(at)))
    };
    assert_eq!(backward(&o, F32, &[2, 3]).unwrap(), encoding);
    assert_eq!(backward(&x, F32, &[2, 3]).unwrap_err().argument(), "grad");
    assert_eq!(backward(&o, DType::BF16, &[2, 3]).unwrap_err().argument(), "dx");
    assert_eq!(backward(&o, F32, &[2, 1]).unwrap_err().argument(), "dtheta");
}

#[test]
fn tables() {
    let theta = [1.0f32, 0.5, 0.25, 0.125];
    let theta = View::new(&theta, &[2, 2]).unwrap();
    let table = AngleTable::for_sequence(theta, 2, -1..4, F32).unwrap();
    let check = |tokens: usize, dtype: DType| {
        let shape = [1, tokens, 2, 4];
        run(
            |at| {
                let (x, o) = (at.input(0, dtype, &shape), at.output(1, dtype, &shape));
                Rotate::default().check_forward(x, Angles::from(&table), o)
            },
            |at| {
                let (x, o) = (at.input(0, dtype, &shape), at.output(1, dtype, &shape));
                Rotate::default().forward_into(x, &table, o)
            },
        )
    };
    assert_eq!(check(4, F32).unwrap().split, table.split());
    assert_eq!(check(5, F32).unwrap_err().argument(), "angle table");
    assert_eq!(check(4, DType::F64).unwrap_err().argument(), "angle table");

    // What another backend finds in a grid's table is what the formula says.
    let grid = AngleTable::for_grid(theta, 3, &[2, 3], DType::BF16).unwrap();
    let (split, theta) = (grid.split(), theta.to_f64_vec());
    let (cosines, sines) = (grid.cosines_f32().unwrap(), grid.sines_f32().unwrap());
    for token in 0..6 {
        let at = plan::coordinates(Positions::Grid(&[2, 3]), 0, None, 6, 0, token);
        for head in 0..2 {
            for (axis, entry) in grid.axes().iter().enumerate() {
                let row = (at[axis] - entry.start) as usize * split.theta_heads + head;
                for (k, angle) in split.range(axis).enumerate() {
                    let theta = theta[head * split.theta_columns + split.column(angle)];
                    let angle = at[axis] as f64 * theta;
                    let i = entry.first + row * entry.width + k;
                    assert!((f64::from(cosines[i]) - angle.cos()).abs() < 1e-6);
                    assert!((f64::from(sines[i]) - angle.sin()).abs() < 1e-6);
                }
            }
        }
    }
    let wide = AngleTable::for_grid(View::new(&[1.0f32], &[1, 1]).unwrap(), 1, &[2], DType::F64);
    let wide = wide.unwrap();
    assert_eq!((wide.cosines_f32(), wide.sines_f32()), (None, None));
}
