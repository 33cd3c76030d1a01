//! The loops that primitives are made of: over all elements of an output, over rows, and over
//! columns. Arithmetic is in f32, on blocks in the first-level cache; loops run on all threads of
//! the current rayon pool, compiled for the instruction set that the library uses, and store past
//! the caches where the library would. What is left between a chain of them and a fused operator
//! is the fusion.

use std::array;

use fuselane::{Buffer, DType, Element, Isa, View};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::copy;
use crate::worker::Fault;

/// Elements that are worked on at once.
const BLOCK: usize = 256;

/// Elements of output that are gathered before they are stored non-temporally.
const PIECE: usize = 8192;

/// Numbers that a sum along a row is kept in, so that it is not one chain of additions.
const LANES: usize = 32;

/// The elements of a dense tensor.
#[derive(Clone, Copy)]
enum Data<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<'a> Data<'a> {
    fn of(view: View<'a>) -> Result<Self, Fault> {
        fn slice<'a, T: Element>(view: View<'a>) -> &'a [T] {
            if view.is_empty() {
                return &[];
            }
            // SAFETY: the view is dense and of this type, as was found below, so this many
            // elements follow each other from its pointer on, and they are borrowed for 'a.
            unsafe { std::slice::from_raw_parts(view.as_ptr().cast(), view.len()) }
        }
        if !view.is_contiguous() {
            return Err(Fault::Failed("a primitive was given a strided tensor".to_owned()));
        }
        match view.dtype() {
            DType::F32 => Ok(Self::F32(slice(view))),
            DType::F16 => Ok(Self::F16(slice(view))),
            DType::BF16 => Ok(Self::BF16(slice(view))),
            DType::F64 => Err(Fault::Unsupported("f64".to_owned())),
        }
    }

    /// Some elements as f32: on the stage, or where they are if that is what they are.
    #[inline(always)]
    fn widen<'s>(&self, at: usize, stage: &'s mut [f32]) -> &'s [f32]
    where
        'a: 's,
    {
        match self {
            Self::F32(data) => &data[at..at + stage.len()],
            Self::F16(data) => {
                data[at..at + stage.len()].convert_to_f32_slice(stage);
                stage
            }
            Self::BF16(data) => {
                for (to, from) in stage.iter_mut().zip(&data[at..]) {
                    *to = f32::from_bits(u32::from(from.to_bits()) << 16);
                }
                stage
            }
        }
    }
}

/// A type of outputs.
trait Number: Element {
    /// Stores what `compute` writes: directly, or by way of the stage.
    fn store(to: &mut [Self], stage: &mut [f32], compute: impl FnOnce(&mut [f32]));
}

impl Number for f32 {
    #[inline(always)]
    fn store(to: &mut [Self], _stage: &mut [f32], compute: impl FnOnce(&mut [f32])) {
        compute(to);
    }
}

impl Number for f16 {
    #[inline(always)]
    fn store(to: &mut [Self], stage: &mut [f32], compute: impl FnOnce(&mut [f32])) {
        compute(stage);
        to.convert_from_f32_slice(stage);
    }
}

impl Number for bf16 {
    #[inline(always)]
    fn store(to: &mut [Self], stage: &mut [f32], compute: impl FnOnce(&mut [f32])) {
        compute(stage);
        for (to, from) in to.iter_mut().zip(stage) {
            let bits = from.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let nan = (bits >> 16) | 0x40;
            *to = Self::from_bits(if from.is_nan() { nan } else { rounded } as u16);
        }
    }
}

/// The bytes of numbers, to be stored non-temporally.
fn bytes<T: Number>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: floats have no padding, and any bytes are floats.
    let (head, bytes, tail) = unsafe { numbers.align_to_mut::<u8>() };
    debug_assert!(head.is_empty() && tail.is_empty(), "a byte has no alignment");
    bytes
}

/// Which part of an operand meets row r of the output.
#[derive(Clone, Copy)]
enum Meets {
    /// The same place: the operand has the output's shape.
    Same,
    /// The row that starts at `start + (r / repeat % count) * pitch`.
    Row { start: usize, pitch: usize, repeat: usize, count: usize },
    /// The number `r / repeat`, for the whole row.
    Number { repeat: usize },
}

