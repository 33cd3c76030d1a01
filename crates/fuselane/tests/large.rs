//! Tensors above 2^31 elements: the last rows of each have the bits of the same rows alone.

use fuselane::{
    Act, DType, Normalize, NormalizeForward, Rotate, Softmax, TokenLayout, View, ViewMut,
};
use half::bf16;

/// Rows of 4096; 2^31 elements and some more.
const D: usize = 4096;
const ROWS: usize = (1 << 31) / D + 777;
const SHAPE: [usize; 2] = [ROWS, D];

/// Numbers that differ from row to row, and that a row past 2^31 (or 2^32 bytes) cannot be
/// mistaken for one before it.
fn fill(x: &mut [bf16]) {
    for (i, row) in x.chunks_mut(D).enumerate() {
        let mut state = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for value in row {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *value = bf16::from_f32((state >> 40) as f32 / (1 << 22) as f32 - 2.0);
        }
    }
}

/// Rows from the start, around the places where 31 and 32 bits end, and at the end.
fn places() -> impl Iterator<Item = usize> {
    let edges = [0, (1 << 30) / D, (1 << 31) / D, ROWS - 1];
    edges.into_iter().flat_map(|row| row.saturating_sub(2)..(row + 3).min(ROWS))
}

#[test]
#[ignore = "needs 10 GiB; cargo xtask test --large"]
fn more_than_31_bits_of_elements() {
    let mut x = vec![bf16::ZERO; ROWS * D];
    fill(&mut x);
    let mut o = vec![bf16::ZERO; ROWS * D];
    let x = View::new(&x, &SHAPE).unwrap();
    assert!(x.len() > 1 << 31 && x.dtype() == DType::BF16);
    let row = |r: usize| x.narrow(0, r, 1).unwrap();

    let mut compare = |what: &str,
                       shape: &[usize],
                       run: &dyn Fn(ViewMut<'_>),
                       alone: &dyn Fn(usize) -> Vec<bf16>| {
        o.fill(bf16::NAN);
        run(ViewMut::new(&mut o, shape).unwrap());
        for r in places() {
            let (got, want) = (&o[r * D..(r + 1) * D], alone(r));
            let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{what}: row {r} of {ROWS}");
        }
        // Every page was written.
        assert!(o.iter().step_by(2048).all(|v| !v.is_nan()), "{what}: not all of o was written");
    };

    compare("act", &SHAPE, &|o| Act::Silu.forward_into(x, o).unwrap(), &|r| {
        Act::Silu.forward(row(r)).unwrap().to_vec().unwrap()
    });
    let rms = Normalize::rms_norm();
    compare(
        "rms norm",
        &SHAPE,
        &|o| rms.forward_into(NormalizeForward::new(x, o)).unwrap(),
        &|r| rms.forward(row(r), None).unwrap().to_vec().unwrap(),
    );
    let softmax = Softmax::over(-1);
    compare("softmax", &SHAPE, &|o| softmax.forward_into(x, o).unwrap(), &|r| {
        softmax.forward(row(r)).unwrap().to_vec().unwrap()
    });
    // A token for each row, of 32 heads.
    let theta: Vec<f32> = (0..64).map(|k| 0.5f32.powi(k / 8)).collect();
    let theta = View::new(&theta, &[1, 64]).unwrap();
    let tokens = [1, ROWS, 32, 128];
    let heads = x.reshape(&tokens).unwrap();
    compare(
        "rotate",
        &tokens,
        &|o| Rotate::default().forward_into(heads, theta, o).unwrap(),
        &|r| {
            let rotate =
                Rotate { positions: fuselane::Positions::From(r as i64), ..Rotate::default() };
            rotate.forward(heads.narrow(1, r, 1).unwrap(), theta).unwrap().to_vec().unwrap()
        },
    );
    // The same memory as one head after the other, each of tokens 128 features long.
    let long = ROWS * 32;
    let one_head = [1, 1, long, 128];
    let heads = x.reshape(&one_head).unwrap();
    let rotate = Rotate { layout: TokenLayout::HeadsTokens, ..Rotate::default() };
    compare(
        "rotate b h n d",
        &one_head,
        &|o| rotate.forward_into(heads, theta, o).unwrap(),
        &|r| {
            let rotate = Rotate { positions: fuselane::Positions::From(32 * r as i64), ..rotate };
            rotate.forward(heads.narrow(2, 32 * r, 32).unwrap(), theta).unwrap().to_vec().unwrap()
        },
    );
}
