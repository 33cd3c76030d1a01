//! What follows from the formulas: facts that hold whatever the numbers are.

mod common;

use common::{Input, Layout, Memory, each_isa, rounded};
use fuselane::reference::{Random, ulp};
use fuselane::{
    Act, AngleTable, Angles, Buffer, Cosine, CosineBackward, DType, FusedAct, GatePosition,
    Normalize, NormalizeBackward, NormalizeForward, Pairing, Partial, Positions, Residual, Rotate,
    RotateBackward, Softmax, TokenLayout, View, ViewMut,
};

fn bits(buffer: &Buffer) -> Vec<u64> {
    buffer.view().to_f64_vec().into_iter().map(f64::to_bits).collect()
}

fn values(buffer: &Buffer) -> Vec<f64> {
    buffer.view().to_f64_vec()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A dense tensor of a dtype.
struct Tensor {
    memory: Memory,
    layout: Layout,
}

impl Tensor {
    fn new(dtype: DType, shape: &[usize], values: &[f64]) -> Self {
        let layout = Layout::dense(shape);
        Self { memory: Input::new(dtype, shape, values).memory(&layout), layout }
    }

    fn random(random: &mut Random, dtype: DType, shape: &[usize]) -> Self {
        let values = random.normals(shape.iter().product());
        Self::new(dtype, shape, &values)
    }

    fn view(&self) -> View<'_> {
        self.memory.view(&self.layout)
    }

    fn values(&self) -> Vec<f64> {
        self.view().to_f64_vec()
    }
}

/// What rounding to a dtype does to a number near 1, or f32 arithmetic if that is coarser.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1.2e-7,
        DType::F16 => 9.8e-4,
        DType::BF16 => 7.9e-3,
        DType::F64 => 2.3e-16,
    }
}

#[test]
fn rotation_keeps_norms() {
    let random = &mut Random::new(1);
    for dtype in DType::ALL {
        for pairing in [Pairing::Half, Pairing::Interleaved] {
            let (n, d) = (37, 26);
            let x = Tensor::random(random, dtype, &[2, n, 3, d]);
            let theta = Tensor::new(DType::F32, &[1, d / 2], &random.uniforms(d / 2, 0.0, 2.0));
            let rotate =
                Rotate { pairing, positions: Positions::From(100_000), ..Rotate::default() };
            each_isa(|isa| {
                let o = values(&rotate.forward(x.view(), theta.view()).unwrap());
                for (x, o) in x.values().chunks(d).zip(o.chunks(d)) {
                    let (before, after) = (dot(x, x).sqrt(), dot(o, o).sqrt());
                    assert!(
                        (before - after).abs() <= 20.0 * unit(dtype).max(2e-16) * before,
                        "{isa} {dtype} {pairing:?}: {before} and {after}"
                    );
                }
            });
        }
    }
}

#[test]
fn rotated_products_depend_on_the_difference_of_positions() {
    let random = &mut Random::new(2);
    // In f64, where the angles' own rounding does not hide a mistake.
    let d = 18;
    let [q, k] = [0, 1].map(|_| Tensor::random(random, DType::F64, &[1, 1, 1, d]));
    let theta = Tensor::new(DType::F64, &[1, d / 2], &random.uniforms(d / 2, 0.0, 2.0));
    each_isa(|isa| {
        for pairing in [Pairing::Half, Pairing::Interleaved] {
            let at = |x: &Tensor, position: i64| {
                let positions = Positions::From(position);
                let rotate = Rotate { pairing, positions, ..Rotate::default() };
                values(&rotate.forward(x.view(), theta.view()).unwrap())
            };
            for difference in [0, 1, 7, -20] {
                let first = dot(&at(&q, 0), &at(&k, difference));
                for position in [1, 5, 1000, -300] {
                    let other = dot(&at(&q, position), &at(&k, position + difference));
                    assert!((first - other).abs() < 1e-9, "{isa} {pairing:?}: {first} {other}");
                }
                let elsewhere = dot(&at(&q, 0), &at(&k, difference + 1));
                assert!((first - elsewhere).abs() > 1e-3, "the position plays no part");
            }
        }
    });
}

#[test]
fn rotated_products_on_a_grid_depend_on_the_differences_along_each_axis() {
    products_on_grids(6, |x, theta, grid| {
        let rotate = Rotate { positions: Positions::Grid(grid), ..Rotate::default() };
        values(&rotate.forward(x, theta).unwrap())
    });
}

