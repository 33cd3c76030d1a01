//! In the steady state a call allocates no more than a few small things, and never anything of the
//! size of a tensor.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use fuselane::{
    Act, Cosine, CosineBackward, DType, FusedAct, Normalize, NormalizeBackward, NormalizeForward,
    Residual, Result, Rotate, RotateBackward, Softmax, TokenLayout, View, ViewMut,
};
use half::bf16;

/// Counts what the system's allocator is asked for.
struct Counting;

static LARGEST: AtomicUsize = AtomicUsize::new(0);
static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls go to the system's allocator as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The largest allocation of a call in the steady state, in bytes.
const SMALL: usize = 4096;
/// The most allocations of such a call.
const FEW: usize = 16;
/// The largest allocation of a first call, which fills the scratch of its threads: one row of the longest
/// ones in f32, and what aligns it.
const SCRATCH: usize = (2 << 20) + 64;

/// What `f` allocates: the count, and the largest.
fn measure(f: impl FnOnce()) -> (usize, usize) {
    LARGEST.store(0, Ordering::Relaxed);
    COUNT.store(0, Ordering::Relaxed);
    f();
    (COUNT.load(Ordering::Relaxed), LARGEST.load(Ordering::Relaxed))
}

/// Checks the first and later runs of a call, on one thread and on two.
fn check(what: &str, mut call: impl FnMut() -> Result<()> + Send) {
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let (_, largest) = measure(|| call().unwrap());
            assert!(largest <= SCRATCH, "{what}: {largest} bytes at once in a first call");
            call().unwrap();
            let (count, largest) = measure(|| {
                for _ in 0..3 {
                    call().unwrap();
                }
            });
            println!(
                "{what}: {threads} threads: {count} allocations in 3 calls, at most {largest} bytes"
            );
            if threads == 1 {
                assert!(largest <= SMALL, "{what}: {largest} bytes at once");
                assert!(count <= 3 * FEW, "{what}: {count} allocations in 3 calls");
            } else {
                // Which thread gets which work is chance, so one may still meet work that is new to it.
                assert!(largest <= SCRATCH, "{what}: {largest} bytes at once");
            }
        });
    }
}

