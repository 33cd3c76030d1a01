//! The chart of one table: values over n, both on logarithmic axes, a line for each provider.

use std::error::Error;
use std::ops::Range;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::colour::{self, AXIS, BACKGROUND, GRID, LIMIT, TEXT};
use super::data::{COPY, Cell, Row, Table, digits, is_ours};
use crate::case::Metric;

const WIDTH: u32 = 560;
const HEIGHT: u32 = 330;
/// Above the chart of a stand-alone picture, for its title and legend.
const HEAD: u32 = 78;
/// Labels on the axis of n: more would touch.
const MOST_LABELS: usize = 9;
/// The size of letters, and how wide one is, roughly: an SVG has no font to ask.
const LETTER: f64 = 13.0;
const LETTER_WIDTH: f64 = 7.0;

/// An SVG, and where its plotting area lies.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    pub(crate) svg: String,
    /// Pixels of the SVG.
    pub(crate) across: Range<i32>,
    pub(crate) down: Range<i32>,
    /// What the area's sides stand for.
    pub(crate) n: Range<f64>,
    pub(crate) value: Range<f64>,
}

/// A line of the chart.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    /// A provider, `copy` or `least`.
    pub(crate) key: String,
    pub(crate) label: String,
    pub(crate) colour: colour::Colour,
    pub(crate) is_limit: bool,
    /// A value for each row; for a logarithmic axis, only those above 0 can be drawn.
    pub(crate) values: Vec<Option<f64>>,
    /// Values whose outputs are wrong.
    wrong: Vec<Option<f64>>,
}

/// The lines of a table: limits, then peers, then ours.
pub(crate) fn lines(table: &Table, providers: &[String]) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut push = |key: &str, label: &str, right: &dyn Fn(&Row) -> Option<f64>| {
        let is_limit = key == COPY || key == "least";
        let wrong = |row: &Row| match row.cell(key) {
            Cell::Wrong(_, value) => Some(value),
            _ => None,
        };
        lines.push(Line {
            key: key.to_owned(),
            label: label.to_owned(),
            colour: if is_limit { LIMIT } else { colour::of(key, providers) },
            is_limit,
            values: table.rows.iter().map(right).collect(),
            wrong: table.rows.iter().map(wrong).collect(),
        });
    };
    if table.has(COPY) {
        push(COPY, "copy limit", &|row| row.cell(COPY).right());
    }
    if table.rows.iter().any(|row| row.least().is_some()) {
        push("least", "least possible", &Row::least);
    }
    for provider in table.providers.iter().rev() {
        push(provider, provider, &|row| row.cell(provider).right());
    }
    lines
}

/// Letters of this many pixels. Plotters divides by 1.24.
pub(crate) fn letters(size: f64, colour: RGBColor) -> TextStyle<'static> {
    ("sans-serif", size * 1.24).into_font().color(&colour)
}

pub(crate) fn anchored(style: TextStyle<'static>, h: HPos, v: VPos) -> TextStyle<'static> {
    style.pos(Pos::new(h, v))
}

/// The largest (or smallest) of 1, 2, 5, 10, 20, ... that is not above (or below) the value.
fn round_125(value: f64, up: bool) -> f64 {
    let decade = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * decade);
    // What is left of rounding errors may not cost a step.
    let slack = 1e-9 * value;
    if up {
        steps.into_iter().find(|step| *step >= value - slack).unwrap_or(10.0 * decade)
    } else {
        steps.into_iter().rev().find(|step| *step <= value + slack).unwrap_or(decade)
    }
}

/// Round numbers from `range.start` to `range.end`, not too many.
fn ticks(range: &Range<f64>) -> Vec<f64> {
    let decades = (range.end / range.start).log10();
    let mut ticks = Vec::new();
    let mut decade = 10f64.powf(range.start.log10().floor());
    let every = (decades / 6.0).ceil().max(1.0) as i32;
    while decade <= range.end * 1.001 {
        let steps: &[f64] = if decades <= 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        ticks.extend(steps.iter().map(|step| step * decade));
        decade *= 10f64.powi(every);
    }
    ticks.retain(|tick| *tick >= range.start * 0.999 && *tick <= range.end * 1.001);
    ticks
}

