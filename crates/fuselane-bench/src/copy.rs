//! Copies of memory, and how fast this machine makes them.
//!
//! The copy with non-temporal stores is the yardstick of every operator: above the size of the
//! last-level cache a plain store first reads the line that it is about to overwrite, and so a
//! plain copy moves a half more than it has to. Rates count the bytes read plus the bytes written.
//! The system's own copy stands beside it; for large sizes it may store non-temporally as well.
//!
//! The buffers come from fuselane's pool, as the operators' outputs do: on huge pages where the
//! system allows.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fuselane::{Buffer, DType, pool};
use rayon::prelude::*;
use serde::Serialize;

/// Copies on several threads are cut at multiples of this.
const PIECE: usize = 64 << 10;

/// How bytes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// The system's copy, one call per thread.
    Memcpy,
    /// Non-temporal stores, straight on.
    Streaming,
    /// Non-temporal stores, four pages interleaved.
    Interleaved,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy",
            Self::Streaming => "streaming",
            Self::Interleaved => "interleaved",
        }
    }

    /// Whether this CPU can.
    pub(crate) fn is_available(self) -> bool {
        match self {
            Self::Memcpy => true,
            Self::Streaming | Self::Interleaved => can_stream(),
        }
    }

    /// Copies on this thread.
    fn copy(self, from: &[u8], to: &mut [u8]) {
        match self {
            Self::Memcpy => to.copy_from_slice(from),
            Self::Streaming => stream(from, to),
            Self::Interleaved => stream_by::<true>(from, to),
        }
    }

    /// Copies with all threads that operators run on, each of which takes some pieces.
    fn copy_parallel(self, from: &[u8], to: &mut [u8]) {
        let piece = from.len().div_ceil(4 * rayon::current_num_threads()).max(1);
        let piece = piece.next_multiple_of(PIECE);
        // Each lock is taken once.
        let pieces: Vec<_> = to.chunks_mut(piece).zip(from.chunks(piece)).map(Mutex::new).collect();
        fuselane::for_each_task(pieces.len(), |i| {
            let (to, from) = &mut *pieces[i].lock().unwrap_or_else(PoisonError::into_inner);
            self.copy(from, to);
        });
    }
}

#[cfg(target_arch = "x86_64")]
fn can_stream() -> bool {
    is_x86_feature_detected!("avx")
}

#[cfg(not(target_arch = "x86_64"))]
fn can_stream() -> bool {
    false
}

/// Copies with non-temporal stores where this CPU can, and plainly elsewhere.
///
/// # Panics
/// When the lengths differ.
pub(crate) fn stream(from: &[u8], to: &mut [u8]) {
    stream_by::<false>(from, to);
}

/// [`stream`], straight on or interleaved.
fn stream_by<const TURNS: bool>(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "both sides of a copy have one length");
    #[cfg(target_arch = "x86_64")]
    if can_stream() {
        // SAFETY: the CPU has AVX, as was just found.
        unsafe { stream_avx::<TURNS>(from, to) };
        return;
    }
    to.copy_from_slice(from);
}

/// Straight on, each block asks for the one that is [`AHEAD`] of it. With `IN_TURNS`, four pages take
/// turns, and each block asks for the next one of its page. Which is the faster depends on the CPU:
/// turns by up to a fifth on one (Ice Lake), straight on by up to two fifths on another (Zen 4).
///
/// # Safety
/// The CPU has AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream_avx<const IN_TURNS: bool>(from: &[u8], to: &mut [u8]) {
    const PAGE: usize = 4096;
    const TURNS: usize = 4 * PAGE;

    // Up to a cache line's border, so that every line is stored whole.
    let head = to.as_ptr().align_offset(64).min(to.len());
    let (from_head, from) = from.split_at(head);
    let (to_head, to) = to.split_at_mut(head);
    to_head.copy_from_slice(from_head);

    let pages = if IN_TURNS { from.len() / TURNS * TURNS } else { 0 };
    let (from_pages, from) = from.split_at(pages);
    let (to_pages, to) = to.split_at_mut(pages);
    let (from_pages, to_pages) =
        (from_pages.as_chunks::<TURNS>().0, to_pages.as_chunks_mut::<TURNS>().0);
    for (from, to) in from_pages.iter().zip(to_pages) {
        for offset in (0..PAGE).step_by(BLOCK) {
            for page in (0..TURNS).step_by(PAGE) {
                let (from, to) = (&from[page + offset..], &mut to[page + offset..]);
                if let (Some(from), Some(to)) = (from.first_chunk(), to.first_chunk_mut()) {
                    // SAFETY: the CPU has AVX. `to` is aligned: `head` was cut off for it, and
                    // all steps are multiples of 64.
                    unsafe { stream_block::<BLOCK>(from, to) };
                }
            }
        }
    }

    let (from_blocks, from_tail) = from.as_chunks();
    let (to_blocks, to_tail) = to.as_chunks_mut();
    for (from, to) in from_blocks.iter().zip(to_blocks) {
        // SAFETY: as above.
        unsafe { stream_block::<AHEAD>(from, to) };
    }
    to_tail.copy_from_slice(from_tail);
    // Streamed stores are weakly ordered; the fence makes them seen before whatever this thread
    // does next, such as telling another thread that the copy is done.
    std::arch::x86_64::_mm_sfence();
}

