//! The launch layer: from checked tensors to cubes of units.
//!
//! Everything that depends on the device is decided here, from its own properties: how numbers
//! are stored ([`Storage`]), how many of them are loaded at once ([`Width`]), how many units work
//! on a row ([`team`]), how wide indices are and how cubes are counted ([`Grid`]).

use cubecl::features::Plane;
use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use fuselane::{DType, Error, Result};

use crate::device::Device;
use crate::kernel::reduce::{Team, TeamPlane};
use crate::kernel::storage::{Format, OperandLaunch, RowLayoutLaunch};
use crate::tensor::Tensor;

/// How the activations of a call are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    F32,
    F16,
    Bf16,
    /// Two bf16 in a `u32`, where the device has no bf16.
    PackedBf16,
}

/// Runs `$body` with `$word` as the type of a storage's words.
macro_rules! with_words {
    ($storage:expr, $word:ident => $body:expr) => {
        match $storage {
            $crate::launch::Storage::F32 => {
                type $word = f32;
                $body
            }
            $crate::launch::Storage::F16 => {
                type $word = half::f16;
                $body
            }
            $crate::launch::Storage::Bf16 => {
                type $word = half::bf16;
                $body
            }
            $crate::launch::Storage::PackedBf16 => {
                type $word = u32;
                $body
            }
        }
    };
}
pub(crate) use with_words;

impl Storage {
    /// How a device that supports `dtype` stores it.
    pub(crate) fn of(device: &Device, dtype: DType) -> Self {
        match dtype {
            DType::F16 => Self::F16,
            DType::BF16 if device.is_native(FloatKind::BF16) => Self::Bf16,
            DType::BF16 => Self::PackedBf16,
            DType::F32 | DType::F64 => Self::F32,
        }
    }

    pub(crate) fn format(self) -> Format {
        if self == Self::PackedBf16 { Format::Packed } else { Format::Native }
    }

    /// Numbers in a word.
    pub(crate) fn per_word(self) -> usize {
        if self == Self::PackedBf16 { 2 } else { 1 }
    }

    fn word_bytes(self) -> usize {
        match self {
            Self::F32 | Self::PackedBf16 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Whether results are stored in so few bits that the device's own exponential serves.
    pub(crate) fn is_short(self) -> bool {
        self != Self::F32
    }
}

/// How many numbers are loaded at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Width {
    /// `N` of the kernels.
    pub(crate) numbers: usize,
    /// `P` of the kernels.
    pub(crate) words: usize,
}

impl Width {
    /// The widest that divides all of `lengths` (row lengths, strides and offsets, in numbers).
    /// There is none where two numbers share a word and something is odd.
    pub(crate) fn of(
        device: &Device,
        storage: Storage,
        lengths: impl IntoIterator<Item = usize>,
    ) -> Option<Self> {
        let hardware = &device.properties().hardware;
        let bytes = (hardware.load_width as usize / 8).max(storage.word_bytes());
        let most = (bytes / storage.word_bytes()).min(hardware.max_vector_size);
        let mut numbers = most * storage.per_word();
        if let Some(most) = device.tuning().vector {
            numbers = numbers.min(most.max(storage.per_word()));
        }
        numbers = 1 << numbers.max(1).ilog2();
        let all = lengths.into_iter().fold(0, |all, length| all | length);
        if all > 0 {
            numbers = numbers.min(1 << all.trailing_zeros());
        }
        let words = numbers / storage.per_word();
        (words > 0).then_some(Self { numbers, words })
    }
}

/// One operand of a call, as rows.
pub(crate) struct RowOperand {
    tensor: Tensor,
    /// The stride of each dimension of the rows, in numbers.
    strides: Vec<usize>,
    /// The strides that it was given with, those of dimensions of size 1 included.
    original: Vec<usize>,
}

impl RowOperand {
    /// Where its rows lie, in vectors of `numbers`.
    pub(crate) fn layout(&self, numbers: usize) -> RowLayoutLaunch {
        let strides = self.strides.iter().map(|stride| stride / numbers);
        RowLayoutLaunch::new(self.tensor.offset() / numbers, sequence(strides))
    }
}

/// A tensor of activations as a kernel's argument.
pub(crate) fn operand<E: Numeric, P: Size>(
    tensor: &Tensor,
    layout: RowLayoutLaunch,
    storage: Storage,
) -> OperandLaunch<E, P> {
    OperandLaunch::new(buffer(tensor, storage), layout, storage.format())
}

/// A tensor's buffer as a kernel's argument.
pub(crate) fn buffer(tensor: &Tensor, storage: Storage) -> BufferArg {
    let words = tensor.buffer_len().div_ceil(storage.per_word());
    // SAFETY: the buffer holds that many words; it was made for them.
    unsafe { BufferArg::from_raw_parts(tensor.handle().clone(), words) }
}

/// A little memory, to stand where a kernel has an argument that it does not touch.
pub(crate) fn unused(device: &Device) -> Result<Tensor> {
    device.empty(DType::F32, &[16])
}

/// Numbers as a kernel's argument.
pub(crate) fn sequence(numbers: impl IntoIterator<Item = usize>) -> SequenceArg<usize> {
    let mut sequence = SequenceArg::new();
    for number in numbers {
        sequence.push(number);
    }
    sequence
}

/// The rows of a call: its last dimension by all others.
pub(crate) struct Rows<const I: usize> {
    /// The outer dimensions, as few as the strides allow.
    pub(crate) shape: Vec<usize>,
    /// Numbers in a row.
    pub(crate) len: usize,
    /// In the order they were given; absent ones stay so.
    pub(crate) operands: [Option<RowOperand>; I],
}

impl<const I: usize> Rows<I> {
    /// Rows of tensors that all have the same outer dimensions. `len` is the length of the rows
    /// that count, those of the first operand mostly.
    pub(crate) fn new(tensors: [Option<&Tensor>; I], len: usize) -> Self {
        let like = tensors.iter().flatten().next();
        let outer = like.map_or(&[][..], |t| &t.shape()[..t.shape().len().saturating_sub(1)]);
        let rank = outer.len();
        let operands = tensors.map(|tensor| {
            let tensor = tensor?.clone();
            let strides = tensor.strides()[..rank].to_vec();
            Some(RowOperand { original: strides.clone(), strides, tensor })
        });
        Self { shape: outer.to_vec(), len, operands }.merged()
    }

