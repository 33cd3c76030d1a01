use super::*;
use crate::dtype::Element;
use crate::exec::rows::TaskRows;
use crate::exec::scratch::Scratch;
use crate::kernels::lanes::Lane;
use crate::kernels::sink::{RowSink, Sink};
use crate::kernels::softmax::{column_statistics, exp_row};
use crate::kernels::source::{Prefetch, Source};
use crate::kernels::sweep::sweep;
use crate::simd::{Kernel, Simd, V};
use crate::{Isa, with_isa};
use half::{bf16, f16};

const INF: f64 = f64::INFINITY;

/// The lines of a dense tensor along `dim`, as indices.
fn lines(shape: &[usize], dim: usize) -> Vec<Vec<usize>> {
    let inner: usize = shape[dim + 1..].iter().product();
    let outer: usize = shape[..dim].iter().product();
    let n = shape[dim];
    let line = |o: usize, i: usize| (0..n).map(|t| (o * n + t) * inner + i).collect();
    (0..outer).flat_map(|o| (0..inner).map(move |i| line(o, i))).collect()
}

/// The formula, line by line, in f64.
fn plain_forward(softmax: Softmax, x: &[f64], shape: &[usize], dim: usize) -> Vec<f64> {
    let mut o = vec![f64::NAN; x.len()];
    for line in lines(shape, dim) {
        let max = line.iter().fold(-INF, |max, &i| x[i].max(max));
        let sum: f64 = line.iter().map(|&i| (x[i] - max).exp()).sum();
        for &i in &line {
            o[i] = match (max == -INF && softmax.zero_masked_rows, softmax.log) {
                (true, false) => 0.0,
                (true, true) => -INF,
                (false, false) => (x[i] - max).exp() / sum,
                (false, true) => x[i] - max - sum.ln(),
            };
        }
    }
    o
}

/// The formula, and the size of its terms before they cancel.
fn plain_backward(
    log: bool,
    o: &[f64],
    grad: &[f64],
    shape: &[usize],
    dim: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut scale) = (vec![f64::NAN; o.len()], vec![f64::NAN; o.len()]);
    for line in lines(shape, dim) {
        let term = |i: usize| if log { grad[i] } else { o[i] * grad[i] };
        let total: f64 = line.iter().map(|&i| term(i)).sum();
        let terms: f64 = line.iter().map(|&i| term(i).abs()).sum();
        for &i in &line {
            let p = if log { o[i].exp() } else { o[i] };
            dx[i] = if log { grad[i] - p * total } else { p * (grad[i] - total) };
            scale[i] = if log { 1.0 } else { p } * grad[i].abs() + p * terms;
        }
    }
    (dx, scale)
}

/// Numbers that look random, within -scale..scale.
fn numbers<T: Element>(len: usize, seed: u64, scale: f64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
        T::from_f64(((state >> 33) as f64 / (1u64 << 30) as f64 - 1.0) * scale)
    };
    (0..len).map(next).collect()
}

fn wide<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

/// The largest error beyond the rounding to `T`, in units of the arithmetic type's epsilon at
/// each element's scale.
fn error<T: Element>(got: &[T], want: &[f64], scale: impl Fn(usize) -> f64) -> f64 {
    let (digits, least) = match T::DTYPE {
        DType::F32 => (23, -126),
        DType::F16 => (10, -14),
        DType::BF16 => (7, -126),
        DType::F64 => (52, -1022),
    };
    let epsilon = if T::DTYPE == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
    assert_eq!(got.len(), want.len());
    let errors = got.iter().zip(want).enumerate().map(|(i, (got, &want))| {
        let got = got.to_f64();
        if got == want || got.is_nan() && want.is_nan() {
            return 0.0;
        }
        let exponent = want.abs().log2().floor().max(f64::from(least));
        let rounding = 0.5 * 2f64.powf(exponent - f64::from(digits));
        let error = ((got - want).abs() - rounding).max(0.0) / (epsilon * scale(i));
        if error.is_nan() { INF } else { error }
    });
    errors.fold(0.0, f64::max)
}

fn for_each_isa(test: impl Fn() -> Result<()>) -> Result<()> {
    Isa::available().try_for_each(|isa| with_isa(isa, &test)?)
}