#[test]
fn cosine_products_depend_on_the_differences_along_each_axis() {
    products_on_grids(12, |x, theta, grid| {
        let layout = TokenLayout::TokensHeads;
        let cosine = Cosine { layout, positions: Positions::Grid(grid), ..Cosine::default() };
        values(&cosine.forward(x, theta).unwrap())
    });
}

/// The same query and key, of 12 features, on every cell of a grid, encoded by `count` angles:
/// products of equal differences agree.
fn products_on_grids(count: usize, encode: impl Fn(View<'_>, View<'_>, &[usize]) -> Vec<f64>) {
    let random = &mut Random::new(3);
    for grid in [&[7][..], &[4, 5], &[3, 2, 4]] {
        let (cells, frequencies) = (grid.iter().product::<usize>(), count / grid.len());
        let [q, k] = [0, 1].map(|_| {
            let row = random.normals(12);
            Tensor::new(DType::F64, &[1, cells, 1, 12], &row.repeat(cells))
        });
        let theta: Vec<f64> = (0..frequencies).map(|i| 0.3 + 0.17 * i as f64).collect();
        let theta = Tensor::new(DType::F64, &[1, frequencies], &theta);
        let coordinates = |mut cell: usize| {
            let mut at: Vec<i64> = vec![0; grid.len()];
            for (at, &size) in at.iter_mut().zip(grid).rev() {
                *at = (cell % size) as i64;
                cell /= size;
            }
            at
        };
        each_isa(|isa| {
            let [q, k] = [&q, &k].map(|x| encode(x.view(), theta.view(), grid));
            let width = q.len() / cells;
            let mut products: Vec<(Vec<i64>, f64)> = Vec::new();
            let mut repeated = 0;
            for i in 0..cells {
                for j in 0..cells {
                    let product = dot(&q[i * width..][..width], &k[j * width..][..width]);
                    let (a, b) = (coordinates(i), coordinates(j));
                    let difference: Vec<i64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
                    match products.iter().find(|(other, _)| *other == difference) {
                        Some((_, first)) => {
                            repeated += 1;
                            assert!(
                                (first - product).abs() < 1e-12,
                                "{isa} {grid:?} {difference:?}"
                            );
                        }
                        None => products.push((difference, product)),
                    }
                }
            }
            assert!(repeated > cells);
            // Going one step along any axis changes the product.
            let at = |difference: &[i64]| {
                products.iter().find(|(other, _)| other == difference).map(|(_, product)| *product)
            };
            let origin = vec![0; grid.len()];
            for axis in 0..grid.len() {
                let mut step = origin.clone();
                step[axis] = 1;
                let change = at(&step).unwrap() - at(&origin).unwrap();
                assert!(change.abs() > 1e-3, "{isa} {grid:?}: axis {axis} plays no part");
            }
        });
    }
}

#[test]
fn angles_hold_for_every_position() {
    // A pair (1, 0) rotates to (cos a, sin a).
    let random = &mut Random::new(4);
    let mut positions: Vec<i64> = (0..=24).flat_map(|e| [(1 << e) - 1, 1 << e]).collect();
    positions.extend((0..4000).map(|_| random.below(1 << 24) as i64));
    positions.extend([(1 << 31) - 1, 1 << 31, (1 << 31) + 12345, (1 << 33) + 7, 1 << 40, i64::MAX]);
    positions.extend(positions.clone().iter().map(|p| -p));
    let n = positions.len();
    for theta in [1.0f32, 0.5, 0.1, 1e-4, std::f32::consts::PI, 0.749_894_2, 1e3, -0.3] {
        let x = [1.0f32, 0.0].repeat(n);
        let options = Rotate { positions: Positions::PerToken(&positions), ..Rotate::default() };
        let thetas = [theta];
        let (x, thetas) =
            (View::new(&x, &[1, n, 1, 2]).unwrap(), View::new(&thetas, &[1, 1]).unwrap());
        each_isa(|isa| {
            let o = options.forward(x, thetas).unwrap();
            for (o, &position) in o.as_slice::<f32>().unwrap().chunks(2).zip(&positions) {
                let (sin, cos) = f64::from(position as f32 * theta).sin_cos();
                let error = (f64::from(o[0]) - cos).abs().max((f64::from(o[1]) - sin).abs());
                assert!(error <= 1e-6, "{isa}: position {position}, theta {theta}: {error:e}");
            }
        });
    }
}

