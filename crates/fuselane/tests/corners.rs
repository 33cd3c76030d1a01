//! Corners that a review found: each was wrong once.

use fuselane::{
    Act, Angles, Cosine, DType, FusedAct, Normalize, NormalizeBackward, NormalizeForward,
    Positions, Result, Rotate, RotateBackward, Softmax, Theta, View, ViewMut,
};

#[test]
fn an_unneeded_x_still_has_to_fit() -> Result<()> {
    for (wide, narrow) in [(8, 4), (4, 8)] {
        let (x, grad, theta) = (vec![1.0f32; wide], vec![1.0f32; narrow], [1.0f32]);
        let mut dx = vec![f32::NAN; narrow];
        let error = Rotate::default()
            .backward_into(RotateBackward {
                x: Some(View::new(&x, &[1, 1, 1, wide])?),
                grad: View::new(&grad, &[1, 1, 1, narrow])?,
                angles: Angles::Theta(View::new(&theta, &[1, 1])?),
                dx: Some(ViewMut::new(&mut dx, &[1, 1, 1, narrow])?),
                dtheta: None,
            })
            .unwrap_err();
        assert_eq!((error.operator(), error.argument()), ("rotate", "grad"));
        assert!(dx.iter().all(|v| v.is_nan()));
    }
    Ok(())
}

#[test]
fn empty_calls_take_no_memory() -> Result<()> {
    const HUGE: usize = 1 << 40;
    let none: [f32; 0] = [];
    let x = View::new(&none, &[0, HUGE])?;
    assert!(Normalize::layer_norm().forward(x, None)?.is_empty());
    let x = View::new(&none, &[1 << 20, 0, 1 << 20, 1 << 10])?;
    let theta = [0.5f32];
    let theta = View::new(&theta, &[1, 1])?;
    let sequence = Rotate { act: FusedAct::SoftmaxSequence, ..Rotate::default() };
    assert!(sequence.forward(x, theta)?.is_empty());
    let x = View::new(&none, &[0, 1, 1, HUGE])?;
    assert!(Cosine::default().forward(x, theta)?.is_empty());
    // A theta that is long only on paper.
    let x = [1.0f32; 4];
    let long = theta.broadcast(&[1, HUGE])?;
    let o = Cosine::default().forward(View::new(&x, &[1, 1, 2, 2])?, long)?;
    assert_eq!(o.as_slice::<f32>()?[4], 0.5f32.cos());
    // Sizes whose products leave usize.
    let x = View::new(&none, &[1 << 56, 2, 0])?;
    assert!(Softmax::over(0).forward(x)?.is_empty());
    assert_eq!(
        Theta { dim: usize::MAX - 1, ..Theta::default() }.frequencies().unwrap_err().argument(),
        "dim"
    );
    Ok(())
}

#[test]
fn gradients_of_parameters_without_rows_are_zero() -> Result<()> {
    let (none, weight): ([f32; 0], _) = ([], [1.0f32; 3]);
    let (mut dweight, mut dbias) = ([f32::NAN; 3], [f32::NAN; 3]);
    let x = View::new(&none, &[0, 3])?;
    Normalize::rms_norm().backward_into(NormalizeBackward {
        weight: Some(View::new(&weight, &[3])?),
        dweight: Some(ViewMut::new(&mut dweight, &[3])?),
        dbias: Some(ViewMut::new(&mut dbias, &[3])?),
        ..NormalizeBackward::new(x, x, View::new(&none, &[0, 1])?)
    })?;
    assert_eq!((dweight, dbias), ([0.0; 3], [0.0; 3]));
    Ok(())
}

#[test]
fn a_column_does_not_depend_on_its_neighbours() -> Result<()> {
    let x: Vec<f32> = (0..2000).map(|i| ((i * 7919) % 1009) as f32 / 100.0).collect();
    let both = Softmax::over(0).forward(View::new(&x, &[1000, 2])?)?.to_vec::<f32>()?;
    for column in 0..2 {
        let alone: Vec<f32> = x.iter().skip(column).step_by(2).copied().collect();
        let alone = Softmax::over(0).forward(View::new(&alone, &[1000, 1])?)?.to_vec::<f32>()?;
        assert!(alone.iter().zip(both.iter().skip(column).step_by(2)).all(|(a, b)| a == b));
    }
    Ok(())
}

#[test]
fn an_angle_does_not_depend_on_its_neighbours() -> Result<()> {
    let x = [1.0f32, 1.0, 0.0, 0.0];
    let x = View::new(&x, &[1, 1, 1, 4])?;
    let options = Rotate { positions: Positions::From(5000), ..Rotate::default() };
    let first = |theta: [f32; 2]| -> Result<f32> {
        Ok(options.forward(x, View::new(&theta, &[1, 2])?)?.as_slice::<f32>()?[0])
    };
    assert_eq!(first([1e-3, 1e-3])?, first([1e-3, 1e6])?);
    Ok(())
}

#[test]
fn masked_rows_have_no_gradient_whatever_arrives() -> Result<()> {
    let softmax = Softmax { zero_masked_rows: true, ..Softmax::over(-1) };
    let (o, grad) = ([0.0f32; 2], [f32::INFINITY, 1.0]);
    for (dim, shape) in [(-1, [1, 2]), (0, [2, 1])] {
        let softmax = Softmax { dim, ..softmax };
        let dx = softmax.backward(View::new(&o, &shape)?, View::new(&grad, &shape)?)?;
        assert_eq!(dx.as_slice::<f32>()?, [0.0, 0.0]);
    }
    Ok(())
}

#[test]
fn a_gate_of_relu_squared_cuts_any_gradient() -> Result<()> {
    let (x, gate, grad) = ([1.0f32, 2.0], [-1.0f32, 1.0], [f32::INFINITY, 1.0]);
    let norm = Normalize {
        gate_act: Act::ReluSquared,
        gate_position: fuselane::GatePosition::Post,
        ..Normalize::default()
    };
    let [x, gate, grad] =
        [View::new(&x, &[1, 2])?, View::new(&gate, &[1, 2])?, View::new(&grad, &[1, 2])?];
    let (mut o, mut rstd, mut dgate) = ([0.0f32; 2], [0.0f32], [f32::NAN; 2]);
    norm.forward_into(NormalizeForward {
        gate: Some(gate),
        rstd: Some(ViewMut::new(&mut rstd, &[1, 1])?),
        ..NormalizeForward::new(x, ViewMut::new(&mut o, &[1, 2])?)
    })?;
    norm.backward_into(NormalizeBackward {
        gate: Some(gate),
        dgate: Some(ViewMut::new(&mut dgate, &[1, 2])?),
        ..NormalizeBackward::new(grad, x, View::new(&rstd, &[1, 1])?)
    })?;
    assert_eq!(dgate[0], 0.0);
    assert!(dgate[1].is_finite());
    Ok(())
}

#[test]
fn foreign_pointers_have_to_be_aligned() {
    let memory = [0.0f32; 4];
    let odd = memory.as_ptr().cast::<u8>().wrapping_add(1);
    // SAFETY: refused before anything is read.
    let view = unsafe { View::from_raw(odd, DType::F32, &[2], &[1]) };
    assert_eq!(view.unwrap_err().argument(), "pointer");
    // SAFETY: an empty view reads nothing.
    assert!(unsafe { View::from_raw(std::ptr::null(), DType::F32, &[0], &[1]) }.is_ok());
}