/// An input of an elementwise loop.
#[derive(Clone, Copy)]
pub(in crate::peers) struct Operand<'a> {
    view: View<'a>,
    meets: Meets,
}

impl<'a> From<View<'a>> for Operand<'a> {
    fn from(view: View<'a>) -> Self {
        Self { view, meets: Meets::Same }
    }
}

impl<'a> From<&'a Buffer> for Operand<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        buffer.view().into()
    }
}

impl<'a> Operand<'a> {
    /// Part `part` of each of the tensor's rows, which has `parts` of them.
    pub(in crate::peers) fn part(view: View<'a>, part: usize, parts: usize) -> Self {
        let pitch = view.shape().last().copied().unwrap_or(1);
        let start = part * (pitch / parts);
        let count = view.len() / pitch.max(1);
        Self { view, meets: Meets::Row { start, pitch, repeat: 1, count } }
    }

    /// Rows that the output's rows meet in turn, each one `repeat` times in a row.
    pub(in crate::peers) fn rows(view: View<'a>, repeat: usize) -> Self {
        let pitch = view.shape().last().copied().unwrap_or(1);
        let count = view.len() / pitch.max(1);
        Self { view, meets: Meets::Row { start: 0, pitch, repeat, count } }
    }

    /// One number for each `repeat` rows.
    pub(in crate::peers) fn numbers(view: View<'a>, repeat: usize) -> Self {
        Self { view, meets: Meets::Number { repeat } }
    }
}

/// A loop's work on one thread.
trait Task {
    fn run(self);
}

/// Runs a task, compiled for the instruction set that the library uses. Where that is AVX-512, the
/// compiler would take registers of 512 bits for these loops, which the library has found no faster: they
/// are compiled for AVX2 there too.
fn run(task: impl Task) {
    match fuselane::isa() {
        Isa::Portable => task.run(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the library uses these only on CPUs that have AVX2, FMA and F16C.
        Isa::Avx2 | Isa::Avx512 | Isa::Avx512Wide => unsafe { run_avx2(task) },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 | Isa::Avx512Wide => task.run(),
    }
}

/// # Safety
/// The CPU has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2(task: impl Task) {
    task.run();
}

/// What the output of a primitive is like.
#[derive(Clone, Copy)]
pub(in crate::peers) struct Like<'a> {
    pub(in crate::peers) dtype: DType,
    pub(in crate::peers) shape: &'a [usize],
}

