//! Rows at equal distances along two dimensions, as kernels see them: those of operands, and of scratch.

use std::marker::PhantomData;

use crate::simd::Simd;

/// Which rows of a call with three dimensions of rows make a tile: those of some neighbouring indices of
/// each dimension.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// The index of the first row.
    pub(crate) first: [usize; 3],
    /// Rows along the first and along the last dimension.
    pub(crate) rows: [usize; 2],
    /// Indices of the second one, such as batch entries.
    pub(crate) entries: usize,
    /// The index of the first row of the next tile, as far as is known; it may be any.
    pub(crate) next: [usize; 3],
}

/// Calls `row` with the index of each row: entries innermost, then the last dimension. This is one loop, as of
/// three nested ones each would keep its own pointers to each operand.
#[inline(always)]
pub(crate) fn for_each_row([entries, outer, inner]: [usize; 3], mut row: impl FnMut([usize; 3])) {
    let [mut m, mut i, mut j] = [0; 3];
    for _ in 0..entries * outer * inner {
        row([m, i, j]);
        m += 1;
        if m == entries {
            (m, j) = (0, j + 1);
        }
        if j == inner {
            (i, j) = (i + 1, 0);
        }
    }
}

/// Calls `row` with the same row of each of three tiles, in the order of [`for_each_row`]. A row's address comes of
/// the one before by an addition. `b` may have one entry, which then serves all.
#[inline(always)]
pub(crate) fn zip_rows<A: Copy, B: Copy, C: Copy>(
    counts: [usize; 3],
    (a, b, c): (InputTile<'_, A>, InputTile<'_, B>, OutputTile<'_, C>),
    mut row: impl FnMut(&[A], &[B], &mut [C]),
) {
    let turns = [a.rows.turns(counts), b.rows.turns(counts), c.rows.turns(counts)];
    assert!(counts[0] <= a.rows.counts[0] && counts[0] <= c.rows.counts[0]);
    assert!(counts[0] <= b.rows.counts[0] || b.rows.steps[0] == 0 && b.rows.counts[0] > 0);
    let (mut p_a, mut p_b, mut p_c) = (a.rows.base, b.rows.base, c.rows.base);
    let [entries, outer, inner] = counts;
    let [mut m, mut j] = [0; 2];
    for _ in 0..entries * outer * inner {
        // SAFETY: the addresses are those of row (m, i, j) of each tile, and `turns` checked that they all have
        // these. Rows of a tile that is written do not overlap, and one is held at a time.
        unsafe {
            row(
                std::slice::from_raw_parts(p_a, a.rows.len),
                std::slice::from_raw_parts(p_b, b.rows.len),
                std::slice::from_raw_parts_mut(p_c, c.rows.len),
            );
        }
        m += 1;
        let mut turn = 0;
        if m == entries {
            (m, j, turn) = (0, j + 1, 1);
        }
        if j == inner {
            (j, turn) = (0, 2);
        }
        p_a = p_a.wrapping_byte_offset(turns[0][turn]);
        p_b = p_b.wrapping_byte_offset(turns[1][turn]);
        p_c = p_c.wrapping_byte_offset(turns[2][turn]);
    }
}

/// Rows to read.
#[derive(Clone, Copy)]
pub(crate) struct InputTile<'r, T> {
    rows: Rows<*const T>,
    /// Bytes from a row to the same row of the next tile.
    ahead: isize,
    memory: PhantomData<&'r [T]>,
}

/// Rows to write.
pub(crate) struct OutputTile<'r, T> {
    rows: Rows<*mut T>,
    memory: PhantomData<&'r mut [T]>,
}

/// Where the rows of a tile are.
#[derive(Clone, Copy)]
struct Rows<P> {
    base: P,
    /// Bytes from row to row: from entry to entry, and along the first and the last dimension.
    steps: [isize; 3],
    /// How many there are of each.
    counts: [usize; 3],
    /// The length of each row.
    len: usize,
}

impl<P: Copy> Rows<P> {
    #[inline(always)]
    fn new(base: P, len: usize, [outer, entry, inner]: [isize; 3], tile: &Tile) -> Self {
        let entry = if tile.entries > 1 { entry } else { 0 };
        let counts = [tile.entries, tile.rows[0], tile.rows[1]];
        Self { base, steps: [entry, outer, inner], counts, len }
    }