#[test]
fn known_answers() -> Result<()> {
    for_each_isa(|| {
        let x = [0.0, 1.0, 2.0, 5.0, 5.0, 5.0];
        let x = View::new(&x, &[2, 3])?;
        let third = 1.0 / 3.0;
        let want = [0.09003057317038046, 0.24472847105479767, 0.6652409557748219];
        let o = Softmax::over(-1).forward(x)?;
        let want = [&want[..], &[third; 3]].concat();
        assert!(error(o.as_slice::<f64>()?, &want, |i| want[i].abs()) < 2.0);
        let o = Softmax::over(0).forward(x)?;
        let (a, b) = (1.0 / (1.0 + 5f64.exp()), 1.0 / (1.0 + 3f64.exp()));
        let m = 1.0 / (1.0 + 4f64.exp());
        let want = [a, m, b, 1.0 - a, 1.0 - m, 1.0 - b];
        assert!(error(o.as_slice::<f64>()?, &want, |i| want[i]) < 8.0);
        let o = Softmax::log_over(1).forward(x)?;
        let want = [-2.4076059644443806, -1.4076059644443804, -0.4076059644443804];
        let want = [&want[..], &[-3f64.ln(); 3]].concat();
        assert!(error(o.as_slice::<f64>()?, &want, |i| want[i].abs()) < 2.0);
        Ok(())
    })
}

#[test]
fn arguments_are_checked() -> Result<()> {
    let (x, mut o) = ([1.0f32; 6], [1.0f32; 6]);
    let view = View::new(&x, &[2, 3])?;
    for dim in [2, -3] {
        let error = Softmax::over(dim).forward(view).unwrap_err();
        assert_eq!((error.operator(), error.argument()), ("softmax", "dim"));
        let (got, range) = (format!("is {dim}"), "-2 to 1 (x has 2 dimensions)");
        assert_eq!((error.got(), error.expected()), (&got[..], range));
    }
    let error = Softmax::over(0).forward(View::new(&x[..1], &[])?).unwrap_err();
    assert_eq!(error.argument(), "x");
    let error = Softmax::over(0).forward_into(view, ViewMut::new(&mut o, &[3, 2])?).unwrap_err();
    assert_eq!(error.argument(), "o");
    let halves = [f16::ONE; 6];
    let error = Softmax::over(0).backward(view, View::new(&halves, &[2, 3])?).unwrap_err();
    assert_eq!(error.argument(), "grad");
    // Nothing to do.
    for shape in [[0, 3], [3, 0], [0, 0]] {
        let x = View::new(&x[..0], &shape)?;
        for dim in [0, 1] {
            assert!(Softmax::over(dim).forward(x)?.is_empty());
            assert!(Softmax::log_over(dim).backward(x, x)?.is_empty());
            assert!(Softmax::over(dim).backward_from_input(x, x)?.is_empty());
        }
    }
    Ok(())
}

/// Forward and both backward forms of one shape, over every dimension, against the formula.
fn check<T: Element>(shape: &[usize], size: f64) -> Result<()> {
    let len = shape.iter().product();
    let (x, grad) = (numbers::<T>(len, 1, size), numbers::<T>(len, 2, 2.0));
    let (wide_x, wide_grad) = (wide(&x), wide(&grad));
    let (x, grad) = (View::new(&x, shape)?, View::new(&grad, shape)?);
    for (dim, log) in (0..shape.len()).flat_map(|d| [(d, false), (d, true)]) {
        let softmax = Softmax { dim: dim as isize, log, zero_masked_rows: false };
        let bound = |name, error: f64, bound| {
            assert!(error <= bound, "{name} {} {shape:?} {softmax:?} {error}", T::DTYPE);
        };
        let want = plain_forward(softmax, &wide_x, shape, dim);
        let mut o = vec![T::from_f64(f64::NAN); len];
        softmax.forward_into(x, ViewMut::new(&mut o, shape)?)?;
        // The rounding of x - max, up to 2 * size, is relative in the exponential.
        let scale = |i: usize| if log { 2.0 * size + want[i].abs() } else { want[i] * size };
        // The short exponentials are right to 2^-13.5 and 2^-11, in ulp of f32 (2^-23).
        let k = match T::DTYPE {
            DType::F16 if !log => 724.0,
            DType::BF16 if !log => 4096.0,
            _ => 3.0,
        };
        bound("forward", error(&o, &want, scale), k);

        let mut dx = vec![T::from_f64(f64::NAN); len];
        let o_view = View::new(&o, shape)?;
        softmax.backward_into(o_view, grad, ViewMut::new(&mut dx, shape)?)?;
        let (from_o, scale) = plain_backward(log, &wide(&o), &wide_grad, shape, dim);
        bound("from output", error(&dx, &from_o, |i| scale[i]), 3.0);

        dx.fill(T::from_f64(f64::NAN));
        softmax.backward_from_input_into(x, grad, ViewMut::new(&mut dx, shape)?)?;
        let (from_x, scale) = plain_backward(log, &want, &wide_grad, shape, dim);
        bound("from input", error(&dx, &from_x, |i| scale[i] * size), 3.0);
    }
    Ok(())
}

