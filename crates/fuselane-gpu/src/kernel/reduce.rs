//! Sums and maxima over the units that work on one row.
//!
//! A cube has `units` units along x for each of its `rows` rows along y. All units of the cube
//! have to call these functions together. The order of a sum is fixed by `units` and `plane`
//! alone, so that a result repeats bit for bit.

use cubecl::prelude::*;

/// The units that work on the rows of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Team {
    /// Units for each row; a power of two.
    pub(crate) units: u32,
    /// Rows that a cube works on at once.
    pub(crate) rows: u32,
    /// None where units exchange numbers through shared memory alone.
    pub(crate) plane: Option<TeamPlane>,
}

/// Units that exchange numbers directly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TeamPlane {
    pub(crate) size: u32,
    /// Whether they can wait for each other.
    pub(crate) sync: bool,
}

impl Team {
    /// Numbers in shared memory that a reduction needs.
    pub(crate) fn shared(self) -> usize {
        let per_row = self.plane.map_or(self.units, |plane| self.units / plane.size);
        (per_row.max(1) * self.rows) as usize
    }
}

/// What is reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Fold {
    Sum,
    Max,
}

/// Two numbers to one.
#[cube]
pub(crate) fn fold(a: f32, b: f32, #[comptime] fold: Fold) -> f32 {
    match comptime!(fold) {
        Fold::Sum => a + b,
        Fold::Max => a.max(b),
    }
}

/// The fold of `value` over the units of a row, for all of them.
#[cube]
pub(crate) fn over_units(
    value: f32,
    shared: &mut Shared<[f32]>,
    #[comptime] kind: Fold,
    #[comptime] team: Team,
) -> f32 {
    let mut value = value;
    match comptime!(team.plane) {
        Some(plane) => {
            // A shuffle asks all units of the plane; those that left a loop earlier come here earlier.
            if comptime!(plane.sync) {
                sync_plane();
            }
            // A butterfly.
            #[unroll]
            for i in 0..comptime!(plane.size.min(team.units).ilog2()) {
                let step = comptime!(1u32 << i);
                value = fold(value, plane_shuffle_xor(value, step), kind);
            }
            if comptime!(team.units > plane.size) {
                let planes = comptime!(team.units / plane.size);
                let first = (UNIT_POS_Y * planes) as usize;
                if UNIT_POS_X % comptime!(plane.size) == 0u32 {
                    shared[first + (UNIT_POS_X / comptime!(plane.size)) as usize] = value;
                }
                sync_cube();
                value = shared[first];
                #[unroll]
                for i in 1..comptime!(planes as usize) {
                    value = fold(value, shared[first + i], kind);
                }
                sync_cube();
            }
        }
        None => {
            if comptime!(team.units > 1) {
                let first = (UNIT_POS_Y * comptime!(team.units)) as usize;
                let unit = UNIT_POS_X as usize;
                shared[first + unit] = value;
                sync_cube();
                #[unroll]
                for i in 0..comptime!(team.units.ilog2()) {
                    let half = comptime!((team.units >> (i + 1)) as usize);
                    if unit < half {
                        shared[first + unit] =
                            fold(shared[first + unit], shared[first + unit + half], kind);
                    }
                    sync_cube();
                }
                value = shared[first];
                sync_cube();
            }
        }
    }
    value
}

/// The fold of a vector's numbers.
#[cube]
pub(crate) fn over_lanes<N: Size>(vector: Vector<f32, N>, #[comptime] kind: Fold) -> f32 {
    let mut value = vector.extract(0usize);
    #[unroll]
    for i in 1..N::value() {
        value = fold(value, vector.extract(i), kind);
    }
    value
}
