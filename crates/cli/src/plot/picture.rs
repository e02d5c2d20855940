//! The picture itself. The same run gives the same bytes.

use std::fmt::Write as _;

use super::record::Record;
use super::scale::Scale;
use crate::svg::{self, escaped, text};

const LEFT: f64 = 90.0;
const TOP: f64 = 60.0;
const HEIGHT: f64 = 300.0;
/// For the names of cases below a panel, and its unit above the next.
const BETWEEN: f64 = 150.0;
const LEGEND: f64 = 180.0;
/// Of a case, without what its systems take.
const CASE: f64 = 24.0;
/// Between two systems in one case.
const ASIDE: f64 = 4.0;
/// To be told apart by those who see red and green alike, too.
const COLOURS: [&str; 10] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933", "#882255", "#777777"];

/// A panel for each unit. `None`: there is nothing to draw.
pub fn draw(records: &[Record], name: &str) -> Option<String> {
    let bench = &records.first()?.bench;
    let systems = distinct(records.iter().map(|record| record.system.as_str()));
    let units = distinct(records.iter().map(|record| record.unit.as_str()));
    let panels: Vec<Panel<'_>> = units.iter().map(|unit| Panel::of(records, unit, &systems)).collect();
    let width = panels.iter().map(Panel::width).fold(320.0, f64::max);
    let height = TOP + panels.len() as f64 * (HEIGHT + BETWEEN);
    let mut svg = svg::open(LEFT + width + LEGEND, height);
    svg::headline(&mut svg, LEFT, &format!("{bench}: {name}"));
    legend(&mut svg, LEFT + width + 20.0, &systems);
    if records.iter().any(|record| record.flaw.is_some()) {
        let below = TOP + 10.0 + 18.0 * systems.len() as f64;
        text(&mut svg, LEFT + width + 20.0, below, "start", "hollow: its tooltip says why");
    }
    for (at, panel) in panels.iter().enumerate() {
        panel.draw(&mut svg, TOP + at as f64 * (HEIGHT + BETWEEN));
    }
    svg::close(&mut svg);
    Some(svg)
}

/// In the order of their first appearance.
pub fn distinct<'a>(words: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    words.fold(Vec::new(), |mut seen, word| {
        if !seen.contains(&word) {
            seen.push(word);
        }
        seen
    })
}

fn colour(system: usize) -> &'static str {
    COLOURS[system % COLOURS.len()]
}

/// What runs out of colours is hollow.
fn fill(system: usize) -> &'static str {
    if system < COLOURS.len() { colour(system) } else { "white" }
}

fn legend(svg: &mut String, x: f64, systems: &[&str]) {
    for (at, system) in systems.iter().enumerate() {
        let y = TOP + 10.0 + 18.0 * at as f64;
        let _ = writeln!(
            svg,
            "<circle cx=\"{x:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{}\" stroke=\"{}\"/>",
            y - 4.0,
            fill(at),
            colour(at)
        );
        text(svg, x + 10.0, y, "start", &escaped(system));
    }
}

/// The cases that have one unit.
struct Panel<'a> {
    unit: &'a str,
    systems: &'a [&'a str],
    cases: Vec<&'a str>,
    records: Vec<&'a Record>,
    scale: Scale,
}