/// A new tensor of which `f` computes each block, given its row and the operands' blocks.
pub(super) fn map<const N: usize>(
    like: Like<'_>,
    operands: [Operand<'_>; N],
    f: impl Fn(usize, [&[f32]; N], &mut [f32]) + Sync,
) -> Result<Buffer, Fault> {
    let mut o = Buffer::unfilled(like.dtype, like.shape)?;
    let elements = o.len();
    let same = operands.iter().all(|operand| matches!(operand.meets, Meets::Same));
    let row = like.shape.last().copied().unwrap_or(1);
    let mut inputs = [(Data::F32(&[]), Meets::Same); N];
    for (input, operand) in inputs.iter_mut().zip(operands) {
        *input = (Data::of(operand.view)?, operand.meets);
    }
    let plan = Plan {
        inputs,
        width: if same { elements } else { row }.max(1),
        stream: elements * like.dtype.size() >= fuselane::machine::cached_bytes(),
        f,
    };
    match like.dtype {
        DType::F32 => plan.run(o.as_mut_slice::<f32>()?),
        DType::F16 => plan.run(o.as_mut_slice::<f16>()?),
        DType::BF16 => plan.run(o.as_mut_slice::<bf16>()?),
        DType::F64 => return Err(Fault::Unsupported("f64".to_owned())),
    }
    Ok(o)
}

struct Plan<'a, F, const N: usize> {
    inputs: [(Data<'a>, Meets); N],
    /// The length of the output's rows.
    width: usize,
    /// Store non-temporally.
    stream: bool,
    f: F,
}

impl<F: Fn(usize, [&[f32]; N], &mut [f32]) + Sync, const N: usize> Plan<'_, F, N> {
    fn run<T: Number>(&self, o: &mut [T]) {
        let share = o.len().div_ceil(4 * rayon::current_num_threads()).next_multiple_of(PIECE);
        o.par_chunks_mut(share).enumerate().for_each(|(i, o)| {
            run(Map { plan: self, first: i * share, o });
        });
    }
}

/// A thread's share of a [`map`].
struct Map<'p, 'a, T, F, const N: usize> {
    plan: &'p Plan<'a, F, N>,
    /// Where in the output this share begins.
    first: usize,
    o: &'p mut [T],
}

impl<T: Number, F: Fn(usize, [&[f32]; N], &mut [f32]), const N: usize> Task
    for Map<'_, '_, T, F, N>
{
    #[inline(always)]
    fn run(self) {
        let mut gathered = [T::default(); PIECE];
        for (i, o) in self.o.chunks_mut(PIECE).enumerate() {
            let at = self.first + i * PIECE;
            if self.plan.stream {
                let gathered = &mut gathered[..o.len()];
                self.plan.fill(at, gathered);
                copy::stream(bytes(gathered), bytes(o));
            } else {
                self.plan.fill(at, o);
            }
        }
    }
}

impl<F: Fn(usize, [&[f32]; N], &mut [f32]), const N: usize> Plan<'_, F, N> {
    /// Computes the elements from `at` on.
    #[inline(always)]
    fn fill<T: Number>(&self, at: usize, o: &mut [T]) {
        let (mut row, mut column) = (at / self.width, at % self.width);
        let mut stages = [[0.0; BLOCK]; N];
        let mut result = [0.0; BLOCK];
        let mut done = 0;
        while done < o.len() {
            let len = BLOCK.min(self.width - column).min(o.len() - done);
            let mut stages = stages.iter_mut();
            let blocks = array::from_fn(|k| {
                let stage = stages.next().map_or(&mut [][..], |stage| &mut stage[..len]);
                self.block(k, at + done, row, column, stage)
            });
            T::store(&mut o[done..done + len], &mut result[..len], |o| (self.f)(row, blocks, o));
            done += len;
            column += len;
            if column == self.width {
                (row, column) = (row + 1, 0);
            }
        }
    }

    /// The part of operand `k` that belongs to the output's elements from `at` on.
    #[inline(always)]
    fn block<'s>(
        &'s self,
        k: usize,
        at: usize,
        row: usize,
        column: usize,
        stage: &'s mut [f32],
    ) -> &'s [f32] {
        let (data, meets) = &self.inputs[k];
        match *meets {
            Meets::Same => data.widen(at, stage),
            Meets::Row { start, pitch, repeat, count } => {
                let turn = if repeat == 1 { row } else { row / repeat };
                let turn = if turn < count { turn } else { turn % count };
                data.widen(start + turn * pitch + column, stage)
            }
            Meets::Number { repeat } => {
                let number = data.widen(row / repeat, &mut [0.0])[0];
                stage.fill(number);
                stage
            }
        }
    }
}

/// How numbers become one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fold {
    Sum,
    SumOfSquares,
    Max,
}

impl Fold {
    fn start(self) -> f32 {
        match self {
            Self::Sum | Self::SumOfSquares => 0.0,
            Self::Max => f32::NEG_INFINITY,
        }
    }

    /// Folds numbers into as many others.
    #[inline(always)]
    fn each(self, into: &mut [f32], from: &[f32]) {
        let pairs = into.iter_mut().zip(from);
        match self {
            Self::Sum => pairs.for_each(|(into, from)| *into += from),
            Self::SumOfSquares => pairs.for_each(|(into, from)| *into += from * from),
            Self::Max => {
                pairs.for_each(|(into, &from)| *into = if from > *into { from } else { *into })
            }
        }
    }

    /// What is left to do with what was folded: squares are not squared again.
    fn of_folded(self) -> Self {
        if self == Self::SumOfSquares { Self::Sum } else { self }
    }
}