#[test]
fn the_formula_for_all_sizes_dtypes_and_dimensions() -> Result<()> {
    for_each_isa(|| {
        for n in [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 128, 200] {
            for shape in [&[n][..], &[3, n], &[n, 5], &[2, n, 33], &[2, 3, n, 2]] {
                check::<f32>(shape, 4.0)?;
                check::<bf16>(shape, 4.0)?;
                check::<f16>(shape, 4.0)?;
                check::<f64>(shape, 4.0)?;
            }
        }
        Ok(())
    })
}

#[test]
fn long_rows_and_columns_stay_exact() -> Result<()> {
    for_each_isa(|| {
        check::<f32>(&[2, 40_001], 1.0)?;
        check::<f32>(&[40_001, 2], 1.0)?;
        check::<bf16>(&[1, 20_000, 3], 8.0)?;
        // Columns that rise or fall slowly: the first replaces its maximum again and again.
        let x: Vec<f32> = (0..5000).flat_map(|i| [(i / 32) as f32, (-i / 32) as f32]).collect();
        let x: Vec<f32> = x.iter().map(|x| x / 4.0).collect();
        let want = plain_forward(Softmax::over(0), &wide(&x), &[5000, 2], 0);
        let o = Softmax::over(0).forward(View::new(&x, &[5000, 2])?)?;
        let error = error(o.as_slice::<f32>()?, &want, |i| want[i]);
        assert!(error < 4.0, "{error}");
        Ok(())
    })
}

#[test]
fn rows_sum_to_one_even_when_huge() -> Result<()> {
    for_each_isa(|| {
        let x: Vec<f32> = numbers(64 * 96, 5, 1e4);
        for (dim, log) in [(0, false), (1, false), (0, true), (1, true)] {
            let softmax = Softmax { dim, log, zero_masked_rows: false };
            let o = softmax.forward(View::new(&x, &[64, 96])?)?.to_vec::<f32>()?;
            for line in lines(&[64, 96], dim as usize) {
                let p = |i: usize| f64::from(o[i]);
                let sum: f64 = line.iter().map(|&i| if log { p(i).exp() } else { p(i) }).sum();
                assert!((sum - 1.0).abs() < 1e-5, "{sum}");
            }
        }
        Ok(())
    })
}

/// Lines, and what their softmax is: `None` for NaN.
#[test]
fn nan_infinities_and_masks() -> Result<()> {
    const NAN: f64 = f64::NAN;
    for_each_isa(|| {
        for n in [3, 8, 21, 64, 70, 128, 20_000] {
            let line = |kind: usize, t: usize| match (kind, t) {
                (0, 0) | (1, 2) => NAN,
                (2, 1) => INF,
                (3, _) => -INF,
                (4, 0) => NAN,
                (4, _) => -INF,
                (5, 1) => 1.0,
                (5, _) => -INF,
                (6, t) if t + 1 == n => NAN,
                (7, t) if t + 1 == n => 0.0,
                (7, _) => -INF,
                (_, t) => (t % 3) as f64,
            };
            for (by_columns, dtype) in
                [(false, DType::F32), (false, DType::BF16), (true, DType::F32), (true, DType::BF16)]
            {
                let shape = if by_columns { [n, 9] } else { [9, n] };
                let dim = isize::from(!by_columns);
                let at = |i: usize| if by_columns { (i % 9, i / 9) } else { (i / n, i % n) };
                let x: Vec<f64> = (0..9 * n).map(|i| line(at(i).0, at(i).1)).collect();
                crate::dtype::with_element!(dtype, T => {
                    let x: Vec<T> = x.iter().map(|&x| T::from_f64(x)).collect();
                    let grad: Vec<T> = numbers(x.len(), 3, 1.0);
                    let (x, grad) = (View::new(&x, &shape)?, View::new(&grad, &shape)?);
                    for (log, zero_masked_rows) in
                        [(false, false), (false, true), (true, false), (true, true)]
                    {
                        let softmax = Softmax { dim, log, zero_masked_rows };
                        let o = softmax.forward(x)?;
                        let from_o = softmax.backward(o.view(), grad)?.view().to_f64_vec();
                        let from_x = softmax.backward_from_input(x, grad)?.view().to_f64_vec();
                        let (o, grad) = (o.view().to_f64_vec(), grad.to_f64_vec());
                        for i in 0..9 * n {
                            let all = [o[i], from_o[i], from_x[i]];
                            let what = format!("{softmax:?} {dtype} {n} {:?} {all:?}", at(i));
                            match at(i).0 {
                                3 if zero_masked_rows => {
                                    let masked = if log { -INF } else { 0.0 };
                                    assert_eq!(all, [masked, 0.0, 0.0], "{what}");
                                }
                                0 | 1 | 2 | 3 | 4 | 6 => {
                                    assert!(all.iter().all(|v| v.is_nan()), "{what}");
                                }
                                kind @ (5 | 7) => {
                                    let one = at(i).1 == if kind == 5 { 1 } else { n - 1 };
                                    let p = f64::from(u8::from(one));
                                    assert_eq!(o[i], if log { p.ln() } else { p }, "{what}");
                                    if log && !one {
                                        assert_eq!(all[1..], [grad[i]; 2], "{what}");
                                    } else if !log {
                                        assert_eq!(all[1..], [0.0; 2], "{what}");
                                    }
                                }
                                _ => assert!(all.iter().all(|v| v.is_finite()), "{what}"),
                            }
                        }
                    }
                });
            }
        }
        Ok(())
    })
}

