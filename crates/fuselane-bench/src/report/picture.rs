//! The picture for the README: how much faster we are than each peer, a row for each operator
//! variant at its largest size.

use std::error::Error;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::chart::{anchored, letters};
use super::colour::{self, AXIS, BACKGROUND, GRID, LOSS, LOSS_SIDE, TEXT};
use super::data::{MATCH, Row, RunData, Table, is_ours, times};
use super::facts;
use crate::case::{Metric, Mode};

const WIDTH: i32 = 1060;
const HEAD: i32 = 116;
const FOOT: i32 = 30;
const FAMILY: i32 = 24;
/// Labels end here; then the two panels, each with a column for numbers at its right.
const LABELS: i32 = 318;
const PANEL: i32 = 290;
const PANELS: [(Mode, &str, i32); 2] =
    [(Mode::Fwd, "forward", LABELS + 12), (Mode::Bwd, "backward", LABELS + 12 + PANEL + 74)];
const BAR: i32 = 6;

/// An operator variant with its tables.
struct Variant<'a> {
    family: &'a str,
    label: String,
    tables: Vec<&'a Table>,
}

/// One for each speed table's title and dtype, in the regime that reuses outputs where there are
/// both. Calls that have nothing to do are left out: their ratios say nothing.
fn variants(data: &RunData) -> Vec<Variant<'_>> {
    let regime = data.regimes().first();
    let chosen = data.tables.iter().filter(|table| {
        let row = largest(table);
        table.metric == Metric::Speed
            && (!table.both_regimes || Some(&table.alloc) == regime)
            && !row.is_idle()
            && row.ratio().is_some()
    });
    let several = data.distinct(|table| table.dtype.clone()).len() > 1;
    let mut variants: Vec<Variant<'_>> = Vec::new();
    for table in chosen {
        let dtype = if several { format!(" ({})", table.dtype) } else { String::new() };
        let label = format!("{}{dtype}", table.title);
        match variants.iter_mut().find(|v| v.family == table.family && v.label == label) {
            Some(variant) => variant.tables.push(table),
            None => variants.push(Variant { family: &table.family, label, tables: vec![table] }),
        }
    }
    variants
}

fn largest(table: &Table) -> &Row {
    &table.rows[table.rows.len() - 1]
}

/// Where a ratio lies on the axis, from powers of 2 to powers of 2.
struct Scale {
    from: i32,
    to: i32,
}

impl Scale {
    fn of(ratios: impl Iterator<Item = f64>) -> Self {
        let (mut from, mut to) = (-1, 1);
        for ratio in ratios.filter(|ratio| ratio.is_finite() && *ratio > 0.0) {
            from = from.min(ratio.log2().floor() as i32);
            to = to.max(ratio.log2().ceil() as i32);
        }
        // One wild row may not flatten all others: bars beyond end at the edge.
        Self { from: from.max(-5), to: to.min(7) }
    }

    fn at(&self, ratio: f64) -> i32 {
        let share = (ratio.log2() - f64::from(self.from)) / f64::from(self.to - self.from);
        (share.clamp(0.0, 1.0) * f64::from(PANEL)).round() as i32
    }
}

