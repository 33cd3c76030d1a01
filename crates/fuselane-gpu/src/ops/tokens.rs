//! What `rotate` and `cosine` share: an activation, then an encoding by the token's angles.
//!
//! The work is cut into slots: a vector of `N` angles of one token and head, with the features that
//! they turn, or a vector of features that no angle turns. A unit has one slot and walks over the
//! batch, so that its sines and cosines are made once for all entries; where there are too few slots
//! to fill a device, over a chunk of it.
//!
//! A softmax over the features is a reduction over the slots of a token and head: a team of units
//! has them in registers (`encode_rows`). Statistics from a launch before serve a softmax over the
//! sequence, and rows that are too long for registers.

use cubecl::prelude::*;
use fuselane::plan::Encoding;
use fuselane::{Act, DType, Error, FusedAct, Positions, Result, TokenLayout, plan};

use crate::angles::Angles;
use crate::copy::{fill, narrow_into, through_f32, widened, write_f32};
use crate::device::Device;
use crate::kernel::angles::{
    AngleForm, AnglePlace, AnglePlaceLaunch, Coordinates, Turn, coordinates_of, turn,
};
use crate::kernel::math;
use crate::kernel::reduce::{Fold, Team, over_lanes, over_units};
use crate::kernel::storage::{Format, Place, PlaceLaunch, load, store, unit_number};
use crate::kernel::sums::sum_partials;
use crate::launch::{
    Grid, Storage, Width, buffer, check_buffers, largest, launch, sequence, team, unused,
    with_words,
};
use crate::ops::softmax::column_statistics;
use crate::tensor::Tensor;

/// How the features of a slot lie in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Slots {
    /// k and k + `second`.
    Split,
    /// 2k and 2k + 1.
    Neighbours,
    /// One feature for each angle.
    Single,
}

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    /// How x and dx lie; o and grad of `cosine` are split, those of `rotate` lie as x does.
    slots: Slots,
    act: Activation,
    angles: AngleForm,
    /// Whether heads, not tokens, are neighbours in memory.
    heads_inside: bool,
    /// Whether results are stored in 16 bits.
    short: bool,
    /// Whether the device's own exponential serves a softmax. Of bf16 it does not: that has results
    /// as small as f32, which a device may round to 0.
    short_powers: bool,
    format: Format,
}

/// The activation, with where its statistics are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Activation {
    Elementwise(Act),
    /// Softmax with statistics for each (batch, head, feature): over the sequence.
    Columns,
    /// Softmax with statistics for each (batch, token, head): over the features.
    Rows,
}

impl Form {
    fn output(self) -> Slots {
        if self.slots == Slots::Single { Slots::Split } else { self.slots }
    }

    fn is_rotate(self) -> bool {
        self.slots != Slots::Single
    }
}

/// The sizes of a launch; vectors where features are meant.
#[derive(CubeType, CubeLaunch)]
struct Sizes {
    batch: usize,
    /// Entries of the batch that a unit walks over.
    chunk: usize,
    tokens: usize,
    heads: usize,
    /// Slots of a token and head, and those of them that turn.
    slots: usize,
    turning: usize,
    /// Vectors of a row of x.
    features: usize,
    /// The distance of the two features of a pair, and of the cosines and the sines.
    second: usize,
}

/// The features of a slot.
#[derive(CubeType, Clone, Copy)]
struct Pair<N: Size> {
    a: Vector<f32, N>,
    b: Vector<f32, N>,
}

/// Which slot a unit has.
#[derive(CubeType, Clone, Copy)]
struct Spot {
    token: usize,
    head: usize,
    slot: usize,
    /// Whether the slot turns. Where a kernel has asked before, this is a constant, and what a slot
    /// of the other kind needs takes no registers.
    turns: bool,
}

/// The spot of a slot of row number `row`, of rows counted over chunks of the batch, too.
#[cube]
fn spot(sizes: &Sizes, row: usize, slot: usize, #[comptime] form: Form) -> Spot {
    let row = row % (sizes.tokens * sizes.heads);
    let turns = slot < sizes.turning;
    if comptime!(form.heads_inside) {
        Spot { token: row / sizes.heads, head: row % sizes.heads, slot, turns }
    } else {
        Spot { token: row % sizes.tokens, head: row / sizes.tokens, slot, turns }
    }
}

/// Another slot of the same token and head.
#[cube]
fn at_slot(spot: &Spot, sizes: &Sizes, slot: usize) -> Spot {
    Spot { token: spot.token, head: spot.head, slot, turns: slot < sizes.turning }
}

/// The same spot, where it is known whether it turns.
#[cube]
fn known(spot: &Spot, #[comptime] turns: bool) -> Spot {
    Spot { token: spot.token, head: spot.head, slot: spot.slot, turns: turns.runtime() }
}

/// The rows of all chunks of the batch.
#[cube]
fn all_rows(sizes: &Sizes) -> usize {
    let chunks = (sizes.batch + sizes.chunk - 1usize) / sizes.chunk;
    chunks * sizes.tokens * sizes.heads
}

/// The entries of the batch that go with row number `row`: from the first one to before the second.
#[cube]
fn entries(sizes: &Sizes, row: usize) -> (usize, usize) {
    let first = row / (sizes.tokens * sizes.heads) * sizes.chunk;
    (first, sizes.batch.min(first + sizes.chunk))
}

/// Where a row begins.
#[cube]
fn start(place: &Place, batch: usize, token: usize, head: usize) -> usize {
    place.offset
        + batch * *place.strides.index(0usize)
        + token * *place.strides.index(1usize)
        + head * *place.strides.index(2usize)
}

/// The vector of a slot that does not turn.
#[cube]
fn passing(sizes: &Sizes, slot: usize, #[comptime] slots: Slots) -> usize {
    match comptime!(slots) {
        Slots::Split => {
            // Between the first and the second features of the pairs, and behind them.
            select(slot < sizes.second, slot, slot + sizes.turning)
        }
        Slots::Neighbours => slot + sizes.turning,
        Slots::Single => slot,
    }
}

#[cube]
fn load_slot<E: Numeric, P: Size, N: Size>(
    row: &[Vector<E, P>],
    start: usize,
    sizes: &Sizes,
    spot: &Spot,
    #[comptime] slots: Slots,
    #[comptime] format: Format,
) -> Pair<N> {
    let slot = spot.slot;
    let mut a = Vector::<f32, N>::new(0.0f32);
    let mut b = Vector::<f32, N>::new(0.0f32);
    if spot.turns {
        match comptime!(slots) {
            Slots::Split => {
                a = load::<E, P, N>(row, start + slot, format);
                b = load::<E, P, N>(row, start + sizes.second + slot, format);
            }
            Slots::Neighbours => {
                let first = load::<E, P, N>(row, start + 2usize * slot, format);
                let second = load::<E, P, N>(row, start + 2usize * slot + 1usize, format);
                #[unroll]
                for i in 0..N::value() {
                    a.insert(i, of_two::<N>(first, second, comptime!(2 * i)));
                    b.insert(i, of_two::<N>(first, second, comptime!(2 * i + 1)));
                }
            }
            Slots::Single => a = load::<E, P, N>(row, start + slot, format),
        }
    } else {
        a = load::<E, P, N>(row, start + passing(sizes, slot, slots), format);
    }
    Pair::<N> { a, b }
}

/// Number `i` of two vectors in a row.
#[cube]
fn of_two<N: Size>(first: Vector<f32, N>, second: Vector<f32, N>, #[comptime] i: usize) -> f32 {
    let n = N::value();
    if comptime!(i < n) { first.extract(i) } else { second.extract(comptime!(i - n)) }
}