    /// Rows of a slice of numbers `T`, with these numbers between them.
    #[inline(always)]
    fn in_slice<T>(
        (base, size): (P, usize),
        rows: [usize; 2],
        steps: [usize; 2],
        len: usize,
    ) -> Self {
        let last = rows.map(|rows| rows.saturating_sub(1));
        assert!(last[0] * steps[0] + last[1] * steps[1] + len <= size);
        let [outer, inner] = steps.map(|step| (step * size_of::<T>()) as isize);
        Self { base, steps: [0, outer, inner], counts: [1, rows[0], rows[1]], len }
    }

    /// Makes one row of those along the last dimension, if they follow each other without a gap.
    #[inline(always)]
    fn joined<T>(self) -> Option<Self> {
        let ([.., inner], [entries, rows, columns]) = (self.steps, self.counts);
        let gapless = columns == 1 || inner == (self.len * size_of::<T>()) as isize;
        gapless.then_some(Self { counts: [entries, rows, 1], len: columns * self.len, ..self })
    }

    /// Bytes from a row to the one that follows it, of so many rows of the tile: the next entry, the next one
    /// along the last dimension, or the next along the first.
    #[inline(always)]
    fn turns(&self, [entries, outer, inner]: [usize; 3]) -> [isize; 3] {
        let ([entry, out, in_], counts) = (self.steps, self.counts);
        assert!(outer <= counts[1] && inner <= counts[2]);
        // (These wrap, as the last one leaves the tile, and a tile may have no rows.)
        let back = (entries as isize).wrapping_sub(1).wrapping_mul(entry);
        let along = (inner as isize).wrapping_sub(1).wrapping_mul(in_).wrapping_add(back);
        [entry, in_.wrapping_sub(back), out.wrapping_sub(along)]
    }

    /// Bytes from the first row to one of the tile.
    #[inline(always)]
    fn offset(&self, [m, i, j]: [usize; 3]) -> isize {
        let ([entry, outer, inner], [entries, rows, columns]) = (self.steps, self.counts);
        assert!(m < entries && i < rows && j < columns);
        // The steps of operands without elements are 0, so that this cannot overflow.
        m as isize * entry + i as isize * outer + j as isize * inner
    }
}

impl<'r, T: Copy> InputTile<'r, T> {
    /// The rows of `tile`, of `len` numbers each. The first one is at `base`, and `steps` are the bytes from
    /// index to index of each dimension.
    ///
    /// # Safety
    /// Each row is readable for `'r`, and nobody writes to it meanwhile. Where `len` is 0, it is enough
    /// that their addresses are aligned and not null.
    #[inline(always)]
    pub(crate) unsafe fn new(base: *const T, len: usize, steps: [isize; 3], tile: &Tile) -> Self {
        let mut ahead = 0isize;
        for d in 0..3 {
            let indices = (tile.next[d] as isize).wrapping_sub(tile.first[d] as isize);
            ahead = ahead.wrapping_add(indices.wrapping_mul(steps[d]));
        }
        Self { rows: Rows::new(base, len, steps, tile), ahead, memory: PhantomData }
    }

    /// Rows of `len` numbers of scratch, with these numbers between them.
    #[inline(always)]
    pub(crate) fn strided(
        scratch: &'r [T],
        rows: [usize; 2],
        steps: [usize; 2],
        len: usize,
    ) -> Self {
        let rows = Rows::in_slice::<T>((scratch.as_ptr(), scratch.len()), rows, steps, len);
        Self { rows, ahead: 0, memory: PhantomData }
    }

    /// Rows of `len` numbers of scratch, one after the other.
    #[inline(always)]
    pub(crate) fn dense(scratch: &'r [T], rows: [usize; 2], len: usize) -> Self {
        Self::strided(scratch, rows, [rows[1] * len, len], len)
    }