/// A tick's number, without zeros that say nothing.
fn tick_label(value: f64) -> String {
    if (1e-4..1e7).contains(&value) {
        let text = format!("{value:.4}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        format!("{value:.0e}")
    }
}

fn positive(value: &Option<f64>) -> Option<f64> {
    value.filter(|value| *value > 0.0)
}

/// The chart, for the page, or as a picture of its own.
pub(crate) fn draw(
    table: &Table,
    providers: &[String],
    stand_alone: bool,
) -> Result<Chart, Box<dyn Error>> {
    let lines = lines(table, providers);
    let head = if stand_alone { HEAD } else { 0 };
    let sizes: Vec<f64> = table.rows.iter().map(|row| row.n as f64).collect();
    let (first, last) = (sizes[0].max(1.0), sizes[sizes.len() - 1].max(1.0));
    // A single size stands in the middle.
    let margin = if first == last { 2.0 } else { (last / first).powf(0.04) };
    let n = first / margin..last * margin;
    let drawn =
        || lines.iter().flat_map(|line| line.values.iter().chain(&line.wrong)).filter_map(positive);
    let value = match (drawn().min_by(f64::total_cmp), drawn().max_by(f64::total_cmp)) {
        (Some(least), Some(most)) => {
            let (start, end) = (round_125(least * 0.93, false), round_125(most * 1.07, true));
            if start < end { start..end } else { start..start * 10.0 }
        }
        _ => 1.0..10.0,
    };

    let mut svg = String::new();
    let area = {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT + head)).into_drawing_area();
        if stand_alone {
            root.fill(&BACKGROUND)?;
            draw_head(&root, table, &lines)?;
        }
        let area = root.margin(head, 0, 0, 0);
        let every = sizes.len().div_ceil(MOST_LABELS);
        let mut chart = ChartBuilder::on(&area)
            .margin_top(10)
            .margin_right(14)
            .margin_bottom(4)
            .margin_left(6)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(
                n.clone()
                    .log_scale()
                    .with_key_points(sizes.iter().copied().step_by(every).collect()),
                value.clone().log_scale().with_key_points(ticks(&value)),
            )?;
        chart
            .configure_mesh()
            .bold_line_style(GRID)
            .light_line_style(GRID)
            .axis_style(AXIS)
            .label_style(letters(LETTER, TEXT))
            .x_desc("n")
            .y_desc(table.unit())
            .axis_desc_style(letters(LETTER, TEXT))
            .x_label_formatter(&|n| format!("{n:.0}"))
            .y_label_formatter(&|value| tick_label(*value))
            .draw()?;
        // A line that reaches its limit may not hide it: limits, which are thin, come on top.
        let (limits, values): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.is_limit);
        for line in values.into_iter().chain(limits) {
            draw_line(&mut chart, line, &sizes)?;
        }
        if drawn().next().is_none() {
            let middle = ((n.start * n.end).sqrt(), (value.start * value.end).sqrt());
            let style = anchored(letters(LETTER, TEXT), HPos::Center, VPos::Center);
            chart.draw_series([Text::new("no values above 0", middle, style)])?;
        }
        let area = chart.plotting_area().get_pixel_range();
        drop(chart);
        root.present()?;
        area
    };
    Ok(Chart { svg, across: area.0, down: area.1, n, value })
}

type Plot<'a, 'b> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<
        plotters::coord::combinators::WithKeyPoints<plotters::coord::combinators::LogCoord<f64>>,
        plotters::coord::combinators::WithKeyPoints<plotters::coord::combinators::LogCoord<f64>>,
    >,
>;

fn draw_line(chart: &mut Plot<'_, '_>, line: &Line, sizes: &[f64]) -> Result<(), Box<dyn Error>> {
    let colour = line.colour.rgb();
    let (width, dot) = if is_ours(&line.key) { (3, 4) } else { (2, 3) };
    let point = |(n, value): (&f64, &Option<f64>)| positive(value).map(|value| (*n, value));
    let points: Vec<_> = sizes.iter().zip(&line.values).map(point).collect();
    // A gap in the data is a gap in the line.
    for part in points.split(Option::is_none) {
        let part: Vec<(f64, f64)> = part.iter().flatten().copied().collect();
        if line.is_limit && part.len() > 1 {
            let style = colour.stroke_width(2);
            chart.draw_series(DashedLineSeries::new(part, 6, 5, style))?;
        } else if line.is_limit {
            chart.draw_series(part.into_iter().map(|at| Circle::new(at, 3, colour)))?;
        } else {
            if part.len() > 1 {
                chart.draw_series([PathElement::new(part.clone(), colour.stroke_width(width))])?;
            }
            chart.draw_series(part.into_iter().map(|at| Circle::new(at, dot, colour.filled())))?;
        }
    }
    let wrong = sizes.iter().zip(&line.wrong).filter_map(point);
    chart.draw_series(wrong.map(|at| Cross::new(at, 5, colour.stroke_width(2))))?;
    Ok(())
}

type Root<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw_head(root: &Root<'_>, table: &Table, lines: &[Line]) -> Result<(), Box<dyn Error>> {
    let bold = ("sans-serif", 15.0 * 1.24, FontStyle::Bold).into_font().color(&TEXT);
    root.draw(&Text::new(table.caption(), (14, 12), bold))?;
    let (mut x, mut y) = (14, 42);
    // Ours first, the limits last.
    for line in lines.iter().rev() {
        let wide = 24 + (line.label.len() as f64 * LETTER_WIDTH) as i32;
        if x + wide > WIDTH as i32 - 8 {
            (x, y) = (14, y + 19);
        }
        let colour = line.colour.rgb();
        let chips: &[(i32, i32)] = if line.is_limit { &[(0, 6), (10, 16)] } else { &[(0, 16)] };
        for (from, to) in chips {
            let ends = vec![(x + from, y), (x + to, y)];
            root.draw(&PathElement::new(ends, colour.stroke_width(3)))?;
        }
        let style = anchored(letters(12.0, TEXT), HPos::Left, VPos::Center);
        root.draw(&Text::new(line.label.clone(), (x + 21, y), style))?;
        x += wide + 14;
    }
    Ok(())
}

/// What a chart says to those who cannot see it.
pub(crate) fn description(table: &Table) -> String {
    let last = &table.rows[table.rows.len() - 1];
    let values: Vec<_> = table
        .providers
        .iter()
        .filter_map(|provider| {
            let value = last.cell(provider).right()?;
            Some(format!("{provider} {} {}", digits(value), table.unit()))
        })
        .collect();
    let what = match table.metric {
        Metric::Speed => "Time",
        Metric::Memory => "Memory",
    };
    format!("{what} over n: {}. At n = {}: {}.", table.caption(), last.n, values.join(", "))
}