#[cube]
fn store_slot<E: Numeric, P: Size, N: Size>(
    row: &mut [Vector<E, P>],
    start: usize,
    sizes: &Sizes,
    spot: &Spot,
    pair: &Pair<N>,
    #[comptime] slots: Slots,
    #[comptime] format: Format,
) {
    let slot = spot.slot;
    if spot.turns {
        match comptime!(slots) {
            Slots::Split => {
                store::<E, P, N>(row, start + slot, pair.a, format);
                store::<E, P, N>(row, start + sizes.second + slot, pair.b, format);
            }
            Slots::Neighbours => {
                let mut first = Vector::<f32, N>::new(0.0f32);
                let mut second = Vector::<f32, N>::new(0.0f32);
                let n = N::value();
                #[unroll]
                for i in 0..n {
                    first.insert(i, of_pairs::<N>(pair, i));
                    second.insert(i, of_pairs::<N>(pair, comptime!(n + i)));
                }
                store::<E, P, N>(row, start + 2usize * slot, first, format);
                store::<E, P, N>(row, start + 2usize * slot + 1usize, second, format);
            }
            Slots::Single => store::<E, P, N>(row, start + slot, pair.a, format),
        }
    } else {
        store::<E, P, N>(row, start + passing(sizes, slot, slots), pair.a, format);
    }
}

/// Number `i` of pairs that lie one after the other.
#[cube]
fn of_pairs<N: Size>(pair: &Pair<N>, #[comptime] i: usize) -> f32 {
    if comptime!(i % 2 == 0) {
        pair.a.extract(comptime!(i / 2))
    } else {
        pair.b.extract(comptime!(i / 2))
    }
}

/// Cosines and sines of a slot; of one that does not turn, 1 and 0.
#[cube]
fn slot_turn<N: Size>(
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    angle_place: &AnglePlace,
    batch: usize,
    spot: &Spot,
    #[comptime] form: Form,
) -> Turn<N> {
    let mut cos = Vector::<f32, N>::new(1.0f32);
    let mut sin = Vector::<f32, N>::new(0.0f32);
    if spot.turns {
        let turned = turn::<N>(
            theta,
            sines,
            coordinates,
            angle_place,
            batch,
            spot.token,
            spot.head,
            spot.slot,
            comptime!(form.angles),
        );
        cos = turned.cos;
        sin = turned.sin;
    }
    Turn::<N> { cos, sin }
}

/// o of x'. A slot that does not turn has no second features, and is what it was.
#[cube]
fn encoded<N: Size>(y: &Pair<N>, turn: &Turn<N>, #[comptime] form: Form) -> Pair<N> {
    if comptime!(form.is_rotate()) {
        Pair::<N> { a: y.a * turn.cos - y.b * turn.sin, b: y.a * turn.sin + y.b * turn.cos }
    } else {
        Pair::<N> { a: y.a * turn.cos, b: y.a * turn.sin }
    }
}

/// dx' of the gradient of o.
#[cube]
fn decoded<N: Size>(grad: &Pair<N>, turn: &Turn<N>, #[comptime] form: Form) -> Pair<N> {
    if comptime!(form.is_rotate()) {
        Pair::<N> {
            a: grad.a * turn.cos + grad.b * turn.sin,
            b: grad.b * turn.cos - grad.a * turn.sin,
        }
    } else {
        Pair::<N> { a: grad.a * turn.cos + grad.b * turn.sin, b: Vector::<f32, N>::new(0.0f32) }
    }
}

/// exp(x - max) of each number.
#[cube]
fn powers_below<N: Size>(
    x: Vector<f32, N>,
    max: Vector<f32, N>,
    #[comptime] short: bool,
) -> Vector<f32, N> {
    let mut y = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        y.insert(i, math::exp_of(x.extract(i) - max.extract(i), short));
    }
    y
}

/// The statistics of a slot's numbers.
#[cube]
fn statistic<N: Size>(
    numbers: &[f32],
    sizes: &Sizes,
    batch: usize,
    spot: &Spot,
    #[comptime] form: Form,
) -> Pair<N> {
    if comptime!(form.act == Activation::Rows) {
        let row = (batch * sizes.tokens + spot.token) * sizes.heads + spot.head;
        let all = Vector::<f32, N>::new(numbers[row]);
        Pair::<N> { a: all, b: all }
    } else {
        let row = (batch * sizes.heads + spot.head) * sizes.features * N::value();
        let mut a = Vector::<f32, N>::new(0.0f32);
        let mut b = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..N::value() {
            if spot.turns {
                match comptime!(form.slots) {
                    Slots::Split => {
                        a.insert(i, numbers[row + spot.slot * N::value() + i]);
                        b.insert(i, numbers[row + (sizes.second + spot.slot) * N::value() + i]);
                    }
                    Slots::Neighbours => {
                        let first = row + 2usize * (spot.slot * N::value() + i);
                        a.insert(i, numbers[first]);
                        b.insert(i, numbers[first + 1usize]);
                    }
                    Slots::Single => a.insert(i, numbers[row + spot.slot * N::value() + i]),
                }
            } else {
                let vector = passing(sizes, spot.slot, comptime!(form.slots));
                a.insert(i, numbers[row + vector * N::value() + i]);
            }
        }
        Pair::<N> { a, b }
    }
}

/// x' of x.
#[cube]
fn activated<N: Size>(
    x: &Pair<N>,
    maxima: &[f32],
    inverses: &[f32],
    sizes: &Sizes,
    batch: usize,
    spot: &Spot,
    #[comptime] form: Form,
    #[comptime] short: bool,
) -> Pair<N> {
    match comptime!(form.act) {
        Activation::Elementwise(act) => {
            Pair::<N> { a: math::value::<N>(x.a, act, short), b: math::value::<N>(x.b, act, short) }
        }
        _ => {
            let max = statistic::<N>(maxima, sizes, batch, spot, form);
            let short = comptime!(short && form.short_powers);
            let mut a = powers_below::<N>(x.a, max.a, short);
            let mut b = x.b;
            if comptime!(form.is_rotate()) {
                b = powers_below::<N>(x.b, max.b, short);
            }
            let inverse = statistic::<N>(inverses, sizes, batch, spot, form);
            a *= inverse.a;
            if comptime!(form.is_rotate()) {
                b *= inverse.b;
            }
            Pair::<N> { a, b: second_or_zero::<N>(b, spot.turns) }
        }
    }
}

