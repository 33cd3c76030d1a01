//! Angles and their sines and cosines.

use cubecl::prelude::*;

/// Where cosines and sines come from, and where tokens stand: what a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AngleForm {
    pub(crate) given: GivenAngles,
    /// Whether all heads have the same ones.
    pub(crate) shared: bool,
    pub(crate) coordinates: Coordinates,
}

/// What is given of the angles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum GivenAngles {
    /// Frequencies; a single one may serve every angle.
    Theta { single: bool },
    /// Their cosines and sines.
    Table,
}

impl AngleForm {
    /// Whether angles differ from entry to entry of the batch.
    pub(crate) fn is_per_batch(self) -> bool {
        self.coordinates == Coordinates::PerBatch
    }

    pub(crate) fn is_table(self) -> bool {
        self.given == GivenAngles::Table
    }

    fn is_single(self) -> bool {
        self.given == GivenAngles::Theta { single: true }
    }

    fn axes(self) -> usize {
        match self.coordinates {
            Coordinates::Grid { axes } => axes,
            _ => 1,
        }
    }
}

/// How the coordinates of a token are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Coordinates {
    /// Counted from an offset.
    Counted,
    /// By the grid's shape.
    Grid { axes: usize },
    /// In a list with one for each token.
    PerToken,
    /// In a list with one for each batch entry and token.
    PerBatch,
}

/// Frequencies or a table, and the tokens' coordinates.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct AngleSource {
    /// The frequencies, or the cosines of a table, of which `sines` are the sines.
    theta: Box<[f32]>,
    sines: Box<[f32]>,
    coordinates: Box<[f32]>,
    /// Tokens of the call, and the first of those that this launch works on.
    tokens: usize,
    first_token: usize,
    /// The first tokens of the call, which have coordinate 0.
    extra_tokens: usize,
    /// What is added to a counted coordinate.
    offset: f32,
    /// Angles on each axis but the last.
    per_axis: usize,
    /// Columns of theta, or rows of a table.
    columns: usize,
    /// The size of each axis of a grid.
    grid: Sequence<usize>,
    /// Of a table's axes: the least coordinate, where the entries begin, and the angles.
    starts: Sequence<f32>,
    firsts: Sequence<usize>,
    widths: Sequence<usize>,
    #[cube(comptime)]
    pub(crate) form: AngleForm,
}

/// Cosines and sines of some angles.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Rotation<N: Size> {
    pub(crate) cos: Vector<f32, N>,
    pub(crate) sin: Vector<f32, N>,
}

/// The axis and the coordinate of an angle.
#[derive(CubeType, Clone, Copy)]
struct OnAxis {
    coordinate: f32,
    /// The angle's number on its axis.
    column: usize,
    /// Where the axis's entries of a table begin, of this coordinate and head.
    entry: usize,
}

#[cube]
impl AngleSource {
    /// The coordinate on an axis. `token` counts from the first one of the launch.
    fn coordinate(&self, batch: usize, token: usize, #[comptime] axis: usize) -> f32 {
        let axes = comptime!(self.form.axes());
        let token = token + self.first_token;
        match comptime!(self.form.coordinates) {
            Coordinates::Counted => {
                // Both are far below 2^24, so that this is exact.
                let counted = f32::cast_from(u32::cast_from(token))
                    - f32::cast_from(u32::cast_from(self.extra_tokens))
                    + self.offset;
                select(token < self.extra_tokens, 0.0f32, counted)
            }
            Coordinates::Grid { .. } => {
                let extra = token < self.extra_tokens;
                let mut cell = select(extra, 0usize, token - self.extra_tokens);
                #[unroll]
                for i in 0..comptime!(axes - 1 - axis) {
                    cell /= *self.grid.index(comptime!(axes - 1 - i));
                }
                if comptime!(axis > 0) {
                    cell %= *self.grid.index(axis);
                }
                f32::cast_from(u32::cast_from(cell))
            }
            Coordinates::PerToken => self.coordinates[token],
            Coordinates::PerBatch => self.coordinates[batch * self.tokens + token],
        }
    }