/// The picture; none if there is no speed row with a peer.
pub(crate) fn draw(data: &RunData) -> Result<Option<String>, Box<dyn Error>> {
    let variants = variants(data);
    let providers = data.providers();
    let rows = || variants.iter().flat_map(|variant| variant.tables.iter().map(|t| largest(t)));
    let peers: Vec<&String> = providers
        .iter()
        .filter(|peer| !is_ours(peer) && rows().any(|row| row.ratio_to(peer).is_some()))
        .collect();
    if peers.is_empty() {
        return Ok(None);
    }
    let scale = Scale::of(rows().flat_map(|row| peers.iter().filter_map(|p| row.ratio_to(p))));
    let row_height = (peers.len() as i32 * BAR + 9).max(22);
    let families = variants
        .iter()
        .enumerate()
        .filter(|(at, variant)| *at == 0 || variants[at - 1].family != variant.family);
    let bottom = HEAD + families.count() as i32 * FAMILY + variants.len() as i32 * row_height + 4;
    let height = bottom + FOOT;

    let mut svg = String::new();
    {
        let size = (WIDTH as u32, height as u32);
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let text = |text: &str, at, style| root.draw(&Text::new(text.to_owned(), at, style));
        root.fill(&BACKGROUND)?;
        let frame = [(0, 0), (WIDTH - 1, height - 1)];
        root.draw(&Rectangle::new(frame, GRID.stroke_width(1)))?;
        let bold =
            |size: f64| ("sans-serif", size * 1.24, FontStyle::Bold).into_font().color(&TEXT);
        text(
            "How many times as fast as each peer fuselane is, at the largest size",
            (20, 16),
            bold(17.0),
        )?;
        text(&facts::line(&data.run), (20, 43), letters(12.0, TEXT))?;
        let mut x = 20;
        for peer in &peers {
            let chip = [(x, 70), (x + 14, 80)];
            root.draw(&Rectangle::new(chip, colour::of(peer, &providers).rgb().filled()))?;
            let style = anchored(letters(12.0, TEXT), HPos::Left, VPos::Center);
            text(&format!("over {peer}"), (x + 20, 75), style)?;
            x += 42 + (peer.len() as i32 + 5) * 7;
        }
        root.draw(&Rectangle::new([(x, 70), (x + 14, 80)], LOSS.filled()))?;
        let style = anchored(letters(12.0, TEXT), HPos::Left, VPos::Center);
        text("the peer is faster", (x + 20, 75), style)?;

        for (_, name, left) in PANELS {
            let one = left + scale.at(1.0);
            root.draw(&Rectangle::new([(left, HEAD), (one, bottom)], LOSS_SIDE.filled()))?;
            for power in scale.from..=scale.to {
                let x = left + scale.at(2f64.powi(power));
                let line = if power == 0 { TEXT.stroke_width(1) } else { GRID.stroke_width(1) };
                root.draw(&PathElement::new(vec![(x, HEAD), (x, bottom)], line))?;
                let label = match power {
                    0.. => format!("{}×", 1u64 << power),
                    _ => format!("1/{}×", 1u64 << -power),
                };
                let style = anchored(letters(11.0, TEXT), HPos::Center, VPos::Top);
                text(&label, (x, bottom + 7), style)?;
            }
            text(name, (left, HEAD - 20), bold(12.0))?;
            let style = anchored(letters(11.0, TEXT), HPos::Right, VPos::Top);
            text("best peer", (left + PANEL + 56, HEAD - 19), style)?;
        }

        let mut y = HEAD;
        for (at, variant) in variants.iter().enumerate() {
            if at == 0 || variants[at - 1].family != variant.family {
                text(variant.family, (20, y + 7), bold(12.0))?;
                root.draw(&PathElement::new(vec![(20, y), (WIDTH - 20, y)], AXIS))?;
                y += FAMILY;
            }
            let middle = y + row_height / 2;
            let style = anchored(letters(12.0, TEXT), HPos::Right, VPos::Center);
            text(&variant.label, (LABELS, middle), style)?;
            for (mode, _, left) in PANELS {
                let Some(table) = variant.tables.iter().find(|table| table.mode == mode) else {
                    continue;
                };
                let row = largest(table);
                let one = left + scale.at(1.0);
                let mut bar = y + (row_height - peers.len() as i32 * BAR) / 2;
                for peer in &peers {
                    if let Some(ratio) = row.ratio_to(peer) {
                        let end = left + scale.at(ratio);
                        let colour =
                            if ratio < MATCH { LOSS } else { colour::of(peer, &providers).rgb() };
                        // A match is a sliver, but there.
                        let (from, to) = (one.min(end), one.max(end).max(one.min(end) + 2));
                        let corners = [(from, bar), (to, bar + BAR - 1)];
                        root.draw(&Rectangle::new(corners, colour.filled()))?;
                    }
                    bar += BAR;
                }
                if let Some(ratio) = row.ratio() {
                    let colour = if ratio < MATCH { LOSS } else { TEXT };
                    let style = anchored(letters(12.0, colour), HPos::Right, VPos::Center);
                    text(&format!("{}×", times(ratio)), (left + PANEL + 56, middle), style)?;
                }
            }
            y += row_height;
        }
        root.present()?;
    }
    Ok(Some(svg))
}