#[test]
fn infinite_gradients_follow_ieee() -> Result<()> {
    // The sum is infinite: -inf for the finite ones, inf - inf for the other.
    let (o, grad) = ([0.5f32; 6], [1.0f32, 1.0, 1.0, f32::INFINITY, 1.0, 1.0]);
    let by_columns = (View::new(&o, &[2, 3])?, View::new(&grad, &[2, 3])?);
    let dx = Softmax::over(0).backward(by_columns.0, by_columns.1)?.to_vec::<f32>()?;
    assert!(dx[0] == f32::NEG_INFINITY && dx[3].is_nan() && dx[1] == 0.0);
    let dx = Softmax::over(0).backward(View::new(&o[..2], &[2])?, View::new(&grad[2..4], &[2])?)?;
    let dx = dx.as_slice::<f32>()?;
    assert!(dx[0] == f32::NEG_INFINITY && dx[1].is_nan());
    Ok(())
}

#[test]
fn views_of_all_kinds() -> Result<()> {
    for_each_isa(|| {
        let shape = [3, 20, 5, 24];
        let len: usize = shape.iter().product();
        let x: Vec<f32> = numbers(len, 8, 3.0);
        let dense = View::new(&x, &shape)?;
        for dim in 0..4 {
            let want = Softmax::over(dim).forward(dense)?.to_vec::<f32>()?;
            // Any order of dimensions gives the same bits, whichever is contiguous.
            for order in [[0, 2, 1, 3], [2, 1, 3, 0], [3, 2, 1, 0], [0, 1, 3, 2]] {
                let place = order.iter().position(|&d| d == dim as usize).unwrap();
                let mut o = vec![f32::NAN; len];
                Softmax::over(place as isize).forward_into(
                    dense.permute(&order)?,
                    ViewMut::new(&mut o, &shape)?.permute(&order)?,
                )?;
                assert_eq!(o, want, "{dim} {order:?}");
            }
            // Parts of larger tensors, in and out.
            let mut o = vec![f32::NAN; len];
            let (outer, start, part) = (if dim == 0 { 2 } else { 0 }, 1, 2);
            Softmax::over(dim).forward_into(
                dense.narrow(outer, start, part)?,
                ViewMut::new(&mut o, &shape)?.narrow(outer, start, part)?,
            )?;
            let stride = dense.strides()[outer] as usize;
            for (i, (got, want)) in o.iter().zip(&want).enumerate() {
                let inside = (start..start + part).contains(&(i / stride % shape[outer]));
                assert!(if inside { got == want } else { got.is_nan() });
            }
            // A gradient that is the same for all of the first dimension.
            let one = View::new(&x[..len / 3], &shape[1..])?.broadcast(&shape)?;
            let dense_one = x[..len / 3].repeat(3);
            let softmax = Softmax::over(dim);
            assert_eq!(
                softmax.backward_from_input(dense, one)?.to_vec::<f32>()?,
                softmax
                    .backward_from_input(dense, View::new(&dense_one, &shape)?)?
                    .to_vec::<f32>()?
            );
        }
        Ok(())
    })
}