/// o of a slot in some entries of the batch.
#[cube]
fn encode_slot<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    o: &mut [Vector<E, P>],
    maxima: &[f32],
    inverses: &[f32],
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    x_place: &Place,
    o_place: &Place,
    angle_place: &AnglePlace,
    sizes: &Sizes,
    first: usize,
    end: usize,
    spot: &Spot,
    #[comptime] form: Form,
) {
    let mut turn = slot_turn::<N>(theta, sines, coordinates, angle_place, 0usize, spot, form);
    for batch in first..end {
        if comptime!(form.angles.coordinates == Coordinates::PerBatch) {
            let here = slot_turn::<N>(theta, sines, coordinates, angle_place, batch, spot, form);
            turn.cos = here.cos;
            turn.sin = here.sin;
        }
        let from = start(x_place, batch, spot.token, spot.head);
        let x = load_slot::<E, P, N>(
            x,
            from,
            sizes,
            spot,
            comptime!(form.slots),
            comptime!(form.format),
        );
        let y =
            activated::<N>(&x, maxima, inverses, sizes, batch, spot, form, comptime!(form.short));
        let to = start(o_place, batch, spot.token, spot.head);
        store_slot::<E, P, N>(
            o,
            to,
            sizes,
            spot,
            &encoded::<N>(&y, &turn, form),
            comptime!(form.output()),
            comptime!(form.format),
        );
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn encode<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    o: &mut [Vector<E, P>],
    maxima: &[f32],
    inverses: &[f32],
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    x_place: &Place,
    o_place: &Place,
    angle_place: &AnglePlace,
    sizes: &Sizes,
    #[comptime] form: Form,
) {
    let unit = unit_number();
    let row = unit / sizes.slots;
    if row < all_rows(sizes) {
        let spot = spot(sizes, row, unit % sizes.slots, form);
        let (first, end) = entries(sizes, row);
        if spot.turns {
            encode_slot::<E, P, N>(
                x,
                o,
                maxima,
                inverses,
                theta,
                sines,
                coordinates,
                x_place,
                o_place,
                angle_place,
                sizes,
                first,
                end,
                &known(&spot, true),
                form,
            );
        } else {
            encode_slot::<E, P, N>(
                x,
                o,
                maxima,
                inverses,
                theta,
                sines,
                coordinates,
                x_place,
                o_place,
                angle_place,
                sizes,
                first,
                end,
                &known(&spot, false),
                form,
            );
        }
    }
}

/// dx of a slot in some entries of the batch.
#[cube]
fn encode_slot_backward<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    dx: &mut [Vector<E, P>],
    maxima: &[f32],
    inverses: &[f32],
    dots: &[f32],
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    x_place: &Place,
    grad_place: &Place,
    dx_place: &Place,
    angle_place: &AnglePlace,
    sizes: &Sizes,
    first: usize,
    end: usize,
    spot: &Spot,
    #[comptime] form: Form,
) {
    let mut turn = slot_turn::<N>(theta, sines, coordinates, angle_place, 0usize, spot, form);
    for batch in first..end {
        if comptime!(form.angles.coordinates == Coordinates::PerBatch) {
            let here = slot_turn::<N>(theta, sines, coordinates, angle_place, batch, spot, form);
            turn.cos = here.cos;
            turn.sin = here.sin;
        }
        let from = start(grad_place, batch, spot.token, spot.head);
        let grad = load_slot::<E, P, N>(
            grad,
            from,
            sizes,
            spot,
            comptime!(form.output()),
            comptime!(form.format),
        );
        let mut dy = decoded::<N>(&grad, &turn, form);
        if comptime!(form.act != Activation::Elementwise(Act::None)) {
            let from = start(x_place, batch, spot.token, spot.head);
            let x = load_slot::<E, P, N>(
                x,
                from,
                sizes,
                spot,
                comptime!(form.slots),
                comptime!(form.format),
            );
            match comptime!(form.act) {
                Activation::Elementwise(act) => {
                    dy.a = math::pull_back::<N>(x.a, dy.a, act, comptime!(form.short));
                    dy.b = math::pull_back::<N>(x.b, dy.b, act, comptime!(form.short));
                }
                _ => {
                    let y = activated::<N>(&x, maxima, inverses, sizes, batch, spot, form, false);
                    let dot = statistic::<N>(dots, sizes, batch, spot, form);
                    dy.a = y.a * (dy.a - dot.a);
                    dy.b = y.b * (dy.b - dot.b);
                }
            }
        }
        let to = start(dx_place, batch, spot.token, spot.head);
        store_slot::<E, P, N>(
            dx,
            to,
            sizes,
            spot,
            &dy,
            comptime!(form.slots),
            comptime!(form.format),
        );
    }
}

/// dx, with the sums of x' dx' in `dots` where there is a softmax.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn encode_backward<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    dx: &mut [Vector<E, P>],
    maxima: &[f32],
    inverses: &[f32],
    dots: &[f32],
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    x_place: &Place,
    grad_place: &Place,
    dx_place: &Place,
    angle_place: &AnglePlace,
    sizes: &Sizes,
    #[comptime] form: Form,
) {
    let unit = unit_number();
    let row = unit / sizes.slots;
    if row < all_rows(sizes) {
        let spot = spot(sizes, row, unit % sizes.slots, form);
        let (first, end) = entries(sizes, row);
        if spot.turns {
            encode_slot_backward::<E, P, N>(
                x,
                grad,
                dx,
                maxima,
                inverses,
                dots,
                theta,
                sines,
                coordinates,
                x_place,
                grad_place,
                dx_place,
                angle_place,
                sizes,
                first,
                end,
                &known(&spot, true),
                form,
            );
        } else {
            encode_slot_backward::<E, P, N>(
                x,
                grad,
                dx,
                maxima,
                inverses,
                dots,
                theta,
                sines,
                coordinates,
                x_place,
                grad_place,
                dx_place,
                angle_place,
                sizes,
                first,
                end,
                &known(&spot, false),
                form,
            );
        }
    }
}

/// The fold of the numbers of a slot that count.
#[cube]
fn fold_pair<N: Size>(
    pair: &Pair<N>,
    turns: bool,
    #[comptime] kind: Fold,
    #[comptime] form: Form,
) -> f32 {
    let mut all = over_lanes::<N>(pair.a, kind);
    if comptime!(form.is_rotate()) {
        if turns {
            let second = over_lanes::<N>(pair.b, kind);
            match comptime!(kind) {
                Fold::Sum => all += second,
                Fold::Max => all = all.max(second),
            }
        }
    }
    all
}

/// The second features of a slot: 0 where it does not turn, and has none. What an activation makes
/// of nothing may be infinite.
#[cube]
fn second_or_zero<N: Size>(b: Vector<f32, N>, turns: bool) -> Vector<f32, N> {
    let mut second = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        second.insert(i, select(turns, b.extract(i), 0.0f32));
    }
    second
}

/// exp(x - max) of a slot.
#[cube]
fn powers<N: Size>(
    x: &Pair<N>,
    max: f32,
    turns: bool,
    #[comptime] short: bool,
    #[comptime] form: Form,
) -> Pair<N> {
    let mut a = Vector::<f32, N>::new(0.0f32);
    let mut b = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..N::value() {
        a.insert(i, math::exp_of(x.a.extract(i) - max, short));
        if comptime!(form.is_rotate()) {
            b.insert(i, math::exp_of(x.b.extract(i) - max, short));
        }
    }
    Pair::<N> { a, b: second_or_zero::<N>(b, turns) }
}

/// The row of a team. One without a row goes along with the last one, and writes nothing.
#[cube]
fn team_row(sizes: &Sizes, #[comptime] team: Team) -> usize {
    let row = CUBE_POS * comptime!(team.rows as usize) + UNIT_POS_Y as usize;
    row.min(all_rows(sizes) - 1usize)
}

/// Whether the team has a row.
#[cube]
fn team_works(sizes: &Sizes, #[comptime] team: Team) -> bool {
    CUBE_POS * comptime!(team.rows as usize) + (UNIT_POS_Y as usize) < all_rows(sizes)
}

/// Softmax over the features, then the encoding; each unit keeps `kept` slots.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn encode_rows<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    o: &mut [Vector<E, P>],
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    x_place: &Place,
    o_place: &Place,
    angle_place: &AnglePlace,
    sizes: &Sizes,
    #[comptime] kept: usize,
    #[comptime] team: Team,
    #[comptime] form: Form,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(team.shared()));
    let row = team_row(sizes, team);
    let spot = spot(sizes, row, UNIT_POS_X as usize, form);
    let (first_entry, end_entry) = entries(sizes, row);
    let works = team_works(sizes, team);
    let mut cosines = Array::<Vector<f32, N>>::new(kept);
    let mut sines_kept = Array::<Vector<f32, N>>::new(kept);
    #[unroll]
    for k in 0..kept {
        let at = at_slot(&spot, sizes, spot.slot + comptime!(k * team.units as usize));
        let turn = slot_turn::<N>(theta, sines, coordinates, angle_place, 0usize, &at, form);
        cosines[k] = turn.cos;
        sines_kept[k] = turn.sin;
    }
    for batch in first_entry..end_entry {
        let from = start(x_place, batch, spot.token, spot.head);
        let mut first = Array::<Vector<f32, N>>::new(kept);
        let mut second = Array::<Vector<f32, N>>::new(kept);
        let mut max = f32::new(f32::MIN);
        #[unroll]
        for k in 0..kept {
            let at = at_slot(&spot, sizes, spot.slot + comptime!(k * team.units as usize));
            if at.slot < sizes.slots {
                let pair = load_slot::<E, P, N>(
                    x,
                    from,
                    sizes,
                    &at,
                    comptime!(form.slots),
                    comptime!(form.format),
                );
                first[k] = pair.a;
                second[k] = pair.b;
                max = max.max(fold_pair::<N>(&pair, at.turns, Fold::Max, form));
            }
        }
        let max = over_units(max, &mut shared, Fold::Max, team);
        let mut sum = 0.0f32;
        #[unroll]
        for k in 0..kept {
            let at = at_slot(&spot, sizes, spot.slot + comptime!(k * team.units as usize));
            if at.slot < sizes.slots {
                let pair = Pair::<N> { a: first[k], b: second[k] };
                let powers = powers::<N>(&pair, max, at.turns, comptime!(form.short_powers), form);
                first[k] = powers.a;
                second[k] = powers.b;
                sum += fold_pair::<N>(&powers, at.turns, Fold::Sum, form);
            }
        }
        let sum = over_units(sum, &mut shared, Fold::Sum, team);
        let scale = Vector::<f32, N>::new(1.0f32 / sum);
        let to = start(o_place, batch, spot.token, spot.head);
        #[unroll]
        for k in 0..kept {
            let at = at_slot(&spot, sizes, spot.slot + comptime!(k * team.units as usize));
            if works && at.slot < sizes.slots {
                let y = Pair::<N> { a: first[k] * scale, b: second[k] * scale };
                let mut turn = Turn::<N> { cos: cosines[k], sin: sines_kept[k] };
                if comptime!(form.angles.coordinates == Coordinates::PerBatch) {
                    let here =
                        slot_turn::<N>(theta, sines, coordinates, angle_place, batch, &at, form);
                    turn.cos = here.cos;
                    turn.sin = here.sin;
                }
                store_slot::<E, P, N>(
                    o,
                    to,
                    sizes,
                    &at,
                    &encoded::<N>(&y, &turn, form),
                    comptime!(form.output()),
                    comptime!(form.format),
                );
            }
        }
    }
}

