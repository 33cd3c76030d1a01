//! Reusable output memory.
//!
//! A fresh large output costs several times what a kernel takes, as the system maps and clears each page
//! at the first touch. So the short forms of the operators return a [`Buffer`], whose memory comes from a
//! process-wide pool and goes back to it when dropped. Large blocks are aligned to 2 MiB and, on Linux,
//! advised to use huge pages.
//!
//! The pool keeps at most [`limit`] bytes of unused blocks (a quarter of the machine's memory unless
//! [`set_limit`] says otherwise), and none after `set_limit(0)` or with `FUSELANE_POOL=0` in the
//! environment; [`trim`] gives all of them back.
//!
//! ```
//! use fuselane::{Act, View, pool};
//! let x = vec![-1.0f32; 1 << 20];
//! for _ in 0..3 {
//!     let o = Act::Relu.forward(View::new(&x, &[1 << 20])?)?; // the same memory each time
//!     assert_eq!(o.as_slice::<f32>()?[0], 0.0);
//! }
//! assert!(pool::stats().reused >= 2);
//! pool::trim();
//! # Ok::<(), fuselane::Error>(())
//! ```

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::exec::scratch::Plain;
use crate::view::{self, View, ViewMut};

/// The size and alignment of a huge page, and the alignment of large blocks.
const HUGE: usize = 2 << 20;
/// The alignment of small blocks: a cache line.
const LINE: usize = 64;
/// The unit of large blocks.
const PAGE: usize = 4096;
/// Places for large blocks, a huge page apart, one after the other. See [`Block::new`].
const PLACES: usize =
    if cfg!(all(target_os = "linux", target_pointer_width = "64")) { 16 } else { 1 };

/// What the pool holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Bytes of unused blocks kept for reuse.
    pub held_bytes: usize,
    /// Bytes of blocks that live buffers use.
    pub used_bytes: usize,
    /// Buffers served from a kept block so far.
    pub reused: usize,
    /// Buffers that needed new memory so far.
    pub fresh: usize,
}

#[derive(Default)]
struct Pool {
    free: BTreeMap<usize, Vec<Block>>,
    stats: Stats,
}

/// Memory of a size class.
struct Block {
    ptr: NonNull<u8>,
    bytes: usize,
    /// Where the allocation begins that the block is in.
    begin: NonNull<u8>,
}

// SAFETY: a block is owned memory; whoever holds the `Block` is its only owner.
unsafe impl Send for Block {}
// SAFETY: a shared `Block` gives no access to its memory by itself.
unsafe impl Sync for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `Block::at` allocated this with the same layout.
        unsafe { dealloc(self.begin.as_ptr(), block_layout(self.bytes)) }
    }
}

/// Of the allocation for a block: a large one has room for all its places.
fn block_layout(bytes: usize) -> Layout {
    let (bytes, align) = match bytes {
        HUGE.. => (bytes + (PLACES - 1) * HUGE, HUGE),
        _ => (bytes, LINE),
    };
    // SAFETY: the alignments are powers of two, and `class` keeps `bytes` far enough below
    // isize::MAX.
    unsafe { Layout::from_size_align_unchecked(bytes, align) }
}

/// Bytes from `address` to the next place whose turn it is.
fn to_place(address: usize, turn: usize) -> usize {
    turn.wrapping_sub(address / HUGE) % PLACES * HUGE
}

impl Block {
    /// Large blocks begin at different multiples of a huge page, modulo sixteen of them. The
    /// first-level caches of AMD's CPUs find a line by a hash of its address: rows of two tensors that
    /// are a multiple of 256 MiB apart push each other out. (Norm with a gate backward, bf16, Zen 4:
    /// 4.8 ms, and 7.4 if all tensors are.) Address space that is not touched takes no memory.
    fn new(bytes: usize) -> Option<Self> {
        static TURN: AtomicUsize = AtomicUsize::new(0);
        Self::at(bytes, TURN.fetch_add(1, Ordering::Relaxed))
    }