#[test]
fn the_same_bits_for_any_threads_and_batch() -> Result<()> {
    let shape = [6, 300, 3, 200]; // 2 MiB of bf16
    let len: usize = shape.iter().product();
    let (x, grad) = (numbers::<bf16>(len, 1, 4.0), numbers::<bf16>(len, 2, 1.0));
    let (x, grad) = (View::new(&x, &shape)?, View::new(&grad, &shape)?);
    for (dim, log) in [(1, false), (1, true), (3, false), (3, true)] {
        let softmax = Softmax { dim, log, zero_masked_rows: true };
        let all = |x: View<'_>, grad: View<'_>| -> Result<Vec<Vec<bf16>>> {
            let o = softmax.forward(x)?;
            let from_o = softmax.backward(o.view(), grad)?.to_vec()?;
            let from_x = softmax.backward_from_input(x, grad)?.to_vec()?;
            Ok(vec![o.to_vec()?, from_o, from_x])
        };
        let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
        let want = pool(1).install(|| all(x, grad))?;
        for threads in [2, 3, 7] {
            assert!(pool(threads).install(|| all(x, grad))? == want);
        }
        // One entry of the batch, and one head of it, by themselves.
        let got = all(x.narrow(0, 4, 1)?, grad.narrow(0, 4, 1)?)?;
        let size = len / 6;
        assert!(got.iter().zip(&want).all(|(got, want)| *got == want[4 * size..5 * size]));
        let head = |v: View<'_>| -> Result<Vec<f64>> { Ok(v.narrow(2, 1, 1)?.to_f64_vec()) };
        let got = all(x.narrow(2, 1, 1)?, grad.narrow(2, 1, 1)?)?;
        for (got, want) in got.iter().zip(&want) {
            assert!(wide(got) == head(View::new(want, &shape)?)?);
        }
    }
    Ok(())
}

/// Rows whose tiles are pipelined: whole batches and a shorter one, among
/// them rows that are far, masked or NaN, each as it is by itself.
#[test]
fn rows_in_turns_are_what_they_are_alone() -> Result<()> {
    fn check<T: Element>(rows: usize, n: usize) -> Result<()> {
        let mut x: Vec<T> = numbers(rows * n, 7, 4.0);
        for (r, row) in x.chunks_mut(n).enumerate() {
            match r % 11 {
                3 => row[n / 2] = T::from_f64(300.0),
                5 => row[0] = T::from_f64(-200.0),
                7 => row.fill(T::from_f64(-INF)),
                8 => row[n - 1] = T::from_f64(f64::NAN),
                _ => {}
            }
        }
        let view = View::new(&x, &[rows, n])?;
        let softmax = Softmax { zero_masked_rows: true, ..Softmax::over(-1) };
        let together = softmax.forward(view)?.view().to_f64_vec();
        for (r, got) in together.chunks(n).enumerate() {
            let alone = softmax.forward(view.narrow(0, r, 1)?)?.view().to_f64_vec();
            let same = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
            assert!(got.iter().zip(&alone).all(same), "row {r} of {rows}, {n} {}", T::DTYPE);
            assert_eq!(got[0].is_nan(), r % 11 == 8);
        }
        Ok(())
    }
    for_each_isa(|| {
        for (rows, n) in
            [(1, 16), (17, 128), (53, 48), (40, 208), (7, 1024), (1100, 128), (2100, 64)]
                .into_iter()
                .chain([(17, 127), (53, 65), (40, 201), (7, 1023), (1100, 129)])
        {
            check::<bf16>(rows, n)?;
            check::<f16>(rows, n)?;
            check::<f32>(rows, n)?;
        }
        Ok(())
    })
}

/// What other operators use of the kernels: rows 0..5 by columns, the others each by itself.
struct Helpers<'r>(TaskRows<'r, 1, 1>, bool);