#[test]
fn sixteen_bit_activations_have_f32_angles() {
    // bf16 cannot tell position 257 from 256; the angle has to.
    for dtype in [DType::BF16, DType::F16] {
        let n = 3000;
        let x = Tensor::new(dtype, &[1, n, 1, 2], &[1.0, 0.0].repeat(n));
        let theta = [0.7f32];
        each_isa(|isa| {
            let rotate = Rotate { positions: Positions::From(60_000), ..Rotate::default() };
            let o = rotate.forward(x.view(), View::new(&theta, &[1, 1]).unwrap()).unwrap();
            for (t, o) in values(&o).chunks(2).enumerate() {
                let (sin, cos) = f64::from((60_000 + t) as f32 * 0.7f32).sin_cos();
                assert!((o[0] - rounded(dtype, cos)).abs() <= unit(dtype), "{isa} {t}");
                assert!((o[1] - rounded(dtype, sin)).abs() <= unit(dtype), "{isa} {t}");
            }
        });
    }
}

fn acts() -> [FusedAct; 3] {
    [Act::Silu.into(), FusedAct::SoftmaxFeatures, FusedAct::SoftmaxSequence]
}

#[test]
fn a_table_gives_what_theta_gives() {
    let random = &mut Random::new(5);
    for dtype in DType::ALL {
        for (heads, act) in [1, 3].into_iter().zip(acts()) {
            let (n, d) = (24, 22);
            let x = Tensor::random(random, dtype, &[2, n, 3, d]);
            let grad = Tensor::random(random, dtype, &[2, n, 3, 2 * d]);
            each_isa(|isa| {
                let what = format!("{isa} {dtype} {act}");
                // A sequence from -5 on, in a table that has room to both sides.
                let theta = Tensor::random(&mut Random::new(6), DType::F32, &[heads, d / 2]);
                let table = AngleTable::for_sequence(theta.view(), d / 2, -9..40, dtype).unwrap();
                for pairing in [Pairing::Half, Pairing::Interleaved] {
                    let rotate = Rotate {
                        act,
                        pairing,
                        positions: Positions::From(-5),
                        ..Rotate::default()
                    };
                    same_forward_and_backward(&what, theta.view(), &table, |angles| {
                        let o = rotate.forward(x.view(), angles).unwrap();
                        let half = grad.view().narrow(3, 0, d).unwrap();
                        let dx = rotate.backward(Some(x.view()), half, angles).unwrap();
                        [bits(&o), bits(&dx)]
                    });
                }
                // A grid.
                let theta = Tensor::random(&mut Random::new(7), DType::F32, &[heads, d / 2]);
                let table = AngleTable::for_grid(theta.view(), d, &[4, 6], dtype).unwrap();
                let cosine = Cosine {
                    act,
                    layout: TokenLayout::TokensHeads,
                    positions: Positions::Grid(&[4, 6]),
                    ..Cosine::default()
                };
                same_forward_and_backward(&what, theta.view(), &table, |angles| {
                    let o = cosine.forward(x.view(), angles).unwrap();
                    let dx = cosine.backward(Some(x.view()), grad.view(), angles).unwrap();
                    let mut dtheta = vec![0.0f64; heads * (d / 2)];
                    cosine
                        .backward_into(CosineBackward {
                            x: Some(x.view()),
                            grad: grad.view(),
                            angles,
                            dx: None,
                            dtheta: Some(ViewMut::new(&mut dtheta, &[heads, d / 2]).unwrap()),
                        })
                        .unwrap();
                    [[bits(&o), bits(&dx)].concat(), dtheta.iter().map(|v| v.to_bits()).collect()]
                });
            });
        }
    }
}