/// dx through a softmax over the features; each unit keeps `kept` slots of x and of dx'.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn encode_rows_backward<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    dx: &mut [Vector<E, P>],
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    x_place: &Place,
    grad_place: &Place,
    dx_place: &Place,
    angle_place: &AnglePlace,
    sizes: &Sizes,
    #[comptime] kept: usize,
    #[comptime] team: Team,
    #[comptime] form: Form,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(team.shared()));
    let row = team_row(sizes, team);
    let spot = spot(sizes, row, UNIT_POS_X as usize, form);
    let (first_entry, end_entry) = entries(sizes, row);
    let works = team_works(sizes, team);
    let mut cosines = Array::<Vector<f32, N>>::new(kept);
    let mut sines_kept = Array::<Vector<f32, N>>::new(kept);
    if comptime!(form.angles.coordinates != Coordinates::PerBatch) {
        #[unroll]
        for k in 0..kept {
            let at = at_slot(&spot, sizes, spot.slot + comptime!(k * team.units as usize));
            let turn = slot_turn::<N>(theta, sines, coordinates, angle_place, 0usize, &at, form);
            cosines[k] = turn.cos;
            sines_kept[k] = turn.sin;
        }
    }
    for batch in first_entry..end_entry {
        let x_from = start(x_place, batch, spot.token, spot.head);
        let grad_from = start(grad_place, batch, spot.token, spot.head);
        let mut first = Array::<Vector<f32, N>>::new(kept);
        let mut second = Array::<Vector<f32, N>>::new(kept);
        let mut dfirst = Array::<Vector<f32, N>>::new(kept);
        let mut dsecond = Array::<Vector<f32, N>>::new(kept);
        let mut max = f32::new(f32::MIN);
        #[unroll]
        for k in 0..kept {
            let at = at_slot(&spot, sizes, spot.slot + comptime!(k * team.units as usize));
            if at.slot < sizes.slots {
                let pair = load_slot::<E, P, N>(
                    x,
                    x_from,
                    sizes,
                    &at,
                    comptime!(form.slots),
                    comptime!(form.format),
                );
                first[k] = pair.a;
                second[k] = pair.b;
                max = max.max(fold_pair::<N>(&pair, at.turns, Fold::Max, form));
                let pair = load_slot::<E, P, N>(
                    grad,
                    grad_from,
                    sizes,
                    &at,
                    comptime!(form.output()),
                    comptime!(form.format),
                );
                if comptime!(form.angles.coordinates == Coordinates::PerBatch) {
                    let here =
                        slot_turn::<N>(theta, sines, coordinates, angle_place, batch, &at, form);
                    cosines[k] = here.cos;
                    sines_kept[k] = here.sin;
                }
                let turn = Turn::<N> { cos: cosines[k], sin: sines_kept[k] };
                let pair = decoded::<N>(&pair, &turn, form);
                dfirst[k] = pair.a;
                dsecond[k] = pair.b;
            }
        }
        let max = over_units(max, &mut shared, Fold::Max, team);
        let mut sum = 0.0f32;
        let mut dot = 0.0f32;
        #[unroll]
        for k in 0..kept {
            let at = at_slot(&spot, sizes, spot.slot + comptime!(k * team.units as usize));
            if at.slot < sizes.slots {
                let pair = Pair::<N> { a: first[k], b: second[k] };
                let powers = powers::<N>(&pair, max, at.turns, false, form);
                first[k] = powers.a;
                second[k] = powers.b;
                sum += fold_pair::<N>(&powers, at.turns, Fold::Sum, form);
                let product = Pair::<N> { a: powers.a * dfirst[k], b: powers.b * dsecond[k] };
                dot += fold_pair::<N>(&product, at.turns, Fold::Sum, form);
            }
        }
        let sum = over_units(sum, &mut shared, Fold::Sum, team);
        let dot = over_units(dot, &mut shared, Fold::Sum, team) / sum;
        let scale = Vector::<f32, N>::new(1.0f32 / sum);
        let dot = Vector::<f32, N>::new(dot);
        let to = start(dx_place, batch, spot.token, spot.head);
        #[unroll]
        for k in 0..kept {
            let at = at_slot(&spot, sizes, spot.slot + comptime!(k * team.units as usize));
            if works && at.slot < sizes.slots {
                let dx_pair = Pair::<N> {
                    a: first[k] * scale * (dfirst[k] - dot),
                    b: second[k] * scale * (dsecond[k] - dot),
                };
                store_slot::<E, P, N>(
                    dx,
                    to,
                    sizes,
                    &at,
                    &dx_pair,
                    comptime!(form.slots),
                    comptime!(form.format),
                );
            }
        }
    }
}

/// The maximum, and the inverse of the sum of exp(x - max), of each (batch, token, head), by teams that read a row
/// twice: for rows that no registers hold, and for dtheta.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn row_statistics<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    maxima: &mut [f32],
    inverses: &mut [f32],
    x_place: &Place,
    sizes: &Sizes,
    #[comptime] team: Team,
    #[comptime] form: Form,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(team.shared()));
    let row = team_row(sizes, team);
    let spot = spot(sizes, row, UNIT_POS_X as usize, form);
    let (first_entry, end_entry) = entries(sizes, row);
    let works = team_works(sizes, team);
    let units = comptime!(team.units as usize);
    for batch in first_entry..end_entry {
        let from = start(x_place, batch, spot.token, spot.head);
        let mut max = f32::new(f32::MIN);
        let mut vector = spot.slot;
        while vector < sizes.features {
            let numbers = load::<E, P, N>(x, from + vector, comptime!(form.format));
            max = max.max(over_lanes::<N>(numbers, Fold::Max));
            vector += units;
        }
        let max = over_units(max, &mut shared, Fold::Max, team);
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut vector = spot.slot;
        while vector < sizes.features {
            let numbers = load::<E, P, N>(x, from + vector, comptime!(form.format));
            #[unroll]
            for i in 0..N::value() {
                let power = math::exp_of(numbers.extract(i) - max, false);
                sum.insert(i, sum.extract(i) + power);
            }
            vector += units;
        }
        let sum = over_lanes::<N>(sum, Fold::Sum);
        let sum = over_units(sum, &mut shared, Fold::Sum, team);
        if works && UNIT_POS_X == 0u32 {
            let row = (batch * sizes.tokens + spot.token) * sizes.heads + spot.head;
            maxima[row] = max;
            inverses[row] = 1.0f32 / sum;
        }
    }
}