impl Kernel for Helpers<'_> {
    #[inline(always)]
    fn run<S: Simd>(mut self) {
        let Some(rows) = self.0.next_rows::<S::Elem>(usize::MAX) else { return };
        let ([x], [mut o], count) = (rows.inputs, rows.outputs, rows.count);
        let len = x.len();
        let mut scratch = [len; 2].map(Scratch::<Lane>::new);
        let [shift, inverse] = &mut scratch;
        for r in 5..count {
            let scale = V::splat(exp_row(Source::<S>::new(x.row(r), Prefetch::None), shift));
            let mut o = RowSink::<S>::new(o.row(r), false);
            sweep::<S>(len, |at| o.put(at, (V::<S>::at(shift, at) * scale).round()));
        }
        let in_range = column_statistics::<S>(&x.slice(0, 5), shift, inverse, self.1);
        for r in 0..5 {
            let (x, mut o) = (x.row(r), RowSink::<S>::new(o.row(r), false));
            sweep::<S>(len, |at| {
                let x = V::<S>::load(x, at) - V::at(shift, at);
                let e = match (self.1, in_range) {
                    (true, _) => x.exp(),
                    (false, true) => x.exp_fast_in_range(),
                    (false, false) => x.exp_fast(),
                };
                o.put(at, (e * V::at(inverse, at)).round_ties_away());
            });
        }
    }
}

fn helpers<T: Element>(x: &[T], exact: bool) -> Result<Vec<T>> {
    let mut o = vec![T::from_f64(f64::NAN); x.len()];
    let view = View::new(x, &[9, x.len() / 9])?;
    let output = ViewMut::new(&mut o, &[9, x.len() / 9])?;
    let operands = Operands::plain(("x", view), [("x", Some(view))], [("o", Some(output))]);
    let rows = Rows::new("test", operands)?;
    rows.for_each_task(9, |task| dispatch(isa(), T::DTYPE, Helpers(task, exact)));
    Ok(o)
}

#[test]
fn helpers_agree_with_the_operator() -> Result<()> {
    for_each_isa(|| {
        let x: Vec<f32> = numbers(9 * 37, 4, 5.0);
        let view = View::new(&x, &[9, 37])?;
        let by_columns = Softmax::over(0).forward(view.narrow(0, 0, 5)?)?;
        let by_rows = Softmax::over(1).forward(view.narrow(0, 5, 4)?)?;
        for exact in [false, true] {
            let o = helpers(&x, exact)?;
            assert_eq!(o[..5 * 37], *by_columns.as_slice::<f32>()?);
            assert_eq!(o[5 * 37..], *by_rows.as_slice::<f32>()?);
        }
        // In 16 bits, columns in range and those that are not, side by side.
        let mut x: Vec<bf16> = numbers(9 * 37, 4, 5.0);
        for far in [false, true] {
            let view = View::new(&x, &[9, 37])?;
            let by_columns = Softmax::over(0).forward(view.narrow(0, 0, 5)?)?;
            assert_eq!(helpers(&x, false)?[..5 * 37], *by_columns.as_slice::<bf16>()?, "{far}");
            x[37 + 20] = bf16::from_f32(300.0);
            x[2 * 37 + 3] = bf16::NEG_INFINITY;
        }
        Ok(())
    })
}

/// In formats of 16 bits, columns without a maximum, with one, of nothing but minus infinity, and with a
/// NaN, in one block.
#[test]
fn columns_are_what_they_are_alone() -> Result<()> {
    fn check<T: Element>(columns: usize, softmax: Softmax) -> Result<()> {
        let n = 70;
        let mut x: Vec<T> = numbers(n * columns, 7, 4.0);
        for (i, x) in x.iter_mut().enumerate() {
            match (i % columns % 11, i / columns) {
                (3, 5) => *x = T::from_f64(300.0),
                (5, 0) => *x = T::from_f64(-200.0),
                (7, _) | (9, 1..) => *x = T::from_f64(-INF),
                (8, 69) => *x = T::from_f64(f64::NAN),
                _ => {}
            }
        }
        let view = View::new(&x, &[n, columns])?;
        let together = softmax.forward(view)?;
        for column in 0..columns {
            let alone = softmax.forward(view.narrow(1, column, 1)?)?.view().to_f64_vec();
            let got = together.view().narrow(1, column, 1)?.to_f64_vec();
            let same = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
            assert!(got.iter().zip(&alone).all(same), "{column} of {columns}, {}", T::DTYPE);
            let masked = column % 11 == 7 && !softmax.zero_masked_rows;
            assert_eq!(got[0].is_nan(), column % 11 == 8 || masked);
        }
        Ok(())
    }
    for_each_isa(|| {
        for (columns, zero_masked_rows) in [(11, true), (40, false), (64, true), (131, false)] {
            let softmax = Softmax { zero_masked_rows, ..Softmax::over(0) };
            check::<bf16>(columns, softmax)?;
            check::<f16>(columns, softmax)?;
            check::<f32>(columns, softmax)?;
        }
        Ok(())
    })
}