fn same_forward_and_backward(
    what: &str,
    theta: View<'_>,
    table: &AngleTable,
    run: impl Fn(Angles<'_>) -> [Vec<u64>; 2],
) {
    assert!(run(theta.into()) == run(table.into()), "{what}");
}

#[test]
fn packed_sequences_are_each_alone() {
    let random = &mut Random::new(8);
    let ends = [0, 5, 5, 6, 30, 47];
    let (b, n, h, d) = (2, 47, 3, 20);
    for dtype in DType::ALL {
        for act in acts() {
            let x = Tensor::random(random, dtype, &[b, n, h, d]);
            let grad = Tensor::random(random, dtype, &[b, n, h, 2 * d]);
            let theta = Tensor::random(random, DType::F32, &[h, d]);
            let theta = theta.view();
            each_isa(|isa| {
                let rotate = Rotate {
                    act,
                    positions: Positions::From(3),
                    sequences: Some(&ends),
                    ..Rotate::default()
                };
                let cosine = Cosine {
                    act,
                    layout: TokenLayout::TokensHeads,
                    positions: Positions::From(3),
                    sequences: Some(&ends),
                    ..Cosine::default()
                };
                let half = theta.narrow(1, 0, d / 2).unwrap();
                let slim = grad.view().narrow(3, 0, d).unwrap();
                let packed = [
                    rotate.forward(x.view(), half).unwrap(),
                    rotate.backward(Some(x.view()), slim, half).unwrap(),
                    cosine.forward(x.view(), theta).unwrap(),
                    cosine.backward(Some(x.view()), grad.view(), theta).unwrap(),
                ];
                for pair in ends.windows(2) {
                    let part = |view: View<'_>| -> Vec<u64> {
                        let part = view.narrow(1, pair[0], pair[1] - pair[0]).unwrap();
                        part.to_f64_vec().into_iter().map(f64::to_bits).collect()
                    };
                    let cut = |v: View<'_>| -> Tensor {
                        let part = v.narrow(1, pair[0], pair[1] - pair[0]).unwrap();
                        Tensor::new(dtype, part.shape(), &part.to_f64_vec())
                    };
                    let rotate = Rotate { sequences: None, ..rotate };
                    let cosine = Cosine { sequences: None, ..cosine };
                    let (x, grad, slim) = (cut(x.view()), cut(grad.view()), cut(slim));
                    let alone = [
                        rotate.forward(x.view(), half).unwrap(),
                        rotate.backward(Some(x.view()), slim.view(), half).unwrap(),
                        cosine.forward(x.view(), theta).unwrap(),
                        cosine.backward(Some(x.view()), grad.view(), theta).unwrap(),
                    ];
                    for (i, (packed, alone)) in packed.iter().zip(&alone).enumerate() {
                        assert!(
                            part(packed.view()) == bits(alone),
                            "{isa} {dtype} {act} {i} {pair:?}"
                        );
                    }
                }
            });
        }
    }
}

#[test]
fn both_layouts_give_the_same_bits() {
    let random = &mut Random::new(9);
    let (b, n, h, d) = (2, 19, 5, 14);
    for dtype in DType::ALL {
        for act in acts() {
            let x = Tensor::random(random, dtype, &[b, n, h, d]);
            let grad = Tensor::random(random, dtype, &[b, n, h, 2 * d]);
            let theta = Tensor::random(random, DType::F32, &[1, d]);
            let theta = theta.view();
            let swap = |tensor: &Tensor| {
                let swapped = tensor.view().permute(&[0, 2, 1, 3]).unwrap();
                Tensor::new(dtype, swapped.shape(), &swapped.to_f64_vec())
            };
            let (x_heads, grad_heads) = (swap(&x), swap(&grad));
            each_isa(|isa| {
                let gradient = |layout, x: &Tensor, grad: &Tensor, mut dx: Buffer| {
                    let mut dtheta = vec![0.0f64; d];
                    Cosine { act, layout, ..Cosine::default() }
                        .backward_into(CosineBackward {
                            x: Some(x.view()),
                            grad: grad.view(),
                            angles: theta.into(),
                            dx: Some(dx.view_mut()),
                            dtheta: Some(ViewMut::new(&mut dtheta, &[1, d]).unwrap()),
                        })
                        .unwrap();
                    (dx, dtheta.into_iter().map(f64::to_bits).collect::<Vec<_>>())
                };
                let outputs = |layout, x: &Tensor, grad: &Tensor| {
                    let rotate = Rotate { act, layout, ..Rotate::default() };
                    let half = theta.narrow(1, 0, d / 2).unwrap();
                    let slim = grad.view().narrow(3, 0, d).unwrap();
                    let zeros = Buffer::zeros(dtype, x.view().shape()).unwrap();
                    let (dx, dtheta) = gradient(layout, x, grad, zeros);
                    let cosine = Cosine { act, layout, ..Cosine::default() };
                    let outputs = [
                        rotate.forward(x.view(), half).unwrap(),
                        rotate.backward(Some(x.view()), slim, half).unwrap(),
                        cosine.forward(x.view(), theta).unwrap(),
                        dx,
                    ];
                    (outputs, dtheta)
                };
                let (tokens, dtheta) = outputs(TokenLayout::TokensHeads, &x, &grad);
                let (heads, dtheta_heads) =
                    outputs(TokenLayout::HeadsTokens, &x_heads, &grad_heads);
                assert!(dtheta == dtheta_heads, "{isa} {dtype} {act}: dtheta");
                for (i, (tokens, heads)) in tokens.iter().zip(&heads).enumerate() {
                    let back = heads.view().permute(&[0, 2, 1, 3]).unwrap().to_f64_vec();
                    assert!(values(tokens) == back, "{isa} {dtype} {act} {i}");
                }
            });
        }
    }
}

