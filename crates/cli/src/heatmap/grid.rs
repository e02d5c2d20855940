//! Faults counted by address and time, with the addresses that nothing happened at cut out.

use std::collections::BTreeSet;

use selfpage::trace::{Record, Trace};

/// Columns of the picture.
pub const COLUMNS: usize = 200;
/// Rows of it, about: each stretch of addresses has one at least.
pub const ROWS: usize = 120;
/// A gap of fewer pages is drawn: not worth a cut.
const LEAST_GAP: u64 = 64;
/// More stretches than this cannot be told apart: the smallest gaps between them are drawn.
const MOST_STRETCHES: usize = 24;

/// Neighbouring pages that are drawn together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// First page, and the one after the last.
    pub pages: std::ops::Range<u64>,
    /// Rows of the picture, from the lowest address up.
    pub rows: std::ops::Range<usize>,
    /// The region that it is in.
    pub region: String,
}

/// Faults by row and column.
pub struct Grid {
    /// By address.
    pub stretches: Vec<Stretch>,
    /// Faults in each cell, row by row from the lowest address.
    pub cells: Vec<[u32; COLUMNS]>,
    /// How long the trace is.
    pub end_ns: u64,
    /// The most faults of any cell.
    pub most: u32,
    /// All faults.
    pub faults: u64,
}

impl Grid {
    /// `None`: there are no faults.
    pub fn of(trace: &Trace) -> Option<Grid> {
        let faults = || trace.events().filter(|event| event.kind.is_fault());
        let pages: BTreeSet<u64> = faults().map(|event| event.page.0).collect();
        let stretches = lay_out(stretches(&pages), |page| region_of(trace, page));
        // Estimates of the working set go on where there are no faults, and share the axis.
        let estimates = trace.records.iter().filter_map(|record| match record {
            Record::WorkingSet { time_ns, .. } => Some(*time_ns),
            _ => None,
        });
        let end_ns = trace.events().map(|event| event.time_ns).chain(estimates).max()?.max(1);
        let mut cells = vec![[0; COLUMNS]; stretches.last()?.rows.end];
        for event in faults() {
            let column = (u128::from(event.time_ns) * COLUMNS as u128 / (u128::from(end_ns) + 1)) as usize;
            let at = stretches.partition_point(|stretch| stretch.pages.end <= event.page.0);
            if let Some(cell) =
                stretches.get(at).map(|stretch| stretch.row(event.page.0)).and_then(|row| cells.get_mut(row))
            {
                cell[column] += 1;
            }
        }
        let most = cells.iter().flatten().copied().max()?;
        Some(Grid { stretches, cells, end_ns, most, faults: faults().count() as u64 })
    }
}

impl Stretch {
    fn row(&self, page: u64) -> usize {
        let (into, len) = (page - self.pages.start, self.pages.end - self.pages.start);
        self.rows.start + (u128::from(into) * self.rows.len() as u128 / u128::from(len)) as usize
    }
}

/// The stretches of pages, cut at the largest gaps.
fn stretches(pages: &BTreeSet<u64>) -> Vec<std::ops::Range<u64>> {
    let gaps = pages.iter().zip(pages.iter().skip(1)).map(|(before, after)| (after - before, *after));
    let mut gaps: Vec<(u64, u64)> = gaps.filter(|(gap, _)| *gap >= LEAST_GAP).collect();
    // Of gaps that are as large, the lower ones.
    gaps.sort_by_key(|(gap, _)| std::cmp::Reverse(*gap));
    let cuts: BTreeSet<u64> = gaps.into_iter().take(MOST_STRETCHES - 1).map(|(_, after)| after).collect();
    let mut found: Vec<std::ops::Range<u64>> = Vec::new();
    for &page in pages {
        match found.last_mut() {
            Some(last) if !cuts.contains(&page) => last.end = page + 1,
            _ => found.push(page..page + 1),
        }
    }
    found
}