    /// A block whose place is that of a turn, if it is large.
    fn at(bytes: usize, turn: usize) -> Option<Self> {
        // SAFETY: `class` never gives zero bytes.
        let begin = NonNull::new(unsafe { alloc(block_layout(bytes)) })?;
        let ptr = if bytes >= HUGE {
            // SAFETY: less than PLACES huge pages on, as far as the layout has room.
            unsafe { begin.add(to_place(begin.addr().get(), turn)) }
        } else {
            begin
        };
        #[cfg(target_os = "linux")]
        if bytes >= HUGE {
            // SAFETY: advice about memory that this block owns; a refusal changes nothing. It has
            // to come before the first touch, which decides the size of the pages.
            unsafe { libc::madvise(ptr.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        // SAFETY: the block is that long. Every byte of a buffer is then initialised.
        unsafe { ptr.write_bytes(0, bytes) };
        Some(Self { ptr, bytes, begin })
    }
}

/// The size of a new block for `bytes`: whole pages for large ones; for others steps of a sixteenth of
/// the next power of two, at least a cache line. `None` when it cannot exist.
fn class(bytes: usize) -> Option<usize> {
    let unit = match bytes {
        HUGE.. => PAGE,
        _ => (bytes.max(1).next_power_of_two() / 16).max(LINE),
    };
    let bytes = bytes.max(1).checked_next_multiple_of(unit)?;
    (bytes < isize::MAX as usize - PLACES * HUGE).then_some(bytes)
}

/// The largest block that may serve where one of size `class` would do.
fn largest_fit(class: usize) -> usize {
    class + class / 8
}

/// Behind a pointer, so that a forked child can leave its parent's.
static POOL: AtomicPtr<Mutex<Pool>> = AtomicPtr::new(std::ptr::null_mut());

fn pool() -> MutexGuard<'static, Pool> {
    let mut cell = POOL.load(Ordering::Acquire);
    if cell.is_null() {
        let new = Box::into_raw(Box::default());
        match POOL.compare_exchange(cell, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => cell = new,
            Err(other) => {
                // SAFETY: just made, and not shared.
                drop(unsafe { Box::from_raw(new) });
                cell = other;
            }
        }
    }
    // SAFETY: some thread made it as above, and it is never freed.
    // Nothing in here can leave the pool half changed, so a poisoned lock is still good.
    unsafe { &*cell }.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For a process that was just forked, before its first call: the pool starts anew, since another
/// thread of the parent may have held its lock. Blocks that were unused then are not freed.
pub fn after_fork() {
    POOL.store(std::ptr::null_mut(), Ordering::Release);
}

fn limit_cell() -> &'static AtomicUsize {
    static LIMIT: OnceLock<AtomicUsize> = OnceLock::new();
    LIMIT.get_or_init(|| {
        let off = std::env::var("FUSELANE_POOL").is_ok_and(|v| v == "0");
        AtomicUsize::new(if off { 0 } else { crate::machine::memory_bytes() / 4 })
    })
}

/// The most bytes of unused blocks that the pool keeps.
pub fn limit() -> usize {
    limit_cell().load(Ordering::Relaxed)
}

/// Sets the most bytes of unused blocks that the pool keeps, and frees what is beyond; 0 turns
/// the pool off.
pub fn set_limit(bytes: usize) {
    limit_cell().store(bytes, Ordering::Relaxed);
    if pool().stats.held_bytes > bytes {
        trim();
    }
}

/// Gives all unused blocks back to the system.
pub fn trim() {
    let freed = {
        let mut pool = pool();
        pool.stats.held_bytes = 0;
        std::mem::take(&mut pool.free)
    };
    drop(freed); // outside the lock
}

/// What the pool holds now.
pub fn stats() -> Stats {
    pool().stats
}

impl Pool {
    /// A kept block in which one of size `class` fits; where there is none, the caller makes one.
    fn take(&mut self, class: usize) -> Option<Block> {
        let mut fits = self.free.range_mut(class..=largest_fit(class));
        let kept = fits.find_map(|(_, blocks)| blocks.pop());
        if let Some(block) = &kept {
            self.stats.held_bytes -= block.bytes;
            self.stats.reused += 1;
        } else {
            self.stats.fresh += 1;
        }
        self.stats.used_bytes += kept.as_ref().map_or(class, |block| block.bytes);
        kept
    }

    /// Keeps a block that is no longer used, or returns it where there is no room for it.
    fn give_back(&mut self, block: Block, limit: usize) -> Option<Block> {
        // A forked child gives back what it has never taken.
        self.stats.used_bytes = self.stats.used_bytes.saturating_sub(block.bytes);
        if self.stats.held_bytes + block.bytes > limit {
            return Some(block);
        }
        self.stats.held_bytes += block.bytes;
        self.free.entry(block.bytes).or_default().push(block);
        None
    }
}

fn take(bytes: usize) -> Result<Block> {
    let too_large =
        || Error::new("pool", "memory", format!("of {bytes} bytes cannot be had"), "what fits");
    let class = class(bytes).ok_or_else(too_large)?;
    if let Some(block) = pool().take(class) {
        return Ok(block);
    }
    let block = Block::new(class).or_else(|| {
        trim();
        Block::new(class)
    });
    block.ok_or_else(|| {
        pool().stats.used_bytes -= class;
        too_large()
    })
}

/// An owned dense tensor whose memory comes from the pool and goes back to it.
///
/// ```
/// use fuselane::{Buffer, DType};
/// let buffer = Buffer::zeros(DType::BF16, &[2, 3])?;
/// assert_eq!((buffer.shape(), buffer.dtype()), (&[2, 3][..], DType::BF16));
/// assert_eq!(buffer.as_slice::<f32>().unwrap_err().to_string(),
///     "buffer: slice is of f32, expected bf16 (dtype of the buffer)");
/// # Ok::<(), fuselane::Error>(())
/// ```
pub struct Buffer {
    block: Option<Block>,
    dtype: DType,
    layout: view::Layout,
}

impl Buffer {
    /// Memory with arbitrary (initialised) content, for an operator to fill.
    ///
    /// ```
    /// use fuselane::{Act, Buffer, DType, View};
    /// let mut o = Buffer::unfilled(DType::F32, &[2])?; // no time is spent on zeros
    /// Act::Relu.forward_into(View::new(&[-1.0f32, 1.0], &[2])?, o.view_mut())?;
    /// assert_eq!(o.as_slice::<f32>()?, [0.0, 1.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn unfilled(dtype: DType, shape: &[usize]) -> Result<Self> {
        let layout = view::Layout::contiguous(shape)?;
        Ok(Self { block: Some(take(layout.len() * dtype.size())?), dtype, layout })
    }

    /// A tensor that `fill` has written.
    pub(crate) fn filled(
        dtype: DType,
        shape: &[usize],
        fill: impl FnOnce(ViewMut<'_>) -> Result<()>,
    ) -> Result<Self> {
        let mut buffer = Self::unfilled(dtype, shape)?;
        fill(buffer.view_mut())?;
        Ok(buffer)
    }

    /// A tensor of zeros.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Result<Self> {
        let buffer = Self::unfilled(dtype, shape)?;
        // SAFETY: the block holds at least the bytes of the shape.
        unsafe { buffer.ptr().write_bytes(0, buffer.len() * dtype.size()) };
        Ok(buffer)
    }

    /// The size of each dimension.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.layout.len()
    }

