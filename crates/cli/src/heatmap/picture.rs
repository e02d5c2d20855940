//! The picture itself. The same trace gives the same bytes.

use std::fmt::Write as _;

use selfpage::trace::{Record, Trace};

use super::grid::{COLUMNS, Grid};
use crate::svg::{self, escaped, text};

const LEFT: f64 = 190.0;
const TOP: f64 = 50.0;
const WIDTH: f64 = 800.0;
const ROW: f64 = 4.0;
/// Between two stretches of addresses.
const CUT: f64 = 10.0;
/// Of the working set below.
const LINE: f64 = 110.0;
/// From little to much; ordered in lightness, so that it reads in grey too.
const SHADES: [&str; 6] = ["#fee8c8", "#fdbb84", "#fc8d59", "#e34a33", "#b30000", "#5c0000"];

/// The picture of a trace called `name`.
pub fn draw(trace: &Trace, grid: &Grid, name: &str) -> String {
    let height = grid.cells.len() as f64 * ROW + (grid.stretches.len() - 1) as f64 * CUT;
    let below = TOP + height + 60.0;
    let mut svg = svg::open(LEFT + WIDTH + 150.0, below + LINE + 60.0);
    let title = format!("Faults by address and time: {name}, process {}, {} faults", trace.head.pid, grid.faults);
    svg::headline(&mut svg, LEFT, &title);
    if trace.dropped() > 0 {
        let lost = format!("{} events came faster than they could be written, and are not here", trace.dropped());
        text(&mut svg, LEFT, 42.0, "start", &lost);
    }
    cells(&mut svg, trace, grid, height);
    time_axis(&mut svg, grid, TOP + height);
    legend(&mut svg, grid);
    working_set(&mut svg, trace, grid, below);
    svg::close(&mut svg);
    svg
}

/// Which shade a count has: by its logarithm, as counts of faults span many orders.
fn shade(count: u32, most: u32) -> usize {
    let share = f64::from(count).ln_1p() / f64::from(most).ln_1p();
    ((share * SHADES.len() as f64).ceil() as usize).clamp(1, SHADES.len()) - 1
}

/// Each stretch of addresses, the lowest at the bottom.
fn cells(svg: &mut String, trace: &Trace, grid: &Grid, height: f64) {
    let cell = WIDTH / COLUMNS as f64;
    let page_bytes = u64::from(trace.head.page_bytes);
    let mut foot = TOP + height;
    for (at, stretch) in grid.stretches.iter().enumerate() {
        let head = foot - stretch.rows.len() as f64 * ROW;
        let tall = foot - head;
        let _ = writeln!(
            svg,
            "<rect x=\"{LEFT:.1}\" y=\"{head:.1}\" width=\"{WIDTH:.1}\" height=\"{tall:.1}\" fill=\"#f7f7f7\" stroke=\"#999\"/>"
        );
        for (above, row) in stretch.rows.clone().enumerate() {
            let y = foot - (above + 1) as f64 * ROW;
            for (column, &count) in grid.cells[row].iter().enumerate().filter(|(_, count)| **count > 0) {
                let x = LEFT + column as f64 * cell;
                let fill = SHADES[shade(count, grid.most)];
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{cell:.1}\" height=\"{ROW:.1}\" fill=\"{fill}\"/>"
                );
            }
        }
        let size = bytes((stretch.pages.end - stretch.pages.start) * page_bytes);
        let label = format!("{:#x} {} {size}", stretch.pages.start * page_bytes, escaped(&stretch.region));
        if tall >= 12.0 || grid.stretches.len() <= 12 {
            text(svg, LEFT - 6.0, foot, "end", &label);
        }
        if let Some(next) = grid.stretches.get(at + 1) {
            let gap = bytes((next.pages.start - stretch.pages.end) * page_bytes);
            let y = head - CUT / 2.0;
            let _ = writeln!(
                svg,
                "<line class=\"cut\" x1=\"{LEFT:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"#999\" \
                 stroke-dasharray=\"2 4\"><title>{gap} without faults are cut out here</title></line>",
                LEFT + WIDTH
            );
        }
        foot = head - CUT;
    }
    let middle = TOP + height / 2.0;
    let _ = writeln!(
        svg,
        "<text x=\"16\" y=\"{middle:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {middle:.1})\">address (dotted: \
         addresses without faults, cut out)</text>"
    );
}