    /// Joins neighbouring dimensions where all operands step over them evenly.
    fn merged(mut self) -> Self {
        let mut dim = 0;
        while dim < self.shape.len() {
            if self.shape[dim] == 1 {
                self.remove(dim);
                continue;
            }
            let joined = dim > 0 && {
                let size = self.shape[dim];
                self.each().all(|o| o.strides[dim - 1] == o.strides[dim] * size)
            };
            if joined {
                let size = self.shape[dim - 1];
                self.shape[dim] *= size;
                self.remove(dim - 1);
                dim -= 1;
                continue;
            }
            dim += 1;
        }
        self
    }

    /// Makes rows longer by the dimensions that every operand holds densely, for operators that
    /// work element by element, or column by column. The width of loads has no part in their sums.
    pub(crate) fn flattened(mut self) -> Self {
        while let Some(&size) = self.shape.last() {
            let last = self.shape.len() - 1;
            let len = self.len;
            if !self.each().all(|o| o.strides[last] == len) {
                break;
            }
            self.len *= size;
            self.remove(last);
        }
        for operand in self.operands.iter_mut().flatten() {
            operand.original.clone_from(&operand.strides);
        }
        self
    }

    fn each(&self) -> impl Iterator<Item = &RowOperand> {
        self.operands.iter().flatten()
    }

    fn remove(&mut self, dim: usize) {
        self.shape.remove(dim);
        for operand in self.operands.iter_mut().flatten() {
            operand.strides.remove(dim);
        }
    }

    /// The number of rows.
    pub(crate) fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// The operand at `i`; where it is absent, another one stands for it, which no kernel touches.
    fn operand(&self, i: usize) -> &RowOperand {
        let first = || self.each().next().expect("a call has an operand");
        self.operands[i].as_ref().unwrap_or_else(first)
    }

    /// Where the rows of the operand at `i` lie, in vectors of `numbers`.
    pub(crate) fn layout(&self, i: usize, numbers: usize) -> RowLayoutLaunch {
        self.operand(i).layout(numbers)
    }

    /// The operand at `i` as a kernel's argument.
    pub(crate) fn argument<E: Numeric, P: Size>(
        &self,
        i: usize,
        storage: Storage,
        width: Width,
    ) -> OperandLaunch<E, P> {
        let RowOperand { tensor, .. } = self.operand(i);
        operand(tensor, self.layout(i, width.numbers), storage)
    }

    /// The operand at `i`, which is written; where it is absent, with `unused` for its memory.
    pub(crate) fn output<E: Numeric, P: Size>(
        &self,
        i: usize,
        unused: &Tensor,
        storage: Storage,
        width: Width,
    ) -> OperandLaunch<E, P> {
        let tensor = self.operands[i].as_ref().map_or(unused, |operand| &operand.tensor);
        operand(tensor, self.layout(i, width.numbers), storage)
    }

    /// The outer dimensions as a kernel's argument.
    pub(crate) fn shape(&self) -> SequenceArg<usize> {
        sequence(self.shape.iter().copied())
    }