/// The sum of x' dx' of each (batch, token, head).
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn row_dots<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    dots: &mut [f32],
    maxima: &[f32],
    inverses: &[f32],
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    x_place: &Place,
    grad_place: &Place,
    angle_place: &AnglePlace,
    sizes: &Sizes,
    #[comptime] team: Team,
    #[comptime] form: Form,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(team.shared()));
    let row = team_row(sizes, team);
    let spot = spot(sizes, row, UNIT_POS_X as usize, form);
    let (first_entry, end_entry) = entries(sizes, row);
    let works = team_works(sizes, team);
    for batch in first_entry..end_entry {
        let x_from = start(x_place, batch, spot.token, spot.head);
        let grad_from = start(grad_place, batch, spot.token, spot.head);
        let mut dots_of_lanes = Vector::<f32, N>::new(0.0f32);
        let mut slot = spot.slot;
        while slot < sizes.slots {
            let at = at_slot(&spot, sizes, slot);
            let product = product_of_slot::<E, P, N>(
                x,
                grad,
                maxima,
                inverses,
                theta,
                sines,
                coordinates,
                x_from,
                grad_from,
                angle_place,
                sizes,
                batch,
                &at,
                form,
            );
            dots_of_lanes += product.a;
            if comptime!(form.is_rotate()) {
                if at.turns {
                    dots_of_lanes += product.b;
                }
            }
            slot += comptime!(team.units as usize);
        }
        let dot = over_lanes::<N>(dots_of_lanes, Fold::Sum);
        let dot = over_units(dot, &mut shared, Fold::Sum, team);
        if works && UNIT_POS_X == 0u32 {
            dots[(batch * sizes.tokens + spot.token) * sizes.heads + spot.head] = dot;
        }
    }
}

/// x' dx' of a slot.
#[cube]
fn product_of_slot<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    maxima: &[f32],
    inverses: &[f32],
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    x_from: usize,
    grad_from: usize,
    angle_place: &AnglePlace,
    sizes: &Sizes,
    batch: usize,
    spot: &Spot,
    #[comptime] form: Form,
) -> Pair<N> {
    let x =
        load_slot::<E, P, N>(x, x_from, sizes, spot, comptime!(form.slots), comptime!(form.format));
    let y = activated::<N>(&x, maxima, inverses, sizes, batch, spot, form, false);
    let grad = load_slot::<E, P, N>(
        grad,
        grad_from,
        sizes,
        spot,
        comptime!(form.output()),
        comptime!(form.format),
    );
    let turn = slot_turn::<N>(theta, sines, coordinates, angle_place, batch, spot, form);
    let dy = decoded::<N>(&grad, &turn, form);
    Pair::<N> { a: y.a * dy.a, b: y.b * dy.b }
}

/// Sums of x' dx' over blocks of tokens: `partials` has a row of batch x heads x features for each
/// block.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn column_dots<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    partials: &mut [Vector<f32, N>],
    maxima: &[f32],
    inverses: &[f32],
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    x_place: &Place,
    grad_place: &Place,
    angle_place: &AnglePlace,
    sizes: &Sizes,
    blocks: usize,
    tokens_per_block: usize,
    #[comptime] form: Form,
) {
    let unit = unit_number();
    let columns = sizes.batch * sizes.heads * sizes.slots;
    if unit < columns * blocks {
        let block = unit / columns;
        let column = unit % columns;
        let slot = column % sizes.slots;
        let turns = slot < sizes.turning;
        let head = (column / sizes.slots) % sizes.heads;
        let batch = column / sizes.slots / sizes.heads;
        let mut dot =
            Pair::<N> { a: Vector::<f32, N>::new(0.0f32), b: Vector::<f32, N>::new(0.0f32) };
        let first = block * tokens_per_block;
        for i in 0..tokens_per_block {
            let token = first + i;
            if token < sizes.tokens {
                let at = Spot { token, head, slot, turns };
                let product = product_of_slot::<E, P, N>(
                    x,
                    grad,
                    maxima,
                    inverses,
                    theta,
                    sines,
                    coordinates,
                    start(x_place, batch, token, head),
                    start(grad_place, batch, token, head),
                    angle_place,
                    sizes,
                    batch,
                    &at,
                    form,
                );
                dot.a += product.a;
                dot.b += product.b;
            }
        }
        let row = ((block * sizes.batch + batch) * sizes.heads + head) * sizes.features;
        store_slot::<f32, N, N>(
            partials,
            row,
            sizes,
            &Spot { token: first, head, slot, turns },
            &dot,
            comptime!(form.slots),
            Format::Native,
        );
    }
}

/// Gradients of the angles times their coordinates, summed over the batch and blocks of tokens:
/// `partials` has heads x angles for each block.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn angle_gradients<E: Numeric, P: Size, N: Size>(
    x: &[Vector<E, P>],
    grad: &[Vector<E, P>],
    partials: &mut [Vector<f32, N>],
    maxima: &[f32],
    inverses: &[f32],
    theta: &[f32],
    sines: &[f32],
    coordinates: &[f32],
    x_place: &Place,
    grad_place: &Place,
    angle_place: &AnglePlace,
    sizes: &Sizes,
    blocks: usize,
    tokens_per_block: usize,
    #[comptime] form: Form,
) {
    let unit = unit_number();
    let columns = sizes.heads * sizes.turning;
    if unit < columns * blocks {
        let block = unit / columns;
        let slot = unit % sizes.turning;
        let head = (unit % columns) / sizes.turning;
        let mut total = Vector::<f32, N>::new(0.0f32);
        let first = block * tokens_per_block;
        for i in 0..tokens_per_block {
            let token = first + i;
            if token < sizes.tokens {
                // All of these slots turn.
                let at = Spot { token, head, slot, turns: true };
                let mut turn =
                    slot_turn::<N>(theta, sines, coordinates, angle_place, 0usize, &at, form);
                let mut coordinate = coordinates_of::<N>(
                    coordinates,
                    angle_place,
                    0usize,
                    token,
                    slot,
                    comptime!(form.angles),
                );
                for batch in 0..sizes.batch {
                    if comptime!(form.angles.coordinates == Coordinates::PerBatch) {
                        let here = slot_turn::<N>(
                            theta,
                            sines,
                            coordinates,
                            angle_place,
                            batch,
                            &at,
                            form,
                        );
                        turn.cos = here.cos;
                        turn.sin = here.sin;
                        coordinate = coordinates_of::<N>(
                            coordinates,
                            angle_place,
                            batch,
                            token,
                            slot,
                            comptime!(form.angles),
                        );
                    }
                    let x = load_slot::<E, P, N>(
                        x,
                        start(x_place, batch, token, head),
                        sizes,
                        &at,
                        comptime!(form.slots),
                        comptime!(form.format),
                    );
                    let y = activated::<N>(&x, maxima, inverses, sizes, batch, &at, form, false);
                    let grad = load_slot::<E, P, N>(
                        grad,
                        start(grad_place, batch, token, head),
                        sizes,
                        &at,
                        comptime!(form.output()),
                        comptime!(form.format),
                    );
                    if comptime!(form.is_rotate()) {
                        let dy = decoded::<N>(&grad, &turn, form);
                        total += coordinate * (y.a * dy.b - y.b * dy.a);
                    } else {
                        total += coordinate * (y.a * (grad.b * turn.cos - grad.a * turn.sin));
                    }
                }
            }
        }
        store::<f32, N, N>(
            partials,
            (block * sizes.heads + head) * sizes.turning + slot,
            total,
            Format::Native,
        );
    }
}

/// Sums of angles that come from one frequency.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn gather(
    angles: &[f32],
    dtheta: &mut [f32],
    count: usize,
    columns: usize,
    per_axis: usize,
    len: usize,
    #[comptime] single: bool,
) {
    let unit = unit_number();
    if unit < len {
        let row = (unit / columns) * count;
        let mut angle = unit % columns;
        let mut sum = 0.0f32;
        let mut step = per_axis;
        if comptime!(single) {
            step = 1usize.runtime();
        }
        // A column that no angle of the first axis uses is used by none.
        if comptime!(single) || angle < per_axis {
            while angle < count {
                sum += angles[row + angle];
                angle += step;
            }
        }
        dtheta[unit] = sum;
    }
}