/// Two cache lines, in four registers.
#[cfg(target_arch = "x86_64")]
const BLOCK: usize = 128;

/// How far ahead a copy that goes straight on asks for memory, in bytes; 1 to 4 KiB were the same.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 2048;

/// # Safety
/// The CPU has AVX, and `to` is aligned to 32 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
#[inline]
unsafe fn stream_block<const AHEAD: usize>(from: &[u8; BLOCK], to: &mut [u8; BLOCK]) {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm256_stream_si256,
    };
    let next = from.as_ptr().wrapping_add(AHEAD).cast::<i8>();
    let from = from.as_ptr().cast::<__m256i>();
    let to = to.as_mut_ptr().cast::<__m256i>();
    // SAFETY: `from` and `to` point to `BLOCK` bytes, which are four registers; the caller
    // promises the alignment that a streamed store needs. A prefetch may take any address.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(next);
        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(64));
        let a = _mm256_loadu_si256(from);
        let b = _mm256_loadu_si256(from.add(1));
        let c = _mm256_loadu_si256(from.add(2));
        let d = _mm256_loadu_si256(from.add(3));
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to.add(1), b);
        _mm256_stream_si256(to.add(2), c);
        _mm256_stream_si256(to.add(3), d);
    }
}

/// A kind of copy on one thread or on all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Way {
    kind: Kind,
    parallel: bool,
}

impl Way {
    pub(crate) const ALL: [Self; 6] = [
        Self { kind: Kind::Memcpy, parallel: false },
        Self { kind: Kind::Memcpy, parallel: true },
        Self { kind: Kind::Streaming, parallel: false },
        Self { kind: Kind::Streaming, parallel: true },
        Self { kind: Kind::Interleaved, parallel: false },
        Self { kind: Kind::Interleaved, parallel: true },
    ];

    /// Whether this CPU can.
    pub(crate) fn is_available(self) -> bool {
        self.kind.is_available()
    }

    pub(crate) fn copy(self, from: &[u8], to: &mut [u8]) {
        if self.parallel {
            self.kind.copy_parallel(from, to);
        } else {
            self.kind.copy(from, to);
        }
    }
}

/// The bytes of floats.
pub(crate) fn bytes(numbers: &mut [f32]) -> &mut [u8] {
    // SAFETY: floats have no padding, and any bytes are floats.
    let (head, bytes, tail) = unsafe { numbers.align_to_mut::<u8>() };
    debug_assert!(head.is_empty() && tail.is_empty(), "a byte has no alignment");
    bytes
}

/// One way to copy, measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Rate {
    pub(crate) kind: Kind,
    pub(crate) threads: usize,
    /// 10^9 bytes read or written per second, in the fastest round.
    pub(crate) best_gb_s: f64,
    /// The same in the median round.
    pub(crate) median_gb_s: f64,
}

/// All of them, measured in one run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Bandwidth {
    /// Bytes copied each time.
    pub(crate) buffer_bytes: usize,
    /// How often each one was measured.
    pub(crate) rounds: usize,
    pub(crate) rates: Vec<Rate>,
}

/// Copies measured per round: the steps that [`measure`] reports.
pub(crate) fn copies_per_round() -> usize {
    cases().len()
}

fn cases() -> Vec<(Kind, usize)> {
    let all = rayon::current_num_threads();
    let threads = if all > 1 { vec![1, all] } else { vec![1] };
    let kinds = [Kind::Memcpy, Kind::Streaming, Kind::Interleaved]
        .into_iter()
        .filter(|kind| kind.is_available());
    kinds.flat_map(|kind| threads.iter().map(move |&threads| (kind, threads))).collect()
}