    /// The widest loads for rows cut at multiples of `cuts`, of the first `activations` operands.
    ///
    /// The order of a sum over a row depends on it. So a dimension of size 1 counts like any other: a batch of one
    /// entry has the width that one of many has.
    pub(crate) fn width(
        &self,
        device: &Device,
        storage: Storage,
        activations: usize,
        cuts: &[usize],
    ) -> Option<Width> {
        let operands = self.operands[..activations].iter().flatten();
        let strides = operands
            .flat_map(|o| o.original.iter().copied().chain([o.tensor.offset()]))
            .collect::<Vec<_>>();
        Width::of(
            device,
            storage,
            strides.into_iter().chain([self.len]).chain(cuts.iter().copied()),
        )
    }
}

/// Units for rows of `vectors` vectors, and how many of them each unit has in registers; 0 where
/// rows are read again instead.
///
/// `numbers` are the f32 that a unit holds for each of these vectors.
pub(crate) fn team(device: &Device, vectors: usize, numbers: usize) -> (Team, usize) {
    // A cube of this many units fills a multiprocessor together with others.
    const CUBE: u32 = 256;
    // Registers that a unit of 255 (or, in a cube of 1024, 64) may hold for the rows.
    const REGISTERS: usize = 64;
    const REGISTERS_OF_LARGE: usize = 24;
    let most = device.units();
    let wanted = vectors.max(1).next_power_of_two().min(u32::MAX as usize) as u32;
    let mut units = wanted.min(CUBE).min(most);
    let per_unit = |units: u32| vectors.div_ceil(units as usize);
    let fits = |units: u32| {
        let most = if units > 512 { REGISTERS_OF_LARGE } else { REGISTERS };
        per_unit(units) * numbers <= most
    };
    while !fits(units) && units < most {
        units *= 2;
    }
    if !fits(units) {
        // Read again, whatever the units: of so many that each may have all registers it asks for.
        units = wanted.min(CUBE).min(most);
    }
    let rows = (CUBE.min(most) / units).max(1);
    let reread = !fits(units) || device.tuning().reread == Some(true);
    let per_unit = if reread { 0 } else { per_unit(units) };
    let sync = device.properties().features.plane.contains(Plane::Sync);
    let plane = device.plane().map(|size| TeamPlane { size, sync });
    (Team { units, rows, plane }, per_unit)
}

/// The units of a cube, where units hold many numbers for long: one plane, but no fewer than 32, which
/// is NVIDIA's. For larger cubes its compiler limits itself to fewer registers, so that more of them fit a
/// multiprocessor, and spills a few. As many cubes of this size as a multiprocessor may have fill half
/// of it, which is enough for loads of 128 bits.
pub(crate) fn full_cube(device: &Device) -> u32 {
    device.properties().hardware.plane_size_max.max(32).min(device.units())
}

/// The cubes of a launch.
pub(crate) struct Grid {
    pub(crate) count: CubeCount,
    pub(crate) dim: CubeDim,
    pub(crate) address: AddressType,
}

impl Grid {
    /// Cubes for `units` units that need nothing of each other.
    pub(crate) fn of_units(
        operator: &'static str,
        device: &Device,
        units: usize,
        numbers: usize,
    ) -> Result<Self> {
        const CUBE: u32 = 128;
        Self::of_cubes(operator, device, (units, CUBE.min(device.units())), numbers)
    }

    /// Cubes for units that hold many numbers for long.
    pub(crate) fn of_full_units(
        operator: &'static str,
        device: &Device,
        units: usize,
        numbers: usize,
    ) -> Result<Self> {
        Self::of_cubes(operator, device, (units, full_cube(device)), numbers)
    }

    /// Cubes of `cube` units for `units` units.
    fn of_cubes(
        operator: &'static str,
        device: &Device,
        (units, cube): (usize, u32),
        numbers: usize,
    ) -> Result<Self> {
        let cubes = units.div_ceil(cube as usize);
        Self::new(operator, device, cubes, CubeDim::new_1d(cube), numbers)
    }

    /// Cubes for rows that teams work on.
    pub(crate) fn of_rows(
        operator: &'static str,
        device: &Device,
        rows: usize,
        team: Team,
        numbers: usize,
    ) -> Result<Self> {
        let dim = CubeDim::new_2d(team.units, team.rows);
        Self::new(operator, device, rows.div_ceil(team.rows as usize), dim, numbers)
    }