    /// A row, by its indices: entry, and along the first and the last dimension.
    #[inline(always)]
    pub(crate) fn row(&self, index: [usize; 3]) -> &'r [T] {
        let p = self.rows.base.wrapping_byte_offset(self.rows.offset(index));
        // SAFETY: this is one of the rows that `new` was promised, or one of a slice that has them.
        unsafe { std::slice::from_raw_parts(p, self.rows.len) }
    }

    /// Bytes from a row to the same row of the next tile.
    #[inline(always)]
    pub(crate) fn ahead(&self) -> isize {
        self.ahead
    }

    /// The tile with one row in the place of those along the last dimension, if they follow each other
    /// without a gap.
    #[inline(always)]
    pub(crate) fn joined(self) -> Option<Self> {
        // The rows that `new` was promised, or of one slice: without gaps they are one readable row.
        self.rows.joined::<T>().map(
            #[inline(always)]
            |rows| Self { rows, ..self },
        )
    }
}

impl<'r, T: Copy> OutputTile<'r, T> {
    /// As [`InputTile::new`].
    ///
    /// # Safety
    /// Each row is writable for the lifetime of the result, no two overlap, and nobody else comes to them
    /// meanwhile. Where `len` is 0, it is enough that their addresses are aligned and not null.
    #[inline(always)]
    pub(crate) unsafe fn new(base: *mut T, len: usize, steps: [isize; 3], tile: &Tile) -> Self {
        Self { rows: Rows::new(base, len, steps, tile), memory: PhantomData }
    }

    /// As [`InputTile::dense`].
    #[inline(always)]
    pub(crate) fn dense(scratch: &'r mut [T], rows: [usize; 2], len: usize) -> Self {
        let slice = (scratch.as_mut_ptr(), scratch.len());
        let rows = Rows::in_slice::<T>(slice, rows, [rows[1] * len, len], len);
        Self { rows, memory: PhantomData }
    }

    /// As [`InputTile::joined`]; gives the tile back as it was if there are gaps.
    #[inline(always)]
    pub(crate) fn joined(self) -> Result<Self, Self> {
        match self.rows.joined::<T>() {
            Some(rows) => Ok(Self { rows, ..self }),
            None => Err(self),
        }
    }

    /// As [`InputTile::row`].
    #[inline(always)]
    pub(crate) fn row(&mut self, index: [usize; 3]) -> &mut [T] {
        let p = self.rows.base.wrapping_byte_offset(self.rows.offset(index));
        // SAFETY: as for `InputTile::row`; the borrow of `self` keeps two from being held at once.
        unsafe { std::slice::from_raw_parts_mut(p, self.rows.len) }
    }

    /// The length of each row.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.rows.len
    }

    /// The same tile, for a while.
    #[inline(always)]
    pub(crate) fn reborrow(&mut self) -> OutputTile<'_, T> {
        OutputTile { rows: self.rows, memory: PhantomData }
    }

    /// Whether rows that are cut at these columns can be stored non-temporally whole. A cache line of which
    /// one part is stored non-temporally and another is not takes longer than ordinary stores alone.
    #[inline(always)]
    pub(crate) fn aligned_at<S: Simd>(&self, cuts: &[usize]) -> bool {
        let Rows { base, steps: [entry, outer, inner], len, .. } = self.rows;
        // A multiple of a power of two where all addresses of rows are.
        let addresses = base as usize | entry as usize | outer as usize | inner as usize;
        addresses.is_multiple_of(S::NON_TEMPORAL_ALIGN)
            && len.is_multiple_of(S::NON_TEMPORAL_UNIT)
            && cuts.iter().all(|cut| cut.is_multiple_of(S::NON_TEMPORAL_UNIT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::scratch::Scratch;
    use crate::simd::AnyWithSteps;

    #[test]
    fn aligned_are_all_segments_or_none() {
        let mut memory = Scratch::<f32>::new(4 * 128 + 16);
        // Halves of 40 are a multiple of 32 bytes in f32, but no whole blocks.
        for (len, cut, aligned) in
            [(128, 64, true), (96, 48, true), (80, 40, false), (72, 72, false)]
        {
            let tile = Tile { first: [0; 3], rows: [2, 2], entries: 1, next: [0; 3] };
            for (start, aligned) in [(0, aligned), (1, false)] {
                let row = (len * size_of::<f32>()) as isize;
                let base = memory[start..].as_mut_ptr();
                // SAFETY: four rows that do not overlap, within `memory`, which nobody else has.
                let rows = unsafe { OutputTile::new(base, len, [2 * row, 0, row], &tile) };
                assert_eq!(
                    rows.aligned_at::<AnyWithSteps>(&[cut, cut, len]),
                    aligned,
                    "{start}, {len}"
                );
            }
        }
    }
}