    /// Whether some dimension is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn ptr(&self) -> *mut u8 {
        self.block.as_ref().map_or(std::ptr::null_mut(), |b| b.ptr.as_ptr())
    }

    /// A view to read.
    pub fn view(&self) -> View<'_> {
        // SAFETY: the block holds the elements of this dense layout, initialised, and outlives the
        // borrow of `self`.
        unsafe { View::over(self.ptr(), self.dtype, self.layout) }
    }

    /// A view to write.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        // SAFETY: as for `view`, and the borrow is exclusive.
        unsafe { ViewMut::over(self.ptr(), self.dtype, self.layout) }
    }

    fn check<T: Element>(&self) -> Result<()> {
        if T::DTYPE != self.dtype {
            let expected = format!("{} (dtype of the buffer)", self.dtype);
            return Err(Error::new("buffer", "slice", format!("is of {}", T::DTYPE), expected));
        }
        Ok(())
    }

    /// The elements, if `T` is their type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.check::<T>()?;
        // SAFETY: the block holds `len` initialised elements of this type, aligned to a cache
        // line.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr().cast(), self.len()) })
    }

    /// The elements to write, if `T` is their type.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check::<T>()?;
        // SAFETY: as for `as_slice`, and the borrow is exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr().cast(), self.len()) })
    }

    /// A copy of the elements, if `T` is their type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Ok(self.as_slice::<T>()?.to_vec())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            let beyond = pool().give_back(block, limit());
            drop(beyond); // outside the lock
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("dtype", &self.dtype)
            .field("shape", &self.shape())
            .finish_non_exhaustive()
    }
}