// One test, because the counters are the process's.
#[test]
fn nothing_of_tensor_size() {
    // 8 MiB of bf16.
    let shape = [2, 512, 32, 128];
    let len: usize = shape.iter().product();
    let [x, grad] = [0.5f32, -0.25].map(|v| vec![bf16::from_f32(v); len]);
    let wide_grad = vec![bf16::ONE; 2 * len];
    let [mut o, mut dx, mut dgate] = [(); 3].map(|()| vec![bf16::ZERO; len]);
    let mut wide = vec![bf16::ZERO; 2 * len];
    let theta = vec![0.1f32; 32 * 128];
    let mut dtheta = vec![0.0f32; 32 * 128];
    let rows = 2 * 512;
    let width = 32 * 128;
    let [mut rstd, mut mean] = [(); 2].map(|()| vec![0.0f32; rows]);
    let [weight, bias] = [1.0f32, 0.5].map(|v| vec![v; width]);
    let [mut dweight, mut dbias] = [(); 2].map(|()| vec![0.0f32; width]);
    let x4 = View::new(&x, &shape).unwrap();
    let grad4 = View::new(&grad, &shape).unwrap();

    for act in [Act::None, Act::Gelu] {
        check(&format!("act {act}"), || {
            act.forward_into(x4, ViewMut::new(&mut o, &shape)?)?;
            act.backward_into(x4, grad4, ViewMut::new(&mut dx, &shape)?)?;
            act.forward_in_place(ViewMut::new(&mut dx, &shape)?)
        });
    }
    for dim in [-1, 1, 0] {
        let softmax = Softmax::over(dim);
        check(&format!("softmax {dim}"), || {
            softmax.forward_into(x4, ViewMut::new(&mut o, &shape)?)?;
            softmax.backward_into(x4, grad4, ViewMut::new(&mut dx, &shape)?)?;
            softmax.backward_from_input_into(x4, grad4, ViewMut::new(&mut dx, &shape)?)
        });
    }
    let long = [8, len / 8];
    check("softmax of long rows", || {
        let x = View::new(&x, &long)?;
        Softmax::over(-1).forward_into(x, ViewMut::new(&mut o, &long)?)?;
        Softmax::over(-1).backward_into(x, View::new(&grad, &long)?, ViewMut::new(&mut dx, &long)?)
    });
    // More than most last-level caches, in rows that stores past them have to be gathered for.
    let odd = [300_001, 127];
    let many = vec![bf16::from_f32(0.5); odd[0] * odd[1]];
    let mut results = vec![bf16::ZERO; odd[0] * odd[1]];
    check("softmax of odd rows", || {
        let x = View::new(&many, &odd)?;
        Softmax::over(-1).forward_into(x, ViewMut::new(&mut results, &odd)?)?;
        Softmax::over(-1).backward_into(x, x, ViewMut::new(&mut results, &odd)?)
    });
    drop((many, results));
    for norm in
        [Normalize::rms_norm(), Normalize::layer_norm(), Normalize::layer_norm().with_groups(8)]
    {
        let kept = [rows, norm.groups];
        rstd.resize(rows * norm.groups, 0.0);
        mean.resize(rows * norm.groups, 0.0);
        let flat = [rows, width];
        check(&format!("normalize, center {}, {} groups", norm.center, norm.groups), || {
            let (x, grad) = (View::new(&x, &flat)?, View::new(&grad, &flat)?);
            let (weight, bias) = (View::new(&weight, &[width])?, View::new(&bias, &[width])?);
            norm.forward_into(NormalizeForward {
                x,
                weight: Some(weight),
                bias: Some(bias),
                gate: Some(grad),
                residual: Residual::AddInto(grad, ViewMut::new(&mut dx, &flat)?),
                o: ViewMut::new(&mut o, &flat)?,
                rstd: Some(ViewMut::new(&mut rstd, &kept)?),
                mean: if norm.center { Some(ViewMut::new(&mut mean, &kept)?) } else { None },
            })?;
            let mean = if norm.center { Some(View::new(&mean, &kept)?) } else { None };
            norm.backward_into(NormalizeBackward {
                gate: Some(grad),
                weight: Some(weight),
                bias: Some(bias),
                mean,
                dx: Some(ViewMut::new(&mut dx, &flat)?),
                dgate: Some(ViewMut::new(&mut dgate, &flat)?),
                dweight: Some(ViewMut::new(&mut dweight, &[width])?),
                dbias: Some(ViewMut::new(&mut dbias, &[width])?),
                ..NormalizeBackward::new(grad, x, View::new(&rstd, &kept)?)
            })
        });
    }
    for act in [
        FusedAct::default(),
        Act::Silu.into(),
        FusedAct::SoftmaxFeatures,
        FusedAct::SoftmaxSequence,
    ] {
        for layout in [TokenLayout::TokensHeads, TokenLayout::HeadsTokens] {
            let heads = if layout == TokenLayout::TokensHeads { 32 } else { 1 };
            let half = [heads, 64];
            // Many tokens in either layout: a softmax over the sequence keeps two numbers for each
            // head and feature.
            let shape = match layout {
                TokenLayout::TokensHeads => shape,
                TokenLayout::HeadsTokens => [2, 32, 512, 128],
            };
            let (x4, grad4) = (x4.reshape(&shape).unwrap(), grad4.reshape(&shape).unwrap());
            check(&format!("rotate {act} {layout:?}"), || {
                let rotate = Rotate { act, layout, ..Rotate::default() };
                let theta = View::new(&theta[..heads * 64], &half)?;
                rotate.forward_into(x4, theta, ViewMut::new(&mut o, &shape)?)?;
                for learned in [false, true] {
                    let dtheta = ViewMut::new(&mut dtheta[..heads * 64], &half)?;
                    rotate.backward_into(RotateBackward {
                        x: Some(x4),
                        grad: grad4,
                        angles: theta.into(),
                        dx: Some(ViewMut::new(&mut dx, &shape)?),
                        dtheta: Some(dtheta).filter(|_| learned),
                    })?;
                }
                Ok(())
            });
            let full = [heads, 128];
            let wide_shape = [shape[0], shape[1], shape[2], 256];
            check(&format!("cosine {act} {layout:?}"), || {
                let cosine = Cosine { act, layout, ..Cosine::default() };
                let theta = View::new(&theta[..heads * 128], &full)?;
                cosine.forward_into(x4, theta, ViewMut::new(&mut wide, &wide_shape)?)?;
                cosine.backward_into(CosineBackward {
                    x: Some(x4),
                    grad: View::new(&wide_grad, &wide_shape)?,
                    angles: theta.into(),
                    dx: Some(ViewMut::new(&mut dx, &shape)?),
                    dtheta: Some(ViewMut::new(&mut dtheta[..heads * 128], &full)?),
                })
            });
        }
    }

    // The convenience form reuses the pool's memory.
    let forward = || drop(Act::Gelu.forward(x4).unwrap());
    forward();
    let (_, largest) = measure(forward);
    assert!(largest <= SMALL, "a pooled output was allocated anew: {largest} bytes");
    assert_eq!(x4.dtype(), DType::BF16);
}