#[test]
fn positions_of_a_batch_are_those_of_each_sample() {
    let random = &mut Random::new(10);
    let (b, n, h, d) = (3, 11, 2, 10);
    let positions: Vec<i64> = (0..b * n).map(|_| random.below(100_000) as i64 - 50_000).collect();
    for dtype in DType::ALL {
        for act in acts() {
            let x = Tensor::random(random, dtype, &[b, n, h, d]);
            let theta = Tensor::random(random, DType::F32, &[1, d]);
            each_isa(|isa| {
                let half = theta.view().narrow(1, 0, d / 2).unwrap();
                let layout = TokenLayout::TokensHeads;
                let run = |x: View<'_>, positions| {
                    let rotate = Rotate { act, positions, ..Rotate::default() };
                    let cosine = Cosine { act, layout, positions, ..Cosine::default() };
                    [
                        rotate.forward(x, half).unwrap(),
                        rotate.backward(Some(x), x, half).unwrap(),
                        cosine.forward(x, theta.view()).unwrap(),
                    ]
                };
                let all = run(x.view(), Positions::PerBatch(&positions));
                for sample in 0..b {
                    let x = x.view().narrow(0, sample, 1).unwrap();
                    let own = &positions[sample * n..(sample + 1) * n];
                    let alone = run(x, Positions::PerToken(own));
                    for (all, alone) in all.iter().zip(&alone) {
                        let part = all.view().narrow(0, sample, 1).unwrap().to_f64_vec();
                        assert!(part == values(alone), "{isa} {dtype} {act} {sample}");
                    }
                }
            });
        }
    }
}

#[test]
fn what_does_not_rotate_passes_through() {
    let random = &mut Random::new(11);
    let (n, d, pairs) = (9, 21, 4);
    for dtype in DType::ALL {
        let mut numbers = random.normals(n * d);
        numbers[d + 9] = f64::NAN; // between the halves, and behind the interleaved pairs
        numbers[2 * d + 9] = f64::INFINITY;
        let x = Tensor::new(dtype, &[1, n, 1, d], &numbers);
        let theta = Tensor::new(DType::F32, &[1, pairs], &random.uniforms(pairs, 0.5, 1.0));
        for (pairing, partial, rotated) in [
            (Pairing::Half, Partial::Pairs, [0..pairs, d / 2..d / 2 + pairs]),
            (Pairing::Half, Partial::RotaryDim, [0..pairs, pairs..2 * pairs]),
            (Pairing::Interleaved, Partial::Pairs, [0..2 * pairs, 0..0]),
            (Pairing::Interleaved, Partial::RotaryDim, [0..2 * pairs, 0..0]),
        ] {
            each_isa(|isa| {
                let rotate = Rotate { pairing, partial, ..Rotate::default() };
                let o = rotate.forward(x.view(), theta.view()).unwrap();
                let dx = rotate.backward(None, x.view(), theta.view()).unwrap();
                for o in [values(&o), values(&dx)] {
                    for (i, (x, o)) in x.values().into_iter().zip(o).enumerate() {
                        let feature = i % d;
                        let turns = rotated.iter().any(|range| range.contains(&feature));
                        let same = x.to_bits() == o.to_bits() || (x.is_nan() && o.is_nan());
                        let first = i < d; // at position 0 nothing turns
                        assert!(
                            same != (turns && !first) || x == o,
                            "{isa} {pairing:?} {i} {x} {o}"
                        );
                    }
                }
            });
        }
    }
}