/// The first of `words` that begins a cache line.
pub(crate) fn aligned_start(words: &[u64]) -> usize {
    words.as_ptr().align_offset(LINE)
}

/// The first `len` numbers of `words`.
#[inline(always)]
pub(crate) fn numbers<R: Plain>(words: &[u64], len: usize) -> &[R] {
    assert!(len * size_of::<R>() <= size_of_val(words), "scratch is too short");
    // SAFETY: what `Plain` promises of its types; the length was just checked.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), len) }
}

/// [`numbers`], to write.
#[inline(always)]
pub(crate) fn numbers_mut<R: Plain>(words: &mut [u64], len: usize) -> &mut [R] {
    assert!(len * size_of::<R>() <= size_of_val(words), "scratch is too short");
    // SAFETY: as in `numbers`; the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_little_and_repeat() {
        for bytes in [1, 63, 64, 65, 4096, 100_000, HUGE - 1, HUGE, HUGE + 1, 37_748_736, 1 << 31] {
            let class = class(bytes).unwrap();
            assert!(class >= bytes);
            assert!(class < bytes + bytes / 8 + LINE.max(bytes / 64).min(PAGE));
            assert_eq!(super::class(class), Some(class));
        }
        assert_eq!(class(usize::MAX), None);
        assert_eq!(class(isize::MAX as usize), None);
    }

    #[test]
    fn large_blocks_take_places_in_turns() {
        for (page, turn) in [(0, 0), (5, 5), (5, 9), (9, 5), (1000, 40), (7, usize::MAX)] {
            let to_place = to_place(page * HUGE, turn);
            assert!(to_place < PLACES * HUGE);
            assert_eq!((page + to_place / HUGE) % PLACES, turn % PLACES, "{page}, {turn}");
        }
        for turn in 0..2 * PLACES {
            let block = Block::at(HUGE + PAGE, turn).unwrap();
            let (ptr, begin) = (block.ptr.addr().get(), block.begin.addr().get());
            assert_eq!((ptr % HUGE, ptr / HUGE % PLACES), (0, turn % PLACES));
            let end = begin + block_layout(block.bytes).size();
            assert!(begin <= ptr && ptr + block.bytes <= end);
        }
        let largest = isize::MAX as usize - PLACES * HUGE - PAGE;
        let largest = class(largest - largest % PAGE).map(block_layout).unwrap();
        assert!(Layout::from_size_align(largest.size(), largest.align()).is_ok());
        assert_eq!(class(isize::MAX as usize - PLACES * HUGE), None);
    }

    /// On a pool of its own: the process-wide one serves other tests at the same time.
    #[test]
    fn blocks_of_nearly_the_size_are_used_again() {
        let mut pool = Pool::default();
        let bytes = |pages: usize| class(pages * HUGE).unwrap();
        assert!(pool.take(bytes(31)).is_none());
        let block = Block::new(bytes(31)).unwrap();
        let address = block.ptr;
        assert!(pool.give_back(block, bytes(32)).is_none());
        assert_eq!(pool.stats.held_bytes, bytes(31));
        // A bit smaller, but not much smaller, nor larger.
        for (pages, same) in [(32, false), (29, true), (16, false)] {
            let next = pool.take(bytes(pages));
            assert_eq!(next.as_ref().map(|b| b.ptr), same.then_some(address), "{pages}");
            if let Some(block) = next {
                pool.give_back(block, bytes(32));
            }
        }
        assert_eq!((pool.stats.reused, pool.stats.fresh), (1, 3));
        // Beyond the limit, blocks are the caller's to free.
        let other = Block::new(bytes(2)).unwrap();
        let other_address = other.ptr;
        assert_eq!(pool.give_back(other, bytes(32)).map(|b| b.ptr), Some(other_address));
        assert_eq!(pool.stats.held_bytes, bytes(31));
    }

    #[test]
    fn large_blocks_are_aligned() {
        let buffer = Buffer::unfilled(DType::F32, &[3, HUGE]).unwrap();
        assert_eq!(buffer.ptr() as usize % HUGE, 0);
        assert!(Buffer::unfilled(DType::F32, &[usize::MAX / 8, 4]).is_err());
        assert!(Buffer::unfilled(DType::F32, &[isize::MAX as usize / 64]).is_err());
    }
}