/// Measures every kind of copy of `buffer_bytes`, on one thread and on all, after one round that
/// does not count. The kinds take turns within a round, so that what else the machine does falls
/// on all of them.
/// `step` is called after each copy. An error means that there is no memory for two buffers.
pub(crate) fn measure(
    buffer_bytes: usize,
    rounds: usize,
    step: impl Fn(),
) -> fuselane::Result<Bandwidth> {
    let shape = [buffer_bytes.div_ceil(DType::F32.size())];
    let (mut from, mut to) =
        (Buffer::zeros(DType::F32, &shape)?, Buffer::zeros(DType::F32, &shape)?);
    let bandwidth =
        measure_between(bytes(from.as_mut_slice()?), bytes(to.as_mut_slice()?), rounds, step);
    drop((from, to));
    pool::trim();
    Ok(bandwidth)
}

fn measure_between(from: &mut [u8], to: &mut [u8], rounds: usize, step: impl Fn()) -> Bandwidth {
    let buffer_bytes = from.len();
    // Untouched zero pages may all be one page, and then they are read from cache.
    from.par_chunks_mut(1 << 20).for_each(|chunk| chunk.fill(0x5a));
    let cases = cases();
    let mut times = vec![Vec::with_capacity(rounds); cases.len()];
    for round in 0..=rounds {
        for (&(kind, threads), times) in cases.iter().zip(&mut times) {
            let start = Instant::now();
            if threads == 1 {
                kind.copy(from, to);
            } else {
                kind.copy_parallel(from, to);
            }
            let time = start.elapsed();
            std::hint::black_box(&*to);
            if round > 0 {
                times.push(time);
            }
            step();
        }
    }
    let rates = cases.iter().zip(times).map(|(&(kind, threads), times)| {
        let (best, median) = best_and_median(times);
        let rate = |time: Duration| 2.0 * buffer_bytes as f64 / time.as_secs_f64().max(1e-9) / 1e9;
        Rate { kind, threads, best_gb_s: rate(best), median_gb_s: rate(median) }
    });
    Bandwidth { buffer_bytes, rounds, rates: rates.collect() }
}

/// The shortest time and the median one (the longer of the middle two).
fn best_and_median(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    let at = |index: usize| times.get(index).copied().unwrap_or_default();
    (at(0), at(times.len() / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every length and offset around the sizes of registers and blocks, with guards: what lies
    /// outside the copied part keeps its value.
    #[test]
    fn copies_odd_sizes_and_offsets() {
        const GUARD: u8 = 0xee;
        let from: Vec<u8> = (0..40_000u32).map(|i| (i * 7 + i / 256) as u8 % 0xee).collect();
        for kind in [Kind::Memcpy, Kind::Streaming, Kind::Interleaved] {
            let long = [255, 256, 257, 1025, 16_384, 16_415, 16_511, 16_640, 33_003];
            for len in (0..=193).chain(long) {
                for from_offset in [0, 1, 3, 16, 31] {
                    for to_offset in [0, 1, 2, 15, 16, 31, 32, 33, 63] {
                        let mut to = vec![GUARD; to_offset + len + 64];
                        let part = &from[from_offset..from_offset + len];
                        kind.copy(part, &mut to[to_offset..to_offset + len]);
                        assert_eq!(&to[to_offset..to_offset + len], part);
                        assert!(to[..to_offset].iter().all(|&byte| byte == GUARD));
                        assert!(to[to_offset + len..].iter().all(|&byte| byte == GUARD));
                    }
                }
            }
        }
    }

    #[test]
    fn copies_in_parallel() {
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for len in [0, 1, 2, 6, 7, 1000, 100_003] {
                let from: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
                for kind in [Kind::Memcpy, Kind::Streaming, Kind::Interleaved] {
                    let mut to = vec![0xee; len];
                    pool.install(|| kind.copy_parallel(&from, &mut to));
                    assert_eq!(from, to);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "one length")]
    fn refuses_different_lengths() {
        stream(&[1, 2, 3], &mut [0, 0]);
    }

    #[test]
    fn measures_every_case() {
        let steps = std::cell::Cell::new(0);
        let bandwidth = measure(1 << 20, 3, || steps.set(steps.get() + 1)).unwrap();
        assert_eq!(steps.get(), copies_per_round() * 4);
        assert_eq!(bandwidth.rates.len(), copies_per_round());
        for rate in &bandwidth.rates {
            assert!(rate.median_gb_s > 0.0 && rate.best_gb_s >= rate.median_gb_s, "{rate:?}");
        }
    }

    #[test]
    fn no_memory_is_an_error() {
        assert!(measure(usize::MAX / 8, 1, || ()).is_err());
    }

    #[test]
    fn medians() {
        let ms = |values: &[u64]| values.iter().map(|&v| Duration::from_millis(v)).collect();
        let both = |best, median| (Duration::from_millis(best), Duration::from_millis(median));
        assert_eq!(best_and_median(ms(&[5, 1, 3])), both(1, 3));
        assert_eq!(best_and_median(ms(&[4, 1, 3, 2])), both(1, 3));
    }
}