#[test]
fn backward_of_a_rotation_is_the_rotation_back() {
    let random = &mut Random::new(12);
    let (n, d) = (15, 12);
    let x = Tensor::random(random, DType::F64, &[2, n, 2, d]);
    let grad = Tensor::random(random, DType::F64, &[2, n, 2, d]);
    let theta = Tensor::random(random, DType::F64, &[2, d / 2]);
    each_isa(|isa| {
        // <rotate(x), grad> = <x, backward(grad)>, and its slope along theta is dtheta.
        let rotate = Rotate::default();
        let o = values(&rotate.forward(x.view(), theta.view()).unwrap());
        let (mut dx, mut dtheta) = (vec![0.0f64; o.len()], vec![0.0f64; d]);
        rotate
            .backward_into(RotateBackward {
                x: Some(x.view()),
                grad: grad.view(),
                angles: theta.view().into(),
                dx: Some(ViewMut::new(&mut dx, &[2, n, 2, d]).unwrap()),
                dtheta: Some(ViewMut::new(&mut dtheta, &[2, d / 2]).unwrap()),
            })
            .unwrap();
        let (a, b) = (dot(&o, &grad.values()), dot(&x.values(), &dx));
        assert!((a - b).abs() < 1e-10, "{isa}: {a} {b}");
        let step = 1e-6;
        let loss = |sign: f64| {
            let moved: Vec<f64> = theta.values().iter().map(|t| t + sign * step).collect();
            let moved = Tensor::new(DType::F64, &[2, d / 2], &moved);
            dot(&values(&rotate.forward(x.view(), moved.view()).unwrap()), &grad.values())
        };
        let slope = (loss(1.0) - loss(-1.0)) / (2.0 * step);
        assert!((slope - dtheta.iter().sum::<f64>()).abs() < 1e-5 * slope.abs().max(1.0), "{isa}");
    });
}

#[test]
fn softmax_rows_sum_to_one() {
    let random = &mut Random::new(13);
    for dtype in DType::ALL {
        for (dim, shape) in [(-1, [3, 4, 1000]), (1, [3, 500, 17]), (0, [257, 2, 9])] {
            let numbers: Vec<f64> =
                (0..shape.iter().product()).map(|_| 8.0 * random.normal()).collect();
            let x = Tensor::new(dtype, &shape, &numbers);
            let shifted: Vec<f64> = numbers.iter().map(|v| rounded(dtype, *v) + 1024.0).collect();
            each_isa(|isa| {
                let softmax = Softmax::over(dim);
                let o = values(&softmax.forward(x.view()).unwrap());
                let log = values(&Softmax::log_over(dim).forward(x.view()).unwrap());
                let dim = if dim < 0 { 2 } else { dim as usize };
                let (inner, n) = (shape[dim + 1..].iter().product::<usize>(), shape[dim]);
                for outer in 0..shape[..dim].iter().product::<usize>() {
                    for i in 0..inner {
                        let row = |v: &[f64]| -> Vec<f64> {
                            (0..n).map(|t| v[(outer * n + t) * inner + i]).collect()
                        };
                        let (o, log) = (row(&o), row(&log));
                        let sum: f64 = o.iter().sum();
                        // x - max, up to 64, was rounded.
                        let off = (sum - 1.0).abs();
                        assert!(
                            off <= 32.0 * unit(dtype.real()) + unit(dtype),
                            "{isa} {dtype}: {sum}"
                        );
                        let sum: f64 = log.iter().map(|v| v.exp()).sum();
                        // A logarithm is off by half a unit of its size, 8 to 64.
                        assert!(
                            (sum - 1.0).abs() <= 64.0 * unit(dtype),
                            "{isa} {dtype} log: {sum}"
                        );
                    }
                }
                // A shift that the dtype holds exactly changes nothing.
                if dtype == DType::F64 {
                    let shifted = Tensor::new(dtype, &shape, &shifted);
                    let moved = values(&softmax.forward(shifted.view()).unwrap());
                    assert!(o.iter().zip(moved).all(|(a, b)| (a - b).abs() <= 1e-12 * a));
                }
            });
        }
    }
}

#[test]
fn softmax_of_integers_does_not_depend_on_a_shift() {
    // Integers that every dtype holds with the shift: x - max is the same, so are the bits. Short
    // forms leave the maximum where it is, and may round the other way.
    let random = &mut Random::new(14);
    for dtype in DType::ALL {
        let numbers: Vec<f64> = (0..600).map(|_| random.below(40) as f64).collect();
        let shifted: Vec<f64> = numbers.iter().map(|v| v - 100.0).collect();
        for (dim, shape) in [(-1, [6, 100]), (0, [100, 6])] {
            each_isa(|isa| {
                let [a, b] = [&numbers, &shifted]
                    .map(|v| Softmax::over(dim).forward(Tensor::new(dtype, &shape, v).view()));
                let (a, b) = (values(&a.unwrap()), values(&b.unwrap()));
                let allowed = if matches!(dtype, DType::F16 | DType::BF16) { 1.0 } else { 0.0 };
                for (a, b) in a.into_iter().zip(b) {
                    let apart = ulp::error(dtype, a, b);
                    assert!(apart <= allowed, "{isa} {dtype} {dim}: {a:e} {b:e}");
                }
            });
        }
    }
}

