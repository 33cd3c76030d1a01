//! Sums over the rows of a matrix of partial sums: the second stage of the gradients of parameters.
//!
//! A cube sums up to [`ROWS`] rows of a tile of columns: the units along x are the columns, those
//! along y share the rows. Launches follow each other until one row is left. The order of a sum is
//! fixed by the sizes alone, so that a result repeats bit for bit.

use cubecl::prelude::*;
use fuselane::{DType, Result};

use crate::launch::{Grid, Storage, buffer, largest, launch};
use crate::tensor::Tensor;

/// The most rows that a cube sums.
const ROWS: usize = 512;
/// Columns of a cube: as many as a memory transaction holds.
const COLUMNS: u32 = 32;
/// Units that share the rows of a column.
const SLICES: u32 = 8;

/// The units of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Tile {
    columns: u32,
    slices: u32,
}

/// `tiles` are those that the columns take, and `blocks` of rows have a sum each.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn sum_rows(
    from: &[f32],
    to: &mut [f32],
    rows: usize,
    columns: usize,
    tiles: usize,
    blocks: usize,
    #[comptime] tile: Tile,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!((tile.columns * tile.slices) as usize));
    let (block, first) = (CUBE_POS / tiles, CUBE_POS % tiles);
    let column = first * comptime!(tile.columns as usize) + UNIT_POS_X as usize;
    let unit = (UNIT_POS_Y * comptime!(tile.columns) + UNIT_POS_X) as usize;
    let end = rows.min((block + 1usize) * ROWS);
    let mut sum = 0.0f32;
    if column < columns {
        let mut row = block * ROWS + UNIT_POS_Y as usize;
        while row < end {
            sum += from[row * columns + column];
            row += comptime!(tile.slices as usize);
        }
    }
    shared[unit] = sum;
    #[unroll]
    for i in 0..comptime!(tile.slices.ilog2()) {
        let half = comptime!(tile.slices >> (i + 1));
        sync_cube();
        if UNIT_POS_Y < half {
            let other = comptime!((half * tile.columns) as usize);
            shared[unit] += shared[unit + other];
        }
    }
    // A grid of two dimensions has cubes beyond the last block.
    if UNIT_POS_Y == 0u32 && column < columns && block < blocks {
        to[block * columns + column] = shared[unit];
    }
}

/// Writes the sum over the rows of `partials`, [P, C], into `out`, [C]. Both are dense, of f32, and
/// begin their buffers. No rows have the sum 0.
pub(crate) fn sum_partials(operator: &'static str, partials: &Tensor, out: &Tensor) -> Result<()> {
    let (device, columns) = (out.device(), out.len());
    if columns == 0 {
        return Ok(());
    }
    let units = device.units();
    let tile =
        Tile { columns: COLUMNS.min(units), slices: (units / COLUMNS.min(units)).min(SLICES) };
    let tiles = columns.div_ceil(tile.columns as usize);
    let mut from = partials.clone();
    loop {
        let rows = from.len() / columns;
        let blocks = rows.div_ceil(ROWS).max(1);
        let to = match blocks {
            1 => out.clone(),
            _ => device.empty(DType::F32, &[blocks, columns])?,
        };
        let dim = CubeDim::new_2d(tile.columns, tile.slices);
        let numbers = largest([Some(&from), Some(&to)]);
        let grid = Grid::new(operator, device, blocks * tiles, dim, numbers)?;
        launch!(
            device,
            sum_rows,
            grid,
            buffer(&from, Storage::F32),
            buffer(&to, Storage::F32),
            rows,
            columns,
            tiles,
            blocks,
            tile,
        );
        if blocks == 1 {
            return Ok(());
        }
        from = to;
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::{Device, Tuning};
    use fuselane::View;

    /// More cubes than one dimension of a grid has: those that are too many write nothing.
    #[test]
    fn nothing_is_written_beyond_the_sums() {
        let device = Device::open().expect("a device");
        let device = device.tuned(Tuning { units: Some(1), ..Tuning::default() });
        let columns = 70_000;
        let upload = |numbers: &[f32], shape: &[usize]| {
            device.upload(View::new(numbers, shape).expect("dense")).expect("memory")
        };
        let partials = upload(&vec![1.0; 2 * columns], &[2, columns]);
        let around = upload(&vec![7.0; 2 * columns], &[2 * columns]);
        let out = around.narrow(0, 0, columns).expect("a range");
        sum_partials("test", &partials, &out).expect("sums");
        let numbers = around.download::<f32>().expect("numbers");
        assert!(numbers[..columns].iter().all(|&sum| sum == 2.0));
        assert!(numbers[columns..].iter().all(|&number| number == 7.0));
    }
}