/// A call of `rotate` or `cosine`, checked.
pub(crate) struct Call<'a> {
    pub(crate) operator: &'static str,
    pub(crate) encoding: Encoding,
    pub(crate) act: FusedAct,
    pub(crate) layout: TokenLayout,
    pub(crate) positions: Positions<'a>,
    pub(crate) extra_tokens: usize,
    pub(crate) sequences: Option<&'a [usize]>,
    pub(crate) angles: Angles<'a>,
}

/// What the launches of a call have in common.
struct Prepared {
    device: Device,
    /// Frequencies, or cosines; sines; coordinates.
    theta: Tensor,
    sines: Tensor,
    coordinates: Tensor,
    form: AngleForm,
    offset: f32,
}

impl Call<'_> {
    /// The order of dimensions that makes (batch, tokens, heads, features).
    fn order(&self) -> [usize; 4] {
        match self.layout {
            TokenLayout::TokensHeads => [0, 1, 2, 3],
            TokenLayout::HeadsTokens => [0, 2, 1, 3],
        }
    }

    /// The token ranges that are worked on by themselves: packed sequences where a softmax runs
    /// over them, else all tokens.
    fn parts(&self) -> Vec<(usize, usize)> {
        match (self.act, self.sequences) {
            (FusedAct::SoftmaxSequence, Some(ends)) => ends
                .windows(2)
                .map(|pair| (pair[0], pair[1] - pair[0]))
                .filter(|part| part.1 > 0)
                .collect(),
            _ => vec![(0, self.encoding.tokens)],
        }
    }

    fn prepare(&self, device: &Device) -> Result<Prepared> {
        let Encoding { batch, tokens, split, .. } = self.encoding;
        // Coordinates beyond these are not exact in f32 arithmetic, and come from the host.
        const EXACT: i64 = 1 << 23;
        let counted = match self.positions {
            Positions::From(offset) if self.sequences.is_none() => {
                let fits = offset.abs() < EXACT && (tokens as i64) < EXACT;
                fits.then_some(offset as f32)
            }
            _ => None,
        };
        let coordinates = match self.positions {
            Positions::From(_) if counted.is_some() => Coordinates::Counted,
            Positions::From(_) | Positions::PerToken(_) => Coordinates::PerToken,
            Positions::PerBatch(_) => Coordinates::PerBatch,
            Positions::Grid(_) => Coordinates::Grid,
        };
        let counted_here: Vec<i64>;
        let listed: &[i64] = match self.positions {
            Positions::PerToken(listed) => &listed[..tokens],
            Positions::PerBatch(listed) => &listed[..batch * tokens],
            // Packed sequences, or far ones.
            Positions::From(_) if counted.is_none() => {
                let Self { positions, extra_tokens, sequences, .. } = *self;
                let at = |t| plan::coordinates(positions, extra_tokens, sequences, tokens, 0, t)[0];
                counted_here = (0..tokens).map(at).collect();
                &counted_here
            }
            Positions::From(_) | Positions::Grid(_) => &[],
        };
        if let (Angles::Table(_), Some(far)) =
            (&self.angles, listed.iter().find(|c| c.abs() > 2 * EXACT))
        {
            let expected = format!("coordinates within {} of 0 on a GPU", 2 * EXACT);
            let got = format!("is asked for coordinate {far}");
            return Err(Error::new(self.operator, "angle table", got, expected));
        }
        let coordinates_there = if listed.is_empty() {
            unused(device)?
        } else {
            let listed: Vec<f32> = listed.iter().map(|&coordinate| coordinate as f32).collect();
            device.upload(fuselane::View::new(&listed, &[listed.len()])?)?
        };
        let (theta, sines) = match &self.angles {
            Angles::Theta(theta) => (widened(self.operator, theta)?, coordinates_there.clone()),
            Angles::Table(table) => (table.cosines().clone(), table.sines().clone()),
        };
        let form = AngleForm {
            table: matches!(self.angles, Angles::Table(_)),
            coordinates,
            axes: split.axes,
            shared: split.theta_heads == 1,
            single: split.theta_columns == 1,
        };
        let offset = counted.unwrap_or(0.0);
        let device = device.clone();
        Ok(Prepared { device, theta, sines, coordinates: coordinates_there, form, offset })
    }

    fn angle_place(&self, prepared: &Prepared, first_token: usize) -> AnglePlaceLaunch {
        let split = self.encoding.split;
        let grid: &[usize] = match self.positions {
            Positions::Grid(shape) => shape,
            _ => &[],
        };
        let axes = match &self.angles {
            Angles::Table(table) => table.axes(),
            Angles::Theta(_) => &[],
        };
        let mut starts = SequenceArg::new();
        for axis in axes {
            starts.push(axis.start as f32);
        }
        let columns = if prepared.form.table { split.theta_heads } else { split.theta_columns };
        AnglePlaceLaunch::new(
            self.encoding.tokens,
            first_token,
            self.extra_tokens,
            prepared.offset,
            split.per_axis,
            columns,
            sequence(grid.iter().copied()),
            starts,
            sequence(axes.iter().map(|axis| axis.first)),
            sequence(axes.iter().map(|axis| axis.width)),
        )
    }

    fn slots(&self) -> Slots {
        match self.encoding.pairs {
            None => Slots::Single,
            Some(plan::Pairs { second: None, .. }) => Slots::Neighbours,
            Some(_) => Slots::Split,
        }
    }

    /// The numbers at which rows are cut, which a vector's length has to divide.
    fn cuts(&self) -> [usize; 3] {
        let Encoding { features, pairs, .. } = self.encoding;
        match pairs {
            None => [features; 3],
            Some(pairs) => [features, pairs.count, pairs.second.unwrap_or(features)],
        }
    }

    /// Entries of the batch that a unit walks over, where `units` units do one entry.
    ///
    /// As many as make its sines and cosines cheap, unless that leaves a large device without work.
    /// No sum depends on it.
    fn chunk(&self, units: usize) -> usize {
        // What the largest devices run at once, some hundred multiprocessors with 2048 units each.
        const UNITS: usize = 1 << 18;
        let batch = self.encoding.batch;
        let chunks = (UNITS / units.max(1)).clamp(1, batch.max(1));
        batch.div_ceil(chunks).max(1)
    }

    fn sizes(&self, width: Width, tokens: usize, chunk: usize) -> SizesLaunch {
        let Encoding { batch, heads, features, pairs, .. } = self.encoding;
        let (vectors, n) = (features / width.numbers, width.numbers);
        let (turning, second) = match pairs {
            None => (vectors, vectors),
            Some(pairs) => (pairs.count / n, pairs.second.unwrap_or(0) / n),
        };
        let slots = self.slot_count(width);
        SizesLaunch::new(batch, chunk, tokens, heads, slots, turning, vectors, second)
    }

    /// Slots of a token and head.
    fn slot_count(&self, width: Width) -> usize {
        let vectors = self.encoding.features / width.numbers;
        vectors - self.encoding.pairs.map_or(0, |pairs| pairs.count / width.numbers)
    }

    fn form(&self, prepared: &Prepared, storage: Storage, act: Activation) -> Form {
        Form {
            slots: self.slots(),
            act,
            angles: prepared.form,
            heads_inside: self.layout == TokenLayout::TokensHeads,
            short: storage.is_short(),
            short_powers: storage == Storage::F16,
            format: storage.format(),
        }
    }

    fn width(&self, device: &Device, storage: Storage, tensors: &[&Tensor]) -> Option<Width> {
        // Those of a dimension of size 1 too: a batch of one entry is summed as one of many.
        let strides = tensors
            .iter()
            .flat_map(|tensor| tensor.strides()[..3].iter().copied().chain([tensor.offset()]));
        Width::of(device, storage, strides.chain(self.cuts()))
    }
}