#[test]
fn softmax_gradients_sum_to_zero() {
    let random = &mut Random::new(15);
    let shape = [7, 333];
    let (x, grad) =
        (Tensor::random(random, DType::F32, &shape), Tensor::random(random, DType::F32, &shape));
    each_isa(|isa| {
        for softmax in [Softmax::over(-1), Softmax::log_over(-1)] {
            let o = softmax.forward(x.view()).unwrap();
            for dx in [
                softmax.backward(o.view(), grad.view()).unwrap(),
                softmax.backward_from_input(x.view(), grad.view()).unwrap(),
            ] {
                for row in values(&dx).chunks(333) {
                    let sum: f64 = row.iter().sum();
                    assert!(sum.abs() < 3e-5, "{isa} {softmax:?}: {sum}");
                }
            }
        }
    });
}

#[test]
fn softmax_over_a_dimension_is_that_over_the_last_after_a_transpose() {
    let random = &mut Random::new(16);
    for dtype in DType::ALL {
        let x = Tensor::random(random, dtype, &[5, 40, 6]);
        each_isa(|isa| {
            let along = Softmax::over(1).forward(x.view()).unwrap();
            let turned = x.view().permute(&[0, 2, 1]).unwrap();
            let turned = Tensor::new(dtype, &[5, 6, 40], &turned.to_f64_vec());
            let last = Softmax::over(-1).forward(turned.view()).unwrap();
            let back = last.view().permute(&[0, 2, 1]).unwrap().to_f64_vec();
            for (a, b) in values(&along).into_iter().zip(back) {
                // The two orders of summation may differ by a rounding or two.
                assert!((a - b).abs() <= 4.0 * unit(dtype) * a, "{isa} {dtype} {a} {b}");
            }
        });
    }
}

#[test]
fn gradients_of_a_norm_are_orthogonal_to_what_it_keeps() {
    // Scaling a group changes no result (eps 0), so dx is orthogonal to r; nor does, if centered,
    // a shift, so dx sums to 0.
    let random = &mut Random::new(17);
    for dtype in [DType::F32, DType::F64] {
        for norm in [
            Normalize::rms_norm(),
            Normalize::layer_norm(),
            Normalize::rms_norm().with_groups(4),
            Normalize::layer_norm().with_groups(4),
        ] {
            let (rows, d) = (5, 96);
            let norm = norm.with_eps(0.0);
            let (x, grad) = (
                Tensor::random(random, dtype, &[rows, d]),
                Tensor::random(random, dtype, &[rows, d]),
            );
            let weight = Tensor::random(random, dtype, &[d]);
            each_isa(|isa| {
                let kept = norm.forward_keeping(x.view(), None).unwrap();
                let weighted = norm.forward_keeping(x.view(), Some(weight.view())).unwrap();
                let dx = norm.backward(grad.view(), x.view(), Some(weight.view()), &weighted);
                let (r, dx) = (values(&kept.o), values(&dx.unwrap().dx));
                let e = d / norm.groups;
                for (r, dx) in r.chunks(e).zip(dx.chunks(e)) {
                    let size = dot(dx, dx).sqrt() * dot(r, r).sqrt();
                    assert!(size > 0.1);
                    let along = dot(r, dx).abs();
                    assert!(along < 4.0 * unit(dtype) * size, "{isa} {dtype} {norm:?}: {along}");
                    if norm.center {
                        let sum = dx.iter().sum::<f64>().abs();
                        assert!(sum < 40.0 * unit(dtype) * size, "{isa} {dtype} {norm:?}: {sum}");
                    }
                }
            });
        }
    }
}

#[test]
fn norms_have_the_size_they_say() {
    let random = &mut Random::new(18);
    for dtype in DType::ALL {
        for norm in [Normalize::srms_norm(), Normalize::layer_norm().with_groups(3)] {
            let (rows, d) = (7, 129);
            let norm = Normalize { scale: 2.5, ..norm.with_eps(0.0) };
            let x = Tensor::random(random, dtype, &[rows, d]);
            each_isa(|isa| {
                let o = values(&norm.forward(x.view(), None).unwrap());
                let e = d / norm.groups;
                for o in o.chunks(e) {
                    let (mean, square) = (o.iter().sum::<f64>() / e as f64, dot(o, o) / e as f64);
                    assert!(
                        (square.sqrt() - 2.5).abs() < 4.0 * unit(dtype),
                        "{isa} {dtype} {square}"
                    );
                    assert!(!norm.center || mean.abs() < 4.0 * unit(dtype), "{isa} {dtype} {mean}");
                }
            });
        }
    }
}