fn lay_out(stretches: Vec<std::ops::Range<u64>>, region: impl Fn(u64) -> String) -> Vec<Stretch> {
    let all: u64 = stretches.iter().map(|pages| pages.end - pages.start).sum();
    let mut row = 0;
    stretches
        .into_iter()
        .map(|pages| {
            let len = pages.end - pages.start;
            // No more rows than pages, and one at least.
            let rows = ((len * ROWS as u64).div_ceil(all.max(1))).min(len).max(1) as usize;
            row += rows;
            Stretch { region: region(pages.start), pages, rows: row - rows..row }
        })
        .collect()
}

fn region_of(trace: &Trace, page: u64) -> String {
    let holds = |record: &Record| match record {
        Record::Region { first, pages, name } if (first.0..first.0 + pages).contains(&page) => Some(name.clone()),
        _ => None,
    };
    trace.records.iter().rev().find_map(holds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_cut_and_every_stretch_has_a_row() {
        let pages: BTreeSet<u64> = (0..1000).chain([1010, 5000]).chain(1 << 30..(1 << 30) + 500).collect();
        let found = stretches(&pages);
        assert_eq!(found, [0..1011, 5000..5001, 1 << 30..(1 << 30) + 500]);
        let laid = lay_out(found, |_| String::new());
        assert_eq!(laid[1].rows.len(), 1);
        assert!(laid.windows(2).all(|two| two[0].rows.end == two[1].rows.start));
        assert_eq!((laid[0].row(0), laid[0].row(1010)), (0, laid[0].rows.end - 1));
        let many: BTreeSet<u64> = (0..100).map(|at| at * at * 100).collect();
        assert_eq!(stretches(&many).len(), MOST_STRETCHES);
        let alike: BTreeSet<u64> = (0..100).map(|at| at * 1000).collect();
        assert_eq!(stretches(&alike).len(), MOST_STRETCHES, "gaps as large as each other");
    }

    /// A trace of records: kind, time, page, value.
    fn trace(records: &[(u8, u64, u64, u64)]) -> Trace {
        let mut bytes = b"SELFPGTR\x01\0\0\0\0\x10\0\0\x20\0\0\0\x01\0\0\0".to_vec();
        bytes.extend_from_slice(&[0; 8]);
        for (kind, time_ns, page, value) in records {
            bytes.extend_from_slice(&[*kind, 0, 0, 0, 0, 0, 0, 0]);
            [time_ns, page, value].iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        }
        Trace::parse(&bytes).unwrap()
    }

    #[test]
    fn the_axis_reaches_to_the_last_estimate() {
        let (region, fault, estimate) = ((64, 0, 1000, 10), (1, 500, 1000, 0), |time_ns| (66, time_ns, 3, 0));
        let end_ns = |estimates: [_; 2]| Grid::of(&trace(&[&[region, fault], &estimates[..]].concat())).unwrap().end_ns;
        assert_eq!(end_ns([estimate(1000), estimate(2000)]), 2000);
        assert_eq!(end_ns([estimate(100), estimate(200)]), 500);
    }

    #[test]
    fn faults_are_counted_where_and_when_they_were() {
        let end_ns = COLUMNS as u64 * 10 - 1;
        let grid = Grid::of(&trace(&[
            (64, 0, 1000, 10),
            (64, 0, 9000, 10),
            (1, 0, 1000, 0),
            (2, 5, 1000, 0),
            (3, 10, 1009, 0),
            (4, end_ns, 9003, 0),
            // No faults.
            (7, end_ns, 1000, 0),
            (6, end_ns, 5000, 0),
        ]))
        .unwrap();
        let pages: Vec<_> = grid.stretches.iter().map(|stretch| stretch.pages.clone()).collect();
        assert_eq!(pages, [1000..1010, 9003..9004]);
        assert_eq!((grid.faults, grid.most, grid.end_ns), (4, 2, end_ns));
        let lit = grid.cells.iter().enumerate().flat_map(|(row, cells)| {
            cells.iter().enumerate().filter(|cell| *cell.1 > 0).map(move |(column, count)| (row, column, *count))
        });
        let last = grid.stretches[1].rows.start;
        assert_eq!(lit.collect::<Vec<_>>(), [(0, 0, 2), (9, 1, 1), (last, COLUMNS - 1, 1)]);
    }
}
