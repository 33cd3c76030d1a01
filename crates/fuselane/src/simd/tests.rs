//! Tests of what instruction sets have in common: loads, stores, rounding, sums.

use super::*;

/// Runs `test` for every instruction set and element type.
fn everywhere<K: Kernel>(test: impl Fn(&'static str) -> K) {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for isa in Isa::available() {
            dispatch(isa, dtype, test(isa.name()));
        }
    }
}

/// Numbers whose magnitudes differ, and whose signs do, so that the order of additions shows. Out of
/// line, as other instructions would round otherwise.
#[inline(never)]
fn mixed(i: usize) -> f32 {
    let size = 1.5f32.powi((i * 7 % 23) as i32);
    if i.is_multiple_of(3) { -size } else { size + i as f32 * 1e-3 }
}

fn block_of<S: Simd>(from: usize) -> V<S> {
    V::load_f32(&std::array::from_fn(|i| mixed(from + i)))
}

fn numbers<S: Simd>(block: V<S>) -> [f32; LANES] {
    let mut numbers = [0.0; LANES];
    block.store_f32(&mut numbers);
    numbers
}

struct Sums(&'static str);

impl Kernel for Sums {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let blocks: [V<S>; 8] = std::array::from_fn(|k| block_of(k * LANES));
        let together = S::sum_eight(&blocks.map(|block| block.0));
        assert_eq!(together, blocks.map(|block| block.sum()), "{}", self.0);
    }
}

#[test]
fn sums_of_eight_blocks_are_the_same() {
    everywhere(Sums);
}

/// Reads each block of rows that end where readable memory does.
#[cfg(target_os = "linux")]
struct AtTheEdge {
    isa: &'static str,
    /// The first byte that is not readable, behind a writable page.
    edge: *mut u8,
}