    fn on_axis(&self, batch: usize, token: usize, head: usize, angle: usize) -> OnAxis {
        let mut coordinate = self.coordinate(batch, token, 0usize);
        let mut column = angle;
        let mut entry = 0usize;
        if comptime!(self.form.is_table()) {
            entry = self.table_entry(coordinate, head, 0usize);
        }
        #[unroll]
        for axis in 1..comptime!(self.form.axes()) {
            let from = self.per_axis * axis;
            if angle >= from {
                coordinate = self.coordinate(batch, token, axis);
                column = angle - from;
                if comptime!(self.form.is_table()) {
                    entry = self.table_entry(coordinate, head, axis);
                }
            }
        }
        OnAxis { coordinate, column, entry }
    }

    fn table_entry(&self, coordinate: f32, head: usize, #[comptime] axis: usize) -> usize {
        let at = usize::cast_from(u32::cast_from(coordinate - *self.starts.index(axis)));
        *self.firsts.index(axis) + (at * self.columns + head) * *self.widths.index(axis)
    }

    /// The coordinates of vector `vector` of a token's angles.
    pub(crate) fn coordinates<N: Size>(
        &self,
        batch: usize,
        token: usize,
        vector: usize,
    ) -> Vector<f32, N> {
        let mut coordinates = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..N::value() {
            let mut coordinate = self.coordinate(batch, token, 0usize);
            #[unroll]
            for axis in 1..comptime!(self.form.axes()) {
                if vector * N::value() + i >= self.per_axis * axis {
                    coordinate = self.coordinate(batch, token, axis);
                }
            }
            coordinates.insert(i, coordinate);
        }
        coordinates
    }

    /// Cosines and sines of vector `vector` of the angles of a token and head.
    pub(crate) fn rotation<N: Size>(
        &self,
        batch: usize,
        token: usize,
        head: usize,
        vector: usize,
    ) -> Rotation<N> {
        let mut cos = Vector::<f32, N>::new(0.0f32);
        let mut sin = Vector::<f32, N>::new(0.0f32);
        let mut row = head;
        if comptime!(self.form.shared) {
            row = 0usize.runtime();
        }
        #[unroll]
        for i in 0..N::value() {
            let angle = vector * N::value() + i;
            let at = self.on_axis(batch, token, row, angle);
            if comptime!(self.form.is_table()) {
                cos.insert(i, self.theta[at.entry + at.column]);
                sin.insert(i, self.sines[at.entry + at.column]);
            } else {
                let mut column = at.column;
                if comptime!(self.form.is_single()) {
                    column = 0usize.runtime();
                }
                let both = sin_cos(at.coordinate * self.theta[row * self.columns + column]);
                cos.insert(i, both.cos);
                sin.insert(i, both.sin);
            }
        }
        Rotation::<N> { cos, sin }
    }
}

#[derive(CubeType, Clone, Copy)]
pub(crate) struct SinCos {
    pub(crate) sin: f32,
    pub(crate) cos: f32,
}

/// The bits of 2 / pi behind the point.
const TWO_OVER_PI: [u32; 6] =
    [0xa2f9_836e, 0x4e44_1529, 0xfc27_57d1, 0xf534_ddc0, 0xdb62_9599, 0x3c43_9041];