/// One f32 number for each row of `width` elements.
pub(super) fn fold_rows(
    fold: Fold,
    x: View<'_>,
    width: usize,
    shape: &[usize],
) -> Result<Buffer, Fault> {
    let mut o = Buffer::unfilled(DType::F32, shape)?;
    let data = Data::of(x)?;
    let share = o.len().div_ceil(4 * rayon::current_num_threads()).max(1);
    o.as_mut_slice::<f32>()?.par_chunks_mut(share).enumerate().for_each(|(i, o)| {
        run(Share { fold, data, start: i * share * width, along: Along::Row { width }, o });
    });
    Ok(o)
}

/// What one thread folds into `o`.
struct Share<'a> {
    fold: Fold,
    data: Data<'a>,
    /// Where its first row starts.
    start: usize,
    along: Along,
    o: &'a mut [f32],
}

/// What is folded to one number.
#[derive(Clone, Copy)]
enum Along {
    /// Each row of `width` elements.
    Row { width: usize },
    /// Each column of `rows` rows.
    Column { rows: usize },
}

impl Task for Share<'_> {
    #[inline(always)]
    fn run(self) {
        let mut stage = [0.0; BLOCK];
        match self.along {
            Along::Row { width } => self.fold_rows(width, &mut stage),
            Along::Column { rows } => self.fold_columns(rows, &mut stage),
        }
    }
}

impl Share<'_> {
    #[inline(always)]
    fn fold_rows(self, width: usize, stage: &mut [f32; BLOCK]) {
        for (i, o) in self.o.iter_mut().enumerate() {
            let start = self.start + i * width;
            let mut lanes = [self.fold.start(); LANES];
            for column in (0..width).step_by(BLOCK) {
                let len = BLOCK.min(width - column);
                let block = self.data.widen(start + column, &mut stage[..len]);
                let (whole, rest) = block.as_chunks::<LANES>();
                whole.iter().for_each(|part| self.fold.each(&mut lanes, part));
                self.fold.each(&mut lanes, rest);
            }
            let mut half = LANES / 2;
            while half > 0 {
                let (low, high) = lanes.split_at_mut(half);
                self.fold.of_folded().each(low, &high[..half]);
                half /= 2;
            }
            *o = lanes[0];
        }
    }

    #[inline(always)]
    fn fold_columns(self, rows: usize, stage: &mut [f32; BLOCK]) {
        self.o.fill(self.fold.start());
        let width = self.o.len();
        for row in 0..rows {
            for (i, o) in self.o.chunks_mut(BLOCK).enumerate() {
                let at = self.start + row * width + i * BLOCK;
                let block = self.data.widen(at, &mut stage[..o.len()]);
                self.fold.each(o, block);
            }
        }
    }
}

/// Folds over the middle dimension of (outer, n, inner), into f32.
pub(super) fn fold_columns(
    fold: Fold,
    x: View<'_>,
    [outer, n, inner]: [usize; 3],
    shape: &[usize],
) -> Result<Buffer, Fault> {
    // Few columns are cut into parts, so that there is work for all threads.
    let parts = (64 / outer.max(1)).clamp(1, n.div_ceil(16).max(1));
    let part = n.div_ceil(parts).max(1);
    let parts = n.div_ceil(part);
    let partial = [outer, parts, inner];
    let mut o = Buffer::unfilled(DType::F32, if parts == 1 { shape } else { &partial })?;
    let data = Data::of(x)?;
    o.as_mut_slice::<f32>()?.par_chunks_mut(inner.max(1)).enumerate().for_each(|(i, o)| {
        let (outer, first) = (i / parts, i % parts * part);
        let rows = part.min(n - first);
        let start = (outer * n + first) * inner;
        run(Share { fold, data, start, along: Along::Column { rows }, o });
    });
    match parts {
        1 => Ok(o),
        _ => fold_parts(fold.of_folded(), &o, partial, shape),
    }
}

/// Folds parts that are few.
fn fold_parts(
    fold: Fold,
    x: &Buffer,
    [_, parts, inner]: [usize; 3],
    shape: &[usize],
) -> Result<Buffer, Fault> {
    let mut o = Buffer::unfilled(DType::F32, shape)?;
    let data = Data::of(x.view())?;
    o.as_mut_slice::<f32>()?.chunks_mut(inner.max(1)).enumerate().for_each(|(outer, o)| {
        let start = outer * parts * inner;
        run(Share { fold, data, start, along: Along::Column { rows: parts }, o });
    });
    Ok(o)
}
