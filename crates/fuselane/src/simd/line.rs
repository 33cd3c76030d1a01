//! A cache line in a register, for rows that begin anywhere (see `kernels::sink`).

use std::ops::Range;

/// A register of the size of a cache line, as bytes.
pub(crate) trait Line: Copy {
    /// Whether there are such registers. If not, nothing of the following does anything.
    const ANY: bool;
    /// Some bytes of a line.
    type Bytes: Copy;
    /// A line of zeros.
    fn zero() -> Self;
    /// The bytes before `end`, which is less than all.
    fn before(end: usize) -> Self::Bytes;
    /// What [`Line::rotate`] takes to move byte i to i + `by`, which is less than all.
    fn rotation(by: usize) -> Self;
    /// Moves each byte, and those that leave the line to its beginning.
    fn rotate(self, rotation: Self) -> Self;
    /// Some bytes of one line, and the others of the other.
    fn select(bytes: Self::Bytes, yes: Self, no: Self) -> Self;
    /// Stores non-temporally.
    ///
    /// # Safety
    /// `p` points to a writable line, and is aligned to one.
    unsafe fn store_non_temporal(self, p: *mut u8);
    /// Stores some bytes, and touches no others.
    ///
    /// # Safety
    /// These bytes behind `p` are writable, and none of them is behind the line.
    unsafe fn store_some(self, p: *mut u8, bytes: Range<usize>);
}

/// For instruction sets that have none.
impl Line for () {
    const ANY: bool = false;
    type Bytes = ();
    #[inline(always)]
    fn zero() {}
    #[inline(always)]
    fn before(_end: usize) {}
    #[inline(always)]
    fn rotation(_by: usize) {}
    #[inline(always)]
    fn rotate(self, _rotation: Self) {}
    #[inline(always)]
    fn select(_bytes: (), _yes: Self, _no: Self) {}
    #[inline(always)]
    unsafe fn store_non_temporal(self, _p: *mut u8) {}
    #[inline(always)]
    unsafe fn store_some(self, _p: *mut u8, _bytes: Range<usize>) {}
}
