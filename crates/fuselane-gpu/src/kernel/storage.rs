//! From buffers to f32 and back.
//!
//! A kernel works on vectors of `N` numbers in f32. In memory they are a vector of `P` words: as
//! many numbers of the dtype itself, or, where the device has no bf16, half as many `u32` that
//! hold two each. [`load`] widens, [`store`] rounds once, to nearest even.

use cubecl::prelude::*;

/// How numbers lie in the words of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Format {
    /// A word is a number.
    Native,
    /// A word is two bf16, the first one in its low half.
    Packed,
}

/// Vector `at` of a buffer.
#[cube]
pub(crate) fn load<E: Numeric, P: Size, N: Size>(
    buffer: &[Vector<E, P>],
    at: usize,
    #[comptime] format: Format,
) -> Vector<f32, N> {
    let mut numbers = Vector::<f32, N>::new(0.0f32);
    let words = buffer[at];
    match comptime!(format) {
        Format::Native =>
        {
            #[unroll]
            for i in 0..N::value() {
                numbers.insert(i, f32::cast_from(words.extract(i)));
            }
        }
        Format::Packed =>
        {
            #[unroll]
            for i in 0..P::value() {
                let word = u32::cast_from(words.extract(i));
                numbers.insert(comptime!(2 * i), f32::reinterpret(word << 16));
                numbers.insert(comptime!(2 * i + 1), f32::reinterpret(word & 0xffff_0000u32));
            }
        }
    }
    numbers
}

/// Writes vector `at` of a buffer.
#[cube]
pub(crate) fn store<E: Numeric, P: Size, N: Size>(
    buffer: &mut [Vector<E, P>],
    at: usize,
    numbers: Vector<f32, N>,
    #[comptime] format: Format,
) {
    let mut words = Vector::<E, P>::new(E::from_int(0));
    match comptime!(format) {
        Format::Native =>
        {
            #[unroll]
            for i in 0..N::value() {
                words.insert(i, E::cast_from(numbers.extract(i)));
            }
        }
        Format::Packed =>
        {
            #[unroll]
            for i in 0..P::value() {
                let low = bf16_bits(numbers.extract(comptime!(2 * i)));
                let high = bf16_bits(numbers.extract(comptime!(2 * i + 1)));
                words.insert(i, E::cast_from(low | (high << 16)));
            }
        }
    }
    buffer[at] = words;
}

/// The bits of a number rounded to bf16, to nearest even. A NaN stays one.
#[cube]
pub(crate) fn bf16_bits(number: f32) -> u32 {
    let bits = u32::reinterpret(number);
    let rounded = (bits + 0x7fffu32 + ((bits >> 16) & 1u32)) >> 16;
    let nan = (bits & 0x7fff_ffffu32) > 0x7f80_0000u32;
    select(nan, (bits >> 16) | 0x40u32, rounded)
}

/// Where the rows of an operand lie, in vectors.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowLayout {
    /// The first one.
    pub(crate) offset: usize,
    /// The stride of each dimension of the call's rows.
    pub(crate) strides: Sequence<usize>,
}

#[cube]
impl RowLayout {
    /// Where row number `row` begins, of rows counted over `shape`.
    pub(crate) fn row_start(&self, shape: &Sequence<usize>, row: usize) -> usize {
        let mut start = self.offset;
        let mut rest = row;
        let rank = shape.len();
        #[unroll]
        for i in 0..rank {
            let dim = comptime!(rank - 1 - i);
            if comptime!(dim == 0) {
                start += rest * *self.strides.index(dim);
            } else {
                let size = *shape.index(dim);
                start += (rest % size) * *self.strides.index(dim);
                rest /= size;
            }
        }
        start
    }
}

/// A buffer of activations with its rows.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Operand<E: Numeric, P: Size> {
    pub(crate) buffer: Box<[Vector<E, P>]>,
    pub(crate) layout: RowLayout,
    #[cube(comptime)]
    pub(crate) format: Format,
}

#[cube]
impl<E: Numeric, P: Size> Operand<E, P> {
    /// Vector `at` of the buffer.
    pub(crate) fn load<N: Size>(&self, at: usize) -> Vector<f32, N> {
        load::<E, P, N>(&self.buffer, at, self.format)
    }

    /// Writes vector `at` of the buffer.
    pub(crate) fn store<N: Size>(&mut self, at: usize, numbers: Vector<f32, N>) {
        store::<E, P, N>(&mut self.buffer, at, numbers, self.format);
    }

    /// Where row number `row` begins, of rows counted over `shape`.
    pub(crate) fn row_start(&self, shape: &Sequence<usize>, row: usize) -> usize {
        self.layout.row_start(shape, row)
    }
}

/// The number of this unit among all of a launch.
#[cube]
pub(crate) fn unit_number() -> usize {
    CUBE_POS * (CUBE_DIM as usize) + (UNIT_POS as usize)
}
