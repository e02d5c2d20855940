//! What a case gave: one sample from each child, and the record made of all repetitions.

use std::fmt::Write;

/// Figures that are the most of something.
const MAXIMA: [&str; 6] =
    ["max_us", "kept_max_us", "pause_max_ms", "core_max_bytes", "memory_max_bytes", "extra_bytes_max"];

/// The unit of a case's value, and which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// As in `unit` of the results.
    pub name: &'static str,
    /// Which way is better.
    pub better: Better,
}

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Rates.
    Higher,
    /// Times and shares.
    Lower,
}

/// What the time of an operation is, in benches whose values are no times.
#[derive(Clone, Debug, PartialEq)]
pub enum Timing {
    /// So many nanoseconds.
    Ns(f64),
    /// It would say nothing: why.
    Refused(String),
}

/// One repetition.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// In the unit of the case.
    pub value: f64,
    /// Why it does not count, if so.
    pub flaw: Option<String>,
    /// Of benches whose values are no times.
    pub timing: Option<Timing>,
    /// More figures, by name.
    pub figures: Vec<(String, f64)>,
}

impl Sample {
    /// One that counts, with more figures.
    pub fn of(value: f64, figures: &[(&str, f64)]) -> Sample {
        let figures = figures.iter().map(|(name, value)| (name.to_string(), *value)).collect();
        Sample { value, flaw: None, timing: None, figures }
    }

    /// A figure by its name.
    pub fn figure(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|figure| figure.0 == name).map(|figure| figure.1)
    }

    /// As the child writes it: a line for each figure.
    pub fn to_lines(&self) -> String {
        let flaw = self.flaw.as_ref().map_or("counts".to_string(), |why| format!("flawed {why}"));
        let mut lines = format!("{flaw}\nvalue {}\n", self.value);
        let _ = match &self.timing {
            None => writeln!(lines, "untimed"),
            Some(Timing::Ns(ns)) => writeln!(lines, "ns {ns}"),
            Some(Timing::Refused(why)) => writeln!(lines, "refused {why}"),
        };
        for (name, value) in &self.figures {
            let _ = writeln!(lines, "{name} {value}");
        }
        lines
    }

    /// What [`Sample::to_lines`] wrote; `None` if it was cut short.
    pub fn from_lines(lines: &str) -> Option<Sample> {
        let mut lines = lines.lines();
        let flaw = match lines.next()? {
            "counts" => None,
            line => Some(line.strip_prefix("flawed ")?.to_string()),
        };
        let value = lines.next()?.strip_prefix("value ")?.parse().ok()?;
        let timing = match lines.next()?.split_once(' ') {
            None => None,
            Some(("ns", ns)) => Some(Timing::Ns(ns.parse().ok()?)),
            Some((_, why)) => Some(Timing::Refused(why.to_string())),
        };
        let figure = |line: &str| {
            let (name, value) = line.split_once(' ')?;
            Some((name.to_string(), value.parse().ok()?))
        };
        Some(Sample { value, flaw, timing, figures: lines.map(figure).collect::<Option<_>>()? })
    }
}

/// Whether the memory limit held, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Confinement {
    /// The bench measures no paging.
    NotNeeded,
    /// In the cgroup.
    Cgroup,
    /// No cgroup could be made.
    Missing,
}

/// All repetitions of a case by a system.
#[derive(Clone, Debug)]
pub struct Record {
    /// The bench.
    pub bench: &'static str,
    /// The case.
    pub case: String,
    /// The system.
    pub system: &'static str,
    /// Of the values.
    pub unit: Unit,
    /// Whether the memory limit held.
    pub confinement: Confinement,
    /// At least one.
    pub samples: Vec<Sample>,
}

impl Record {
    /// The median of the values.
    pub fn value(&self) -> f64 {
        median(self.samples.iter().map(|sample| sample.value).collect())
    }