fn time_axis(svg: &mut String, grid: &Grid, foot: f64) {
    let seconds = grid.end_ns as f64 / 1e9;
    for tick in 0..=5 {
        let x = LEFT + WIDTH * f64::from(tick) / 5.0;
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{foot:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"black\"/>",
            foot + 5.0
        );
        text(svg, x, foot + 18.0, "middle", &format!("{:.3}", seconds * f64::from(tick) / 5.0));
    }
    text(svg, LEFT + WIDTH / 2.0, foot + 34.0, "middle", "time (s)");
}

fn legend(svg: &mut String, grid: &Grid) {
    let x = LEFT + WIDTH + 20.0;
    text(svg, x, TOP + 10.0, "start", "faults in a cell");
    let mut from = 1;
    let mut y = TOP + 20.0;
    for (place, shown) in SHADES.into_iter().enumerate() {
        // The counts that have this shade.
        let to = last_of(place, grid.most);
        if to < from {
            continue;
        }
        let range = if from == to { format!("{from}") } else { format!("{from} to {to}") };
        let _ = writeln!(svg, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"14\" height=\"14\" fill=\"{shown}\"/>");
        text(svg, x + 20.0, y + 11.0, "start", &range);
        from = to + 1;
        y += 18.0;
    }
}

/// The largest count, up to `most`, that is no darker than the shade at `place`.
fn last_of(place: usize, most: u32) -> u32 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = high - (high - low) / 2;
        if shade(middle, most) > place { high = middle - 1 } else { low = middle }
    }
    low
}

/// The estimates of the working set, with their bounds.
fn working_set(svg: &mut String, trace: &Trace, grid: &Grid, top: f64) {
    let points: Vec<(u64, u64, u32, u32)> = trace
        .records
        .iter()
        .filter_map(|record| match record {
            Record::WorkingSet { time_ns, pages, least, most } => Some((*time_ns, *pages, *least, *most)),
            _ => None,
        })
        .collect();
    let foot = top + LINE;
    let _ = writeln!(
        svg,
        "<rect x=\"{LEFT:.1}\" y=\"{top:.1}\" width=\"{WIDTH:.1}\" height=\"{LINE:.1}\" fill=\"none\" stroke=\"#999\"/>"
    );
    text(svg, LEFT, top - 6.0, "start", "working set (bars: 95 of 100 cases)");
    if points.is_empty() {
        let none = "the trace has no estimate of it: the program ended before the first, or --sample-ms was 0";
        return text(svg, LEFT + WIDTH / 2.0, top + LINE / 2.0, "middle", none);
    }
    let highest = points.iter().map(|point| point.1.max(u64::from(point.3))).max().unwrap_or(1).max(1);
    let x = |time_ns: u64| LEFT + WIDTH * time_ns as f64 / grid.end_ns as f64;
    let y = |pages: u64| foot - LINE * pages as f64 / highest as f64;
    for share in [0, 1, 2] {
        let pages = highest * share / 2;
        text(svg, LEFT - 6.0, y(pages) + 4.0, "end", &bytes(pages * u64::from(trace.head.page_bytes)));
    }
    for &(time_ns, _, least, most) in &points {
        let (x, low, high) = (x(time_ns), y(least.into()), y(most.into()));
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{low:.1}\" x2=\"{x:.1}\" y2=\"{high:.1}\" stroke=\"#9ecae1\" stroke-width=\"3\"/>"
        );
    }
    let line: Vec<String> = points.iter().map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1))).collect();
    let _ = writeln!(
        svg,
        "<polyline class=\"working-set\" points=\"{}\" fill=\"none\" stroke=\"#08519c\" stroke-width=\"1.5\"/>",
        line.join(" ")
    );
    text(
        svg,
        LEFT + WIDTH / 2.0,
        foot + 20.0,
        "middle",
        "same time as above; bytes that were used since the estimate before",
    );
}

fn bytes(bytes: u64) -> String {
    let units = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shades_rise_with_counts_and_the_legend_has_them_all() {
        for most in [1, 2, 7, 1000] {
            let places: Vec<_> = (1..=most).map(|count| shade(count, most)).collect();
            assert!(places.is_sorted(), "{most}: {places:?}");
            assert_eq!(places.last(), Some(&(SHADES.len() - 1)));
            assert_eq!(last_of(SHADES.len() - 1, most), most);
        }
        assert_eq!(escaped("a<b>&\"\u{1}"), "a&lt;b&gt;&amp;&quot;?");
        assert_eq!((bytes(512), bytes(3 << 19)), ("512 B".into(), "1.5 MiB".into()));
    }
}