    /// `cubes` cubes; `numbers` is the largest number that an index may reach.
    pub(crate) fn new(
        operator: &'static str,
        device: &Device,
        cubes: usize,
        dim: CubeDim,
        numbers: usize,
    ) -> Result<Self> {
        let (most_x, most_y, _) = device.properties().hardware.max_cube_count;
        // What every runtime takes. Beyond it the cubes are counted in two dimensions.
        let most_x = most_x.min(65_535) as usize;
        let x = cubes.clamp(1, most_x);
        let y = cubes.div_ceil(x);
        if y > most_y as usize {
            let expected = format!("at most {most_x} * {most_y} (cubes of {})", device.name());
            return Err(Error::new(operator, "x", format!("needs {cubes} cubes"), expected));
        }
        let threads = (x * y).saturating_mul(dim.num_elems() as usize);
        let largest = numbers.max(threads);
        let wide = device.tuning().wide_indices.unwrap_or(largest > u32::MAX as usize);
        let address = if wide { AddressType::U64 } else { AddressType::U32 };
        if !device.properties().features.supports_address(address) {
            let expected = format!("at most 2^32 ({} has no wider indices)", device.name());
            return Err(Error::new(operator, "x", format!("spans {largest} numbers"), expected));
        }
        Ok(Self { count: CubeCount::Static(x as u32, y as u32, 1), dim, address })
    }
}

/// The largest number that an index into some tensors reaches.
pub(crate) fn largest<'t>(tensors: impl IntoIterator<Item = Option<&'t Tensor>>) -> usize {
    tensors.into_iter().flatten().map(Tensor::buffer_len).max().unwrap_or(0)
}

/// Launches a kernel, or saves it, if the device is a recorder.
macro_rules! launch {
    ($device:expr, $kernel:ident $(::<$($word:ty),*>)?, $grid:expr, $($argument:expr),* $(,)?) => {{
        let (device, grid): (&$crate::Device, $crate::launch::Grid) = ($device, $grid);
        match device.target() {
            // SAFETY: the kernels reach no element but those of their operands' views, which the
            // core's checks and `Tensor` found to lie in the buffers; and their loops end.
            $crate::device::Target::Client(client) => unsafe {
                $kernel::launch_unchecked$(::<$($word),*>)?(
                    client, grid.count, grid.dim, grid.address, $($argument),*
                );
            },
            #[cfg(feature = "sources")]
            $crate::device::Target::Recorder(kernels) => {
                let kernel = $kernel::create_dummy_kernel$(::<$($word),*>)?(
                    device.properties().clone(), device.target_properties().clone(),
                    grid.count, grid.dim, grid.address, $($argument),*
                );
                let recorded = $crate::device::Recorded {
                    name: stringify!($kernel),
                    kernel: Box::new(kernel),
                };
                kernels.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(recorded);
            }
        }
    }};
}
pub(crate) use launch;

/// Checks that a kernel of the operator may have so many buffers. A launch of one with too many
/// fails on the device's thread, where nobody hears of it.
pub(crate) fn check_buffers(operator: &'static str, device: &Device, buffers: usize) -> Result<()> {
    let most = device.properties().hardware.max_bindings as usize;
    // The sizes and strides of a launch are a buffer of their own.
    if buffers < most {
        return Ok(());
    }
    let got = format!("is on {}, whose kernels have {most} buffers", device.name());
    Err(Error::new(operator, "x", got, format!("a device with {}", buffers + 1)))
}

/// A new tensor for the result of a call, which has the dtype of `like`, the call's `argument`.
pub(crate) fn result_like(
    operator: &'static str,
    argument: &'static str,
    like: &Tensor,
    shape: &[usize],
) -> Result<Tensor> {
    // Before the memory is asked for, so that the error is about the argument.
    like.device().check_dtype(operator, argument, like.dtype())?;
    like.device().empty(like.dtype(), shape)
}

/// What `write` gives in a new tensor, which has the shape and the dtype of `like`, the call's `argument`.
pub(crate) fn into_new(
    operator: &'static str,
    argument: &'static str,
    like: &Tensor,
    write: impl FnOnce(&mut Tensor) -> Result<()>,
) -> Result<Tensor> {
    let mut result = result_like(operator, argument, like, like.shape())?;
    write(&mut result)?;
    Ok(result)
}

/// Checks that all tensors of a call lie on one device, which has their dtypes.
pub(crate) fn one_device<'t>(
    operator: &'static str,
    tensors: impl IntoIterator<Item = (&'static str, Option<&'t Tensor>)>,
) -> Result<()> {
    let mut first: Option<&Tensor> = None;
    for (name, tensor) in tensors {
        let Some(tensor) = tensor else { continue };
        let device = first.get_or_insert(tensor).device();
        if !device.same_as(tensor.device()) {
            let got = format!("is on {}", tensor.device().name());
            let expected = format!("{} (device of the others)", device.name());
            return Err(Error::new(operator, name, got, expected));
        }
        device.check_dtype(operator, name, tensor.dtype())?;
    }
    Ok(())
}