#[cfg(target_os = "linux")]
impl Kernel for AtTheEdge {
    #[inline(always)]
    fn run<S: Simd>(self) {
        for len in 0..=50 {
            // SAFETY: the page before the edge is larger than the row, and written below.
            let row = unsafe {
                let start = self.edge.cast::<S::Elem>().sub(len);
                for i in 0..len {
                    start.add(i).write(S::Elem::from_real(1.0));
                }
                std::slice::from_raw_parts(start, len)
            };
            for i in 0..len + 3 {
                let inside = len.saturating_sub(i).min(LANES);
                let block = if inside == LANES {
                    // SAFETY: the row holds a block from `i` on.
                    V::<S>(unsafe { S::load(row.as_ptr().add(i)) })
                } else {
                    V(S::load_tail(row, i))
                };
                assert_eq!(block.sum(), inside as f32, "{}: at {i} of {len}", self.isa);
            }
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn nothing_behind_a_row_is_read() {
    // SAFETY: two new pages, of which the second may not be touched from here on.
    let edge = unsafe {
        let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
        let map = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let start = libc::mmap(std::ptr::null_mut(), 2 * page, both, map, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        let edge = start.cast::<u8>().add(page);
        assert_eq!(libc::mprotect(edge.cast(), page, libc::PROT_NONE), 0);
        edge
    };
    everywhere(|isa| AtTheEdge { isa, edge });
}

/// Reads each block of rows of many lengths, to f32 in index order and back to elements.
struct Blocks(&'static str);

impl Kernel for Blocks {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let all: [S::Elem; 50] = std::array::from_fn(|i| S::Elem::from_real(1.0 + i as f32));
        for len in 0..=all.len() {
            // Of another row behind this one, nothing may be seen.
            let row = &all[..len];
            for i in 0..len + 3 {
                let block = if i + LANES <= len {
                    // SAFETY: the row holds a block from `i` on.
                    V::<S>(unsafe { S::load(row.as_ptr().add(i)) })
                } else {
                    V(S::load_tail(row, i))
                };
                let wanted: [f32; LANES] =
                    std::array::from_fn(|k| row.get(i + k).map_or(0.0, |e| e.to_real()));
                assert_eq!(numbers(block), wanted, "{}: the block at {i} of {len}", self.0);
                for packed in [block.round(), block.round_ties_away(), block.truncate()] {
                    let mut stored = [S::Elem::default(); LANES];
                    // SAFETY: the array holds a block.
                    unsafe { S::store(packed, stored.as_mut_ptr()) };
                    assert_eq!(stored.map(|e| e.to_real()), wanted, "{}", self.0);
                }
            }
        }
    }
}

#[test]
fn blocks_end_where_their_rows_do() {
    everywhere(Blocks);
}

/// Blocks that are kept in the order of lanes, or stored without their halves being swapped.
struct Orders(&'static str);

impl Kernel for Orders {
    #[inline(always)]
    fn run<S: Simd>(self) {
        #[repr(align(64))]
        struct Aligned<T>(T);
        let block = block_of::<S>(5);
        let wanted: [f32; LANES] = std::array::from_fn(|i| mixed(5 + i));
        assert_eq!(numbers(block), wanted, "{}", self.0);
        let mut lanes = [0.0; LANES];
        // SAFETY: the array holds a block.
        let again = unsafe {
            S::store_lanes(block.0, lanes.as_mut_ptr());
            V::<S>(S::load_lanes(lanes.as_ptr()))
        };
        assert_eq!(numbers(again), wanted, "{}", self.0);
        let pairs: [f32; LANES] = std::array::from_fn(|i| wanted[i ^ 1]);
        assert_eq!(numbers(block.swap_pairs()), pairs, "{}", self.0);
        let first: [f32; LANES] = std::array::from_fn(|i| if i < 7 { wanted[i] } else { -3.0 });
        assert_eq!(numbers(block.first(7, -3.0)), first, "{}", self.0);

        let elements = wanted.map(S::Elem::from_real).map(|e| e.to_real());
        let packed = block.round();
        let mut past = Aligned([S::Elem::default(); 2 * LANES]);
        // SAFETY: the array holds two blocks, and is aligned to a cache line.
        unsafe { S::store_line_non_temporal([packed; 2], past.0.as_mut_ptr()) };
        S::fence();
        assert_eq!(past.0.map(|e| e.to_real()), std::array::from_fn(|i| elements[i % LANES]));
        let mut past = Aligned([S::Elem::default(); LANES]);
        // SAFETY: the array holds a block, and is aligned to a cache line.
        unsafe { S::store_non_temporal(packed, past.0.as_mut_ptr()) };
        S::fence();
        assert_eq!(past.0.map(|e| e.to_real()), elements);
    }
}

#[test]
fn blocks_keep_their_order() {
    everywhere(Orders);
}

/// Rounding, for representations of all sizes and low halves, with ties among them.
struct Rounding(&'static str);

impl Kernel for Rounding {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let stored = |packed: S::Packed| {
            let mut stored = [S::Elem::default(); LANES];
            // SAFETY: the array holds a block.
            unsafe { S::store(packed, stored.as_mut_ptr()) };
            stored.map(|e| e.to_real())
        };
        for bits in (0..=u32::MAX).step_by(0x7_1003) {
            let low = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
            let x: [f32; LANES] =
                std::array::from_fn(|i| f32::from_bits(bits & !0xFFFF | low[i % low.len()]));
            if x[0].is_nan() || x[1].is_nan() {
                continue;
            }
            let nearest = x.map(|x| S::Elem::from_real(x).to_real());
            assert_eq!(stored(V::<S>::load_f32(&x).round()), nearest, "{} {x:?}", self.0);
            let away = stored(V::<S>::load_f32(&x).round_ties_away());
            for ((x, away), nearest) in x.into_iter().zip(away).zip(nearest) {
                let error = |y: f32| (f64::from(x) - f64::from(y)).abs();
                assert!(away == nearest || error(away) == error(nearest), "{} {x:e}", self.0);
            }
        }
    }
}

#[test]
fn elements_are_rounded_to_nearest() {
    everywhere(Rounding);
}

/// Largest numbers and clamps, with NaN among them.
struct Largest(&'static str);

impl Kernel for Largest {
    #[inline(always)]
    fn run<S: Simd>(self) {
        for at in 0..LANES {
            let mut x: [f32; LANES] = std::array::from_fn(|i| mixed(i) - 5e4);
            x[at] = 7.0;
            assert_eq!(V::<S>::load_f32(&x).largest(), 7.0, "{}", self.0);
            x[at] = f32::NAN;
            let block = V::<S>::load_f32(&x);
            assert!(block.largest().is_nan(), "{}", self.0);
            let is_nan = numbers(block.clamp(-1.0, 1.0)).map(f32::is_nan);
            assert_eq!(is_nan, std::array::from_fn(|i| i == at), "{}", self.0);
        }
    }
}

#[test]
fn largest_numbers_keep_nan() {
    everywhere(Largest);
}