/// Sine and cosine, within 1.2e-7 for every finite angle.
///
/// An angle of a = m 2^(e - 23) has a 2 / pi quarter turns, of which only the last two bits
/// before the point and 30 bits behind it count: those are a product of the integer m and the
/// bits of 2 / pi from e on, in wrapping integer arithmetic, which every device has exactly. What
/// is left after the nearest quarter is a fraction of a turn that polynomials serve. Angles below
/// 3 / 4 need no reduction, and keep their relative accuracy.
#[cube]
pub(crate) fn sin_cos(angle: f32) -> SinCos {
    let bits = u32::reinterpret(angle);
    let magnitude = bits & 0x7fff_ffffu32;
    let mantissa = (magnitude & 0x007f_ffffu32) | 0x0080_0000u32;
    let reduced = magnitude >= 0x3f40_0000u32;
    // e + 7: the bits that count begin here, after 32 zeros that stand before the point.
    let from = select(reduced, (magnitude >> 23) - 120u32, 0u32);
    let mut first = 0u32;
    let mut second = comptime!(TWO_OVER_PI[0]).runtime();
    let mut third = comptime!(TWO_OVER_PI[1]).runtime();
    // Only angles of 2^25 and more.
    if from >= 32u32 {
        first = comptime!(TWO_OVER_PI[0]).runtime();
        second = comptime!(TWO_OVER_PI[1]).runtime();
        third = comptime!(TWO_OVER_PI[2]).runtime();
        #[unroll]
        for k in 2..5usize {
            if from >= comptime!(32 * k as u32) {
                first = comptime!(TWO_OVER_PI[k - 1]).runtime();
                second = comptime!(TWO_OVER_PI[k]).runtime();
                third = comptime!(TWO_OVER_PI[k + 1]).runtime();
            }
        }
    }
    // In two steps, as a shift by 32 means nothing.
    let shift = from & 31u32;
    first = (first << shift) | ((second >> 1u32) >> (31u32 - shift));
    second = (second << shift) | ((third >> 1u32) >> (31u32 - shift));
    let turned = mantissa * first + mantissa.mul_hi(second);
    let quarter = select(reduced, (turned + 0x2000_0000u32) >> 30u32, 0u32);
    let rest = i32::reinterpret(turned - (quarter << 30u32));
    // pi / 2 by 2^30.
    let left =
        select(reduced, f32::cast_from(rest) * 1.462_918_1e-9f32, f32::reinterpret(magnitude));
    let square = left * left;
    let mut sine = -0.000_194_841_46f32 * square + 0.008_331_925f32;
    sine = sine * square - 0.166_666_51f32;
    sine = left * square * sine + left;
    let mut cosine = 2.439_365e-5f32 * square - 0.001_388_695_9f32;
    cosine = cosine * square + 0.041_666_638f32;
    cosine = cosine * square - 0.5f32;
    cosine = cosine * square + 1.0f32;
    let odd = (quarter & 1u32) == 1u32;
    let mut sin = select(odd, cosine, sine);
    let mut cos = select(odd, sine, cosine);
    // In integers: the C++ of CubeCL cannot compare booleans.
    let behind = quarter >> 1u32;
    sin = select(((behind ^ (bits >> 31u32)) & 1u32) == 1u32, -sin, sin);
    cos = select(((quarter ^ behind) & 1u32) == 1u32, -cos, cos);
    // Of an infinity or a NaN: NaN.
    let finite = magnitude < 0x7f80_0000u32;
    let nan = f32::reinterpret(magnitude | 0x7fc0_0000u32);
    SinCos { sin: select(finite, sin, nan), cos: select(finite, cos, nan) }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::Device;
    use crate::kernel::storage::unit_number;
    use crate::launch::{Grid, Storage, buffer, launch};
    use fuselane::{DType, View};

    #[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
    fn sines_and_cosines(angles: &[f32], results: &mut [f32], len: usize) {
        let i = unit_number();
        if i < len {
            let both = sin_cos(angles[i]);
            results[2usize * i] = both.sin;
            results[2usize * i + 1usize] = both.cos;
        }
    }

    /// Angles of all magnitudes, with those near multiples of a quarter turn among them.
    #[test]
    fn sines_and_cosines_are_right_everywhere() {
        let spread = (0..1 << 16).map(|i: u32| f32::from_bits(i * 65_521));
        let near = (0..1 << 15).map(|i| (f64::from(i) * std::f64::consts::FRAC_PI_2) as f32);
        let small = (0..1 << 15).map(|i| i as f32 * 1e-3);
        let angles: Vec<f32> = spread.chain(near).chain(small).collect();
        let device = Device::open().expect("a device");
        let len = angles.len();
        let there = device.upload(View::new(&angles, &[len]).expect("dense")).expect("memory");
        let results = device.empty(DType::F32, &[2 * len]).expect("memory");
        let grid = Grid::of_units("test", &device, len, 2 * len).expect("a grid");
        let [from, to] = [&there, &results].map(|tensor| buffer(tensor, Storage::F32));
        launch!(&device, sines_and_cosines, grid, from, to, len);
        let results = results.download::<f32>().expect("results");
        let mut worst = 0.0f64;
        for (&angle, both) in angles.iter().zip(results.chunks(2)) {
            let exact = f64::from(angle);
            if !angle.is_finite() {
                assert!(both.iter().all(|number| number.is_nan()), "of {angle}");
                continue;
            }
            for (got, want) in both.iter().zip([exact.sin(), exact.cos()]) {
                let error = (f64::from(*got) - want).abs();
                assert!(error < 1.2e-7, "{got} where {want} is right, of {angle}");
                worst = worst.max(error);
            }
        }
        println!("worst error {worst:e}");
    }
}