    /// The least and the greatest value.
    pub fn range(&self) -> (f64, f64) {
        let values = || self.samples.iter().map(|sample| sample.value);
        (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max))
    }

    /// True if all repetitions count.
    pub fn counts(&self) -> bool {
        self.flaw().is_none()
    }

    /// Why it does not count, if so.
    pub fn flaw(&self) -> Option<&str> {
        self.samples.iter().find_map(|sample| sample.flaw.as_deref())
    }

    /// A figure over the repetitions: the greatest of what is a maximum, else the median.
    pub fn figure(&self, name: &str) -> Option<f64> {
        let values: Vec<f64> = self.samples.iter().filter_map(|sample| sample.figure(name)).collect();
        if MAXIMA.contains(&name) {
            values.into_iter().reduce(f64::max)
        } else {
            (!values.is_empty()).then(|| median(values))
        }
    }

    /// The median of the times, unless one was refused.
    pub fn timing(&self) -> Option<Timing> {
        let mut times = Vec::new();
        for sample in &self.samples {
            match sample.timing.as_ref()? {
                Timing::Ns(ns) => times.push(*ns),
                refused @ Timing::Refused(_) => return Some(refused.clone()),
            }
        }
        Some(Timing::Ns(median(times)))
    }

    /// One line of JSON.
    pub fn to_json(&self) -> String {
        let (min, max) = self.range();
        let mut json = format!(
            r#"{{"bench":"{}","case":"{}","system":"{}","value":{},"unit":"{}","n":{},"min":{},"max":{},"counts":{}"#,
            self.bench,
            self.case,
            self.system,
            number(self.value()),
            self.unit.name,
            self.samples.len(),
            number(min),
            number(max),
            self.counts(),
        );
        if let Some(why) = self.flaw() {
            let _ = write!(json, r#","why_not_counted":{}"#, serde_json::Value::from(why));
        }
        if self.confinement != Confinement::NotNeeded {
            let _ = write!(json, r#","constrained":{}"#, self.confinement == Confinement::Cgroup);
        }
        let _ = match self.timing() {
            None => Ok(()),
            Some(Timing::Ns(ns)) => write!(json, r#","timings":{{"ns_per_operation":{}}}"#, number(ns)),
            Some(Timing::Refused(why)) => {
                write!(json, r#","timings":null,"why_no_timings":{}"#, serde_json::Value::from(why))
            }
        };
        let names = self.samples.first().map(|sample| &sample.figures).into_iter().flatten().map(|figure| &figure.0);
        for name in names {
            if let Some(value) = self.figure(name) {
                let _ = write!(json, r#","{name}":{}"#, number(value));
            }
        }
        let samples: Vec<String> = self.samples.iter().map(|sample| number(sample.value)).collect();
        let _ = write!(json, r#","samples":[{}]}}"#, samples.join(","));
        json
    }
}

/// The middle; of two, what lies between. There is one at least.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// At most four decimals; JSON knows no infinities.
fn number(value: f64) -> String {
    if !value.is_finite() {
        return "null".into();
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(value: f64) -> Sample {
        Sample::of(value, &[("misses", value * 10.0), ("max_us", value * 2.0)])
    }

    #[test]
    fn a_sample_survives_the_pipe() {
        let sample = sample(0.1 + 0.2);
        assert_eq!(Sample::from_lines(&sample.to_lines()), Some(sample.clone()));
        for timing in [Timing::Ns(0.3), Timing::Refused("ring 0 is emulated".into())] {
            let sample = Sample { timing: Some(timing), ..sample.clone() };
            assert_eq!(Sample::from_lines(&sample.to_lines()), Some(sample));
        }
        let flawed = Sample { flaw: Some("frames were not full".into()), ..sample.clone() };
        assert_eq!(Sample::from_lines(&flawed.to_lines()), Some(flawed));
        assert_eq!(Sample::from_lines("counts\nval"), None);
        assert_eq!(Sample::from_lines(""), None);
    }

    #[test]
    fn a_record_is_the_median_and_one_line() {
        let unit = Unit { name: "MiB/s", better: Better::Higher };
        let samples = vec![sample(3.0), sample(1.0), sample(2.5)];
        let record = Record {
            bench: "paging",
            case: "seq-read-1t".into(),
            system: "swap",
            unit,
            confinement: Confinement::Missing,
            samples,
        };
        assert_eq!(
            record.to_json(),
            concat!(
                r#"{"bench":"paging","case":"seq-read-1t","system":"swap","value":2.5,"unit":"MiB/s","n":3,"min":1,"max":3,"#,
                r#""counts":true,"constrained":false,"misses":25,"max_us":6,"samples":[3,1,2.5]}"#
            )
        );
    }

    #[test]
    fn a_time_that_says_nothing_is_not_told() {
        let unit = Unit { name: "faults", better: Better::Lower };
        let json = |timings: [Option<Timing>; 3]| {
            let samples = timings.map(|timing| Sample { timing, ..Sample::of(1.0, &[]) }).to_vec();
            let confinement = Confinement::NotNeeded;
            Record { bench: "guest", case: "trap".into(), system: "guest", unit, confinement, samples }.to_json()
        };
        let ns = |ns| Some(Timing::Ns(ns));
        let refused = || Some(Timing::Refused("\"emulated\"".into()));
        assert!(!json([None, None, None]).contains("timings"));
        assert!(json([ns(3.0), ns(1.0), ns(2.0)]).contains(r#","timings":{"ns_per_operation":2},"#));
        let json = json([ns(3.0), refused(), ns(2.0)]);
        assert!(
            json.contains(r#","timings":null,"why_no_timings":"\"emulated\"","#) && !json.contains("ns_"),
            "{json}"
        );
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
        assert_eq!(median(vec![9.0, 1.0, 2.0]), 2.0);
        assert_eq!(number(f64::NAN), "null");
        assert_eq!(number(100.0), "100");
    }
}