/// Where the rows of a tensor of (batch, tokens, heads, features) lie.
fn place(tensor: &Tensor, width: Width) -> PlaceLaunch {
    let n = width.numbers;
    let outer = tensor.shape()[..3].iter().zip(&tensor.strides()[..3]);
    // The step of a dimension of size 1 may be anything.
    let strides = outer.map(|(&size, &stride)| if size > 1 { stride / n } else { 0 });
    PlaceLaunch::new(tensor.offset() / n, sequence(strides))
}

/// Encodes `x` into `o`.
pub(crate) fn forward(call: &Call<'_>, x: &Tensor, o: &Tensor) -> Result<()> {
    if call.encoding.is_empty() {
        return Ok(());
    }
    let device = o.device();
    check_buffers(call.operator, device, 7)?;
    let prepared = call.prepare(device)?;
    let order = call.order();
    let (x, o) = (x.permute(&order)?, o.permute(&order)?);
    let storage = Storage::of(device, x.dtype());
    if call.width(device, storage, &[&x, &o]).is_some() {
        return forward_parts(call, &prepared, &x, &o);
    }
    // Two bf16 of a word belong to two units.
    through_f32(call.operator, [Some(&x)], [Some(&o)], |[x], [o]| match (x, o) {
        (Some(x), Some(o)) => forward_parts(call, &prepared, x, o),
        _ => Ok(()),
    })
}

fn forward_parts(call: &Call<'_>, prepared: &Prepared, x: &Tensor, o: &Tensor) -> Result<()> {
    for (first, len) in call.parts() {
        let (x, o) = (x.narrow(1, first, len)?, o.narrow(1, first, len)?);
        forward_part(call, prepared, first, &x, &o)?;
    }
    Ok(())
}

fn forward_part(
    call: &Call<'_>,
    prepared: &Prepared,
    first: usize,
    x: &Tensor,
    o: &Tensor,
) -> Result<()> {
    let (device, operator) = (&prepared.device, call.operator);
    let storage = Storage::of(device, x.dtype());
    let width = part_width(call, device, storage, &[x, o])?;
    let (n, tokens) = (width.numbers, x.shape()[1]);
    let (batch, rows) = (call.encoding.batch, tokens * call.encoding.heads);
    let slots = call.slot_count(width);
    let numbers = largest([Some(x), Some(o)]);
    let Prepared { theta, sines, coordinates, .. } = prepared;
    let floats = |tensor: &Tensor| buffer(tensor, Storage::F32);
    let (act, maxima, inverses) = match call.act {
        FusedAct::Elementwise(act) => {
            (Activation::Elementwise(act), coordinates.clone(), coordinates.clone())
        }
        FusedAct::SoftmaxSequence => {
            let (maxima, inverses) = column_statistics(operator, x, 1)?;
            (Activation::Columns, maxima, inverses)
        }
        FusedAct::SoftmaxFeatures => {
            let form = call.form(prepared, storage, Activation::Rows);
            // Two features, a cosine and a sine for each number of a slot.
            let (team, kept) = team(device, slots, 4 * n);
            if kept > 0 {
                let chunk = call.chunk(rows * team.units as usize);
                let all_rows = rows * batch.div_ceil(chunk);
                let grid = Grid::of_rows(operator, device, all_rows, team, numbers)?;
                with_words!(storage, E => launch!(
                    device, encode_rows::<E>, grid, width.words, n,
                    buffer(x, storage), buffer(o, storage),
                    floats(theta), floats(sines), floats(coordinates),
                    place(x, width), place(o, width), call.angle_place(prepared, first),
                    call.sizes(width, tokens, chunk), kept, team, form,
                ));
                return Ok(());
            }
            let (maxima, inverses) = statistics_of_rows(call, prepared, x)?;
            (Activation::Rows, maxima, inverses)
        }
    };
    let form = call.form(prepared, storage, act);
    let chunk = call.chunk(rows * slots);
    let units = rows * slots * batch.div_ceil(chunk);
    let grid = Grid::of_units(operator, device, units, numbers)?;
    with_words!(storage, E => launch!(
        device, encode::<E>, grid, width.words, n,
        buffer(x, storage), buffer(o, storage), floats(&maxima), floats(&inverses),
        floats(theta), floats(sines), floats(coordinates),
        place(x, width), place(o, width), call.angle_place(prepared, first),
        call.sizes(width, tokens, chunk), form,
    ));
    Ok(())
}

/// The width of a part. Its tensors are those of the call, of which it was found that there is one.
fn part_width(
    call: &Call<'_>,
    device: &Device,
    storage: Storage,
    tensors: &[&Tensor],
) -> Result<Width> {
    call.width(device, storage, tensors).ok_or_else(|| {
        let got = "has an odd number of elements";
        Error::new(call.operator, "x", got, "pairs of bf16 in whole words")
    })
}

fn statistics_of_rows(
    call: &Call<'_>,
    prepared: &Prepared,
    x: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let device = &prepared.device;
    let storage = Storage::of(device, x.dtype());
    let width = part_width(call, device, storage, &[x])?;
    let shape = &x.shape()[..3];
    let (maxima, inverses) = (device.empty(DType::F32, shape)?, device.empty(DType::F32, shape)?);
    let (team, _) = team(device, call.encoding.features / width.numbers, 1);
    let rows = shape[1] * shape[2];
    let chunk = call.chunk(rows * team.units as usize);
    let all_rows = rows * shape[0].div_ceil(chunk);
    let grid = Grid::of_rows(call.operator, device, all_rows, team, largest([Some(x)]))?;
    let form = call.form(prepared, storage, Activation::Rows);
    with_words!(storage, E => launch!(
        device, row_statistics::<E>, grid, width.words, width.numbers, buffer(x, storage),
        buffer(&maxima, Storage::F32), buffer(&inverses, Storage::F32), place(x, width),
        call.sizes(width, shape[1], chunk), team, form,
    ));
    Ok((maxima, inverses))
}

/// Tensors of a backward call.
#[derive(Clone, Copy)]
pub(crate) struct Gradients<'a> {
    pub(crate) x: Option<&'a Tensor>,
    pub(crate) grad: &'a Tensor,
    pub(crate) dx: Option<&'a Tensor>,
    pub(crate) dtheta: Option<&'a Tensor>,
}

/// Pulls `grad` back through the encoding and the activation.
pub(crate) fn backward(call: &Call<'_>, gradients: Gradients<'_>) -> Result<()> {
    let Gradients { x, grad, dx, dtheta } = gradients;
    let (device, operator) = (grad.device(), call.operator);
    if x.is_none() && dx.is_none() {
        return Ok(());
    }
    if call.encoding.is_empty() {
        return dtheta.map_or(Ok(()), |dtheta| fill(operator, dtheta, 0.0));
    }
    check_buffers(operator, device, 9)?;
    let prepared = call.prepare(device)?;
    let order = call.order();
    let x = x.map(|x| x.permute(&order)).transpose()?;
    let grad = grad.permute(&order)?;
    let dx = dx.map(|dx| dx.permute(&order)).transpose()?;
    let storage = Storage::of(device, grad.dtype());
    let tensors: Vec<&Tensor> =
        [x.as_ref(), Some(&grad), dx.as_ref()].into_iter().flatten().collect();
    let mut partials = Vec::new();
    let mut run = |[x, grad]: [Option<&Tensor>; 2], [dx]: [Option<&Tensor>; 1]| {
        let Some(grad) = grad else { return Ok(()) };
        let gradients = Gradients { x, grad, dx, dtheta };
        partials = backward_parts(call, &prepared, gradients)?;
        Ok(())
    };
    let (inputs, outputs) = ([x.as_ref(), Some(&grad)], [dx.as_ref()]);
    if call.width(device, storage, &tensors).is_some() {
        run(inputs, outputs)?;
    } else {
        through_f32(operator, inputs, outputs, run)?;
    }
    let Some(dtheta) = dtheta else { return Ok(()) };
    let split = call.encoding.split;
    let angle_sums = sum_of_parts(call, device, &partials)?;
    let len = dtheta.len();
    let grid = Grid::of_units(operator, device, len, len)?;
    write_f32(operator, dtheta, |gathered| {
        launch!(
            device,
            gather,
            grid,
            buffer(&angle_sums, Storage::F32),
            buffer(gathered, Storage::F32),
            split.count,
            split.theta_columns,
            split.per_axis,
            len,
            split.theta_columns == 1,
        );
        Ok(())
    })
}