#[test]
fn a_layer_norm_does_not_see_a_shift() {
    // Numbers that f32 holds with the shift, also where the mean is far greater than the deviation.
    let random = &mut Random::new(19);
    let (rows, d) = (4, 333);
    let numbers: Vec<f64> = (0..rows * d).map(|_| random.below(1024) as f64 / 1024.0).collect();
    let norm = Normalize::layer_norm().with_eps(0.0);
    for (dtype, shifts) in [(DType::F32, [1.0, 64.0, 8192.0]), (DType::F64, [1.0, 1e6, -1e10])] {
        let x = Tensor::new(dtype, &[rows, d], &numbers);
        each_isa(|isa| {
            let o = values(&norm.forward(x.view(), None).unwrap());
            for shift in shifts {
                let shifted: Vec<f64> = numbers.iter().map(|v| v + shift).collect();
                let shifted = Tensor::new(dtype, &[rows, d], &shifted);
                let moved = values(&norm.forward(shifted.view(), None).unwrap());
                for (a, b) in o.iter().zip(moved) {
                    assert!((a - b).abs() < 1e2 * unit(dtype), "{isa} {dtype} {shift}: {a} {b}");
                }
            }
        });
    }
}

#[test]
fn a_group_norm_is_a_norm_of_each_group() {
    let random = &mut Random::new(20);
    for dtype in DType::ALL {
        let (rows, d, groups) = (6, 4 * 37, 4);
        let x = Tensor::random(random, dtype, &[rows, d]);
        for norm in [Normalize::rms_norm(), Normalize::layer_norm()] {
            each_isa(|isa| {
                let grouped = norm.with_groups(groups).forward(x.view(), None).unwrap();
                let split = x.view().reshape(&[rows * groups, d / groups]).unwrap();
                let alone = norm.forward(split, None).unwrap();
                assert!(bits(&grouped) == bits(&alone), "{isa} {dtype} {norm:?}");
            });
        }
    }
}

#[test]
fn a_residual_is_the_sum_and_an_open_gate_is_none() {
    let random = &mut Random::new(21);
    let shape = [5, 70];
    let norm = Normalize::layer_norm();
    // In f64 the sum that is normalized and the sum that is kept are the same.
    let (x, residual) =
        (Tensor::random(random, DType::F64, &shape), Tensor::random(random, DType::F64, &shape));
    let sum: Vec<f64> = x.values().iter().zip(residual.values()).map(|(a, b)| a + b).collect();
    let sum = Tensor::new(DType::F64, &shape, &sum);
    let open = Tensor::new(DType::F64, &shape, &[1.0; 350]);
    each_isa(|isa| {
        let want = bits(&norm.forward(sum.view(), None).unwrap());
        let (mut o, mut kept) = (vec![0.0f64; 350], vec![0.0f64; 350]);
        norm.forward_into(NormalizeForward {
            residual: Residual::AddInto(residual.view(), ViewMut::new(&mut kept, &shape).unwrap()),
            ..NormalizeForward::new(x.view(), ViewMut::new(&mut o, &shape).unwrap())
        })
        .unwrap();
        assert!(kept == sum.values() && o.iter().map(|v| v.to_bits()).eq(want.iter().copied()));
        for gate_position in [GatePosition::Pre, GatePosition::Post] {
            let gated = Normalize { gate_position, gate_act: Act::None, ..norm };
            gated
                .forward_into(NormalizeForward {
                    gate: Some(open.view()),
                    ..NormalizeForward::new(sum.view(), ViewMut::new(&mut o, &shape).unwrap())
                })
                .unwrap();
            assert!(o.iter().map(|v| v.to_bits()).eq(want.iter().copied()), "{isa}");
        }
        // And dbias is the sum of the gradients.
        let mut dbias = vec![0.0f64; 70];
        let statistics = norm.forward_keeping(sum.view(), None).unwrap();
        norm.backward_into(NormalizeBackward {
            mean: statistics.mean.as_ref().map(Buffer::view),
            dbias: Some(ViewMut::new(&mut dbias, &[70]).unwrap()),
            ..NormalizeBackward::new(x.view(), sum.view(), statistics.rstd.view())
        })
        .unwrap();
        for (j, dbias) in dbias.iter().enumerate() {
            let want: f64 = x.values().iter().skip(j).step_by(70).sum();
            assert!((dbias - want).abs() < 1e-14, "{isa}");
        }
    });
}
