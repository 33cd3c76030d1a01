//! How a row lies in scratch: in pieces that are encoded as one each.

use crate::dtype::{Element, Real};
use crate::ops::angles::padded;
use crate::simd::{Access, Lanes, MAX_LANES, Memory};

/// How a row of features lies in scratch, in register order: in pieces that start with a new
/// block wherever the encoding does so.
#[derive(Clone, Copy)]
pub(crate) struct Pieces {
    /// Where the pieces that the encoding knows begin, by feature; some may be empty.
    features: [usize; 4],
    /// Where they begin in scratch.
    pub(super) starts: [usize; 4],
    /// The same with those joined that follow each other in whole blocks, which mostly are all.
    joined: [Piece; 4],
    pub(super) count: usize,
    /// Numbers for each row.
    pub(super) width: usize,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Piece {
    /// The first feature.
    pub(super) first: usize,
    pub(super) len: usize,
    /// Where it starts in scratch.
    pub(super) at: usize,
}

impl Pieces {
    /// Pieces of these lengths, one after the other.
    pub(crate) fn new(lengths: [usize; 4]) -> Self {
        let (features, starts, joined) = ([0; 4], [0; 4], [Piece::default(); 4]);
        let mut pieces = Self { features, starts, joined, count: 0, width: 0 };
        let mut first = 0;
        for (i, len) in lengths.into_iter().enumerate() {
            (pieces.features[i], pieces.starts[i]) = (first, pieces.width);
            let open = pieces.count.checked_sub(1).map(|last| &mut pieces.joined[last]);
            match open {
                Some(piece) if piece.len % MAX_LANES == 0 => piece.len += len,
                _ if len == 0 => {}
                _ => {
                    pieces.joined[pieces.count] = Piece { first, len, at: pieces.width };
                    pieces.count += 1;
                }
            }
            first += len;
            pieces.width += padded(len);
        }
        pieces
    }

    /// Where a row or scratch is cut into the pieces that the encoding knows.
    #[inline(always)]
    pub(super) fn cuts<L: Lanes, A: Access<L>>(&self) -> [usize; 3] {
        let [_, a, b, c] = if A::REGISTERS { self.starts } else { self.features };
        [a, b, c]
    }

    /// Whether a row is a single piece of whole blocks.
    #[inline(always)]
    pub(super) fn whole(&self) -> bool {
        self.count == 1 && self.joined[0].len == self.width
    }

    #[inline(always)]
    pub(super) fn iter(&self) -> std::slice::Iter<'_, Piece> {
        self.joined[..self.count].iter()
    }

    /// Brings a row in index order into scratch.
    #[inline(always)]
    pub(super) fn gather<L>(&self, row: &[L::Real], to: &mut [L::Real])
    where
        L: Lanes + Memory<<L as Lanes>::Real>,
    {
        for piece in self.iter() {
            let row = piece.of_row(row);
            for i in (0..row.len()).step_by(L::N) {
                L::read(row, i, Real::of(0.0)).set(to, piece.at + i);
            }
        }
    }

    /// The sum of products of two rows of scratch: lanes within a chunk, f64 across chunks.
    #[inline(always)]
    pub(super) fn dot<L: Lanes>(&self, a: &[L::Real], b: &[L::Real]) -> L::Real {
        let mut total = 0.0;
        for piece in self.iter() {
            let end = piece.at + piece.len.next_multiple_of(L::N);
            let (a, b) = (&a[piece.at..end], &b[piece.at..end]);
            for (a, b) in a.chunks(64 * L::N).zip(b.chunks(64 * L::N)) {
                let mut sum = L::splat(Real::of(0.0));
                for (a, b) in a.chunks_exact(L::N).zip(b.chunks_exact(L::N)) {
                    sum = L::get(a, 0).mul_add(L::get(b, 0), sum);
                }
                total += sum.reduce_add().to_f64();
            }
        }
        Real::of(total)
    }
}

impl Piece {
    /// The elements of a row that are in this piece.
    #[inline(always)]
    pub(super) fn of_row<T>(self, row: &[T]) -> &[T] {
        &row[self.first..self.first + self.len]
    }
}