impl<'a> Panel<'a> {
    fn of(records: &'a [Record], unit: &'a str, systems: &'a [&'a str]) -> Panel<'a> {
        let records: Vec<&Record> = records.iter().filter(|record| record.unit == unit).collect();
        let cases = distinct(records.iter().map(|record| record.case.as_str()));
        let least = records.iter().map(|record| record.min).fold(f64::INFINITY, f64::min);
        let most = records.iter().map(|record| record.max).fold(0.0, f64::max);
        Panel { unit, systems, cases, records, scale: Scale::of(least, most) }
    }

    fn case_width(&self) -> f64 {
        CASE + self.systems.len() as f64 * ASIDE
    }

    fn width(&self) -> f64 {
        self.cases.len() as f64 * self.case_width()
    }

    fn draw(&self, svg: &mut String, top: f64) {
        let (width, foot) = (self.width(), top + HEIGHT);
        text(svg, LEFT, top - 8.0, "start", &escaped(self.unit));
        for mark in &self.scale.marks {
            let y = foot - HEIGHT * self.scale.share(*mark);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>",
                LEFT + width
            );
            text(svg, LEFT - 6.0, y + 4.0, "end", &short(*mark));
        }
        for (at, case) in self.cases.iter().enumerate() {
            let (x, y) = (LEFT + (at as f64 + 0.5) * self.case_width(), foot + 14.0);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\" transform=\"rotate(-45 {x:.1} {y:.1})\">{}</text>",
                escaped(case)
            );
        }
        for (at, system) in self.systems.iter().enumerate() {
            self.system(svg, foot, at, system);
        }
    }

    /// Points with their ranges; those of one series of lengths are joined.
    fn system(&self, svg: &mut String, foot: f64, at: usize, system: &str) {
        let aside = (at as f64 - (self.systems.len() - 1) as f64 / 2.0) * ASIDE;
        let y = |value: f64| foot - HEIGHT * self.scale.share(value);
        let mut before: Option<(&Record, f64)> = None;
        for record in self.records.iter().filter(|record| record.system == system) {
            let case = self.cases.iter().position(|case| *case == record.case).unwrap_or(0);
            let x = LEFT + (case as f64 + 0.5) * self.case_width() + aside;
            if let Some((last, from)) =
                before.filter(|(last, _)| last.series().is_some() && last.series() == record.series())
            {
                let _ = writeln!(
                    svg,
                    "<line class=\"series\" x1=\"{from:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"{}\"/>",
                    y(last.value),
                    y(record.value),
                    colour(at)
                );
            }
            before = Some((record, x));
            // A system that ran out of colours is hollow as well, and not dashed.
            let dashes = if record.flaw.is_some() { " stroke-dasharray=\"2 1\"" } else { "" };
            let flaw = record.flaw.as_ref().map(|why| format!("; {}", escaped(why))).unwrap_or_default();
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"{}\"/>\n\
                 <circle class=\"value\" cx=\"{x:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{}\" stroke=\"{}\"{dashes}>\
                 <title>{}, {}: {} {} ({} to {}){flaw}</title></circle>",
                y(record.min),
                y(record.max),
                colour(at),
                y(record.value),
                if record.flaw.is_some() { "white" } else { fill(at) },
                colour(at),
                escaped(system),
                escaped(&record.case),
                short(record.value),
                escaped(self.unit),
                short(record.min),
                short(record.max)
            );
        }
    }
}

/// Three digits or so, without zeros that say nothing.
fn short(value: f64) -> String {
    let digits = (2 - value.log10().floor() as i32).max(0) as usize;
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(case: &str, system: &str, unit: &str, value: f64) -> Record {
        let (bench, case, system, unit) = ("b".into(), case.into(), system.into(), unit.into());
        Record { bench, case, system, unit, value, min: value / 2.0, max: value * 2.0, flaw: None }
    }

    #[test]
    fn each_value_is_a_point_and_lengths_are_joined() {
        let records = [
            record("warm-16k", "ours", "cycles", 10.0),
            record("warm-64k", "ours", "cycles", 20.0),
            record("cold-16k", "ours", "cycles", 500.0),
            record("warm-16k", "<theirs>", "cycles", 4_000.0),
            record("vector", "ours", "ns", 3.0),
        ];
        let svg = draw(&records, "a & b").unwrap();
        assert_eq!(svg.matches("class=\"value\"").count(), 5);
        assert_eq!(svg.matches("class=\"series\"").count(), 1, "warm alone has two lengths");
        assert!(svg.contains("b: a &amp; b") && svg.contains("&lt;theirs&gt;, warm-16k: 4000 cycles (2000 to 8000)"));
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert_eq!(draw(&[], "empty"), None);
        let flawed = Record { flaw: Some("unconstrained".into()), ..records[0].clone() };
        let flawed = draw(&[flawed], "flawed").unwrap();
        assert!(flawed.contains("(5 to 20); unconstrained</title>") && flawed.contains("hollow: "), "{flawed}");
        let strange = Record { flaw: Some("a < b & c".into()), ..records[0].clone() };
        assert!(draw(&[strange], "strange").unwrap().contains("(5 to 20); a &lt; b &amp; c</title>"));
        assert!(flawed.contains("fill=\"white\" stroke=\"#0072b2\" stroke-dasharray") && !svg.contains("hollow: "));
    }

    #[test]
    fn the_least_and_the_most_that_a_run_may_have_are_drawn() {
        let svg = draw(&[record("c", "s", "ns", 2e-30), record("d", "s", "ns", 5e29)], "extremes").unwrap();
        assert!(svg.matches("class=\"value\"").count() == 2 && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(
            [0.0123, 1.2039, 31.5, 1000.0, 4_000_000.0].map(short),
            ["0.0123", "1.2", "31.5", "1000", "4000000"]
        );
    }
}