/// Writes dx, and returns the partial sums of the angles' gradients of each part.
fn backward_parts(
    call: &Call<'_>,
    prepared: &Prepared,
    gradients: Gradients<'_>,
) -> Result<Vec<Tensor>> {
    let Gradients { x, grad, dx, dtheta } = gradients;
    let mut partials = Vec::new();
    for (first, len) in call.parts() {
        let x = x.map(|x| x.narrow(1, first, len)).transpose()?;
        let dx = dx.map(|dx| dx.narrow(1, first, len)).transpose()?;
        let grad = grad.narrow(1, first, len)?;
        let gradients = Gradients { x: x.as_ref(), grad: &grad, dx: dx.as_ref(), dtheta };
        partials.extend(backward_part(call, prepared, first, gradients)?);
    }
    Ok(partials)
}

/// The sums of the angles' gradients: over the blocks of each part, and over the parts, in their
/// order.
fn sum_of_parts(call: &Call<'_>, device: &Device, partials: &[Tensor]) -> Result<Tensor> {
    let (operator, split) = (call.operator, call.encoding.split);
    let columns = split.theta_heads * split.count;
    let sum = |partials: &Tensor| {
        let sums = device.empty(DType::F32, &[columns])?;
        let rows = partials.len() / columns.max(1);
        sum_partials(operator, &partials.reshape(&[rows, columns])?, &sums)?;
        Ok(sums)
    };
    if let [only] = partials {
        return sum(only);
    }
    let all = device.empty(DType::F32, &[partials.len(), columns])?;
    for (i, part) in partials.iter().enumerate() {
        narrow_into(operator, &sum(part)?, &all.narrow(0, i, 1)?.reshape(&[columns])?)?;
    }
    sum(&all)
}

/// Writes dx of a part, and returns the partial sums of the angles' gradients.
fn backward_part(
    call: &Call<'_>,
    prepared: &Prepared,
    first: usize,
    gradients: Gradients<'_>,
) -> Result<Option<Tensor>> {
    let Gradients { x, grad, dx, dtheta } = gradients;
    let (device, operator) = (&prepared.device, call.operator);
    let storage = Storage::of(device, grad.dtype());
    let tensors: Vec<&Tensor> = [x, Some(grad), dx].into_iter().flatten().collect();
    let width = part_width(call, device, storage, &tensors)?;
    let (n, tokens) = (width.numbers, grad.shape()[1]);
    let (batch, rows) = (call.encoding.batch, tokens * call.encoding.heads);
    let slots = call.slot_count(width);
    let numbers = largest([x, Some(grad), dx]);
    // Where x is not needed, something has to stand for it.
    let x_there = x.unwrap_or(grad);
    let Prepared { theta, sines, coordinates, .. } = prepared;
    let floats = |tensor: &Tensor| buffer(tensor, Storage::F32);
    let none = || coordinates.clone();
    let mut done = dx.is_none();
    if let (FusedAct::SoftmaxFeatures, Some(dx)) = (call.act, dx) {
        let form = call.form(prepared, storage, Activation::Rows);
        // Two features, their gradients, a cosine and a sine for each number of a slot.
        let (team, kept) = team(device, slots, 6 * n);
        if kept > 0 {
            let chunk = call.chunk(rows * team.units as usize);
            let all_rows = rows * batch.div_ceil(chunk);
            let grid = Grid::of_rows(operator, device, all_rows, team, numbers)?;
            with_words!(storage, E => launch!(
                device, encode_rows_backward::<E>, grid, width.words, n,
                buffer(x_there, storage), buffer(grad, storage), buffer(dx, storage),
                floats(theta), floats(sines), floats(coordinates),
                place(x_there, width), place(grad, width), place(dx, width),
                call.angle_place(prepared, first), call.sizes(width, tokens, chunk), kept, team, form,
            ));
            done = true;
        }
    }
    if done && dtheta.is_none() {
        return Ok(None);
    }
    let (act, maxima, inverses) = match call.act {
        FusedAct::Elementwise(act) => (Activation::Elementwise(act), none(), none()),
        FusedAct::SoftmaxSequence => {
            let (maxima, inverses) = column_statistics(operator, x_there, 1)?;
            (Activation::Columns, maxima, inverses)
        }
        FusedAct::SoftmaxFeatures => {
            let (maxima, inverses) = statistics_of_rows(call, prepared, x_there)?;
            (Activation::Rows, maxima, inverses)
        }
    };
    let form = call.form(prepared, storage, act);
    // A function of the sizes alone, so that sums repeat: some hundred blocks at most.
    const BLOCKS: usize = 256;
    let per_block = tokens.div_ceil(BLOCKS).max(8);
    let blocks = tokens.div_ceil(per_block);
    if let (false, Some(dx)) = (done, dx) {
        let dots = match act {
            Activation::Elementwise(_) => none(),
            Activation::Rows => {
                let dots = device.empty(DType::F32, &x_there.shape()[..3])?;
                let (team, _) = team(device, slots, 1);
                let chunk = call.chunk(rows * team.units as usize);
                let all_rows = rows * batch.div_ceil(chunk);
                let grid = Grid::of_rows(operator, device, all_rows, team, numbers)?;
                with_words!(storage, E => launch!(
                    device, row_dots::<E>, grid, width.words, n, buffer(x_there, storage),
                    buffer(grad, storage), floats(&dots), floats(&maxima), floats(&inverses),
                    floats(theta), floats(sines), floats(coordinates),
                    place(x_there, width), place(grad, width), call.angle_place(prepared, first),
                    call.sizes(width, tokens, chunk), team, form,
                ));
                dots
            }
            Activation::Columns => {
                let Encoding { heads, features, .. } = call.encoding;
                let columns = batch * heads * features;
                let partials = device.empty(DType::F32, &[blocks, columns])?;
                let units = batch * heads * slots * blocks;
                let grid = Grid::of_units(operator, device, units, numbers.max(blocks * columns))?;
                with_words!(storage, E => launch!(
                    device, column_dots::<E>, grid, width.words, n, buffer(x_there, storage),
                    buffer(grad, storage), floats(&partials), floats(&maxima), floats(&inverses),
                    floats(theta), floats(sines), floats(coordinates),
                    place(x_there, width), place(grad, width), call.angle_place(prepared, first),
                    call.sizes(width, tokens, batch), blocks, per_block, form,
                ));
                let dots = device.empty(DType::F32, &[columns])?;
                sum_partials(operator, &partials, &dots)?;
                dots
            }
        };
        let chunk = call.chunk(rows * slots);
        let units = rows * slots * batch.div_ceil(chunk);
        let grid = Grid::of_units(operator, device, units, numbers)?;
        with_words!(storage, E => launch!(
            device, encode_backward::<E>, grid, width.words, n,
            buffer(x_there, storage), buffer(grad, storage), buffer(dx, storage),
            floats(&maxima), floats(&inverses), floats(&dots),
            floats(theta), floats(sines), floats(coordinates),
            place(x_there, width), place(grad, width), place(dx, width),
            call.angle_place(prepared, first), call.sizes(width, tokens, chunk), form,
        ));
    }
    if dtheta.is_none() {
        return Ok(None);
    }
    let Encoding { heads, split, .. } = call.encoding;
    let partials = device.empty(DType::F32, &[blocks * heads * split.count])?;
    let units = blocks * heads * split.count / n;
    let grid = Grid::of_full_units(operator, device, units, numbers)?;
    with_words!(storage, E => launch!(
        device, angle_gradients::<E>, grid, width.words, n, buffer(x_there, storage),
        buffer(grad, storage), floats(&partials), floats(&maxima), floats(&inverses),
        floats(theta), floats(sines), floats(coordinates),
        place(x_there, width), place(grad, width), call.angle_place(prepared, first),
        call.sizes(width, tokens, batch), blocks, per_block, form,
    ));
    Ok(Some(partials))
}
