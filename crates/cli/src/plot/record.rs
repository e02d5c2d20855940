//! The lines of a run that a picture needs.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::picture::distinct;

/// What may be above zero in a run. Beyond it powers of ten have no numbers, and a scale no marks.
const SHOWN: RangeInclusive<f64> = 1e-30..=1e30;

/// What one system gave in one case.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub bench: String,
    pub case: String,
    pub system: String,
    pub unit: String,
    pub value: f64,
    pub min: f64,
    pub max: f64,
    /// Why it says less than others do.
    pub flaw: Option<String>,
}

impl Record {
    /// The lines of raw.jsonl, all of one bench, without those that have no value or none above zero: they have no place on a logarithmic
    /// scale.
    pub fn parse(text: &str) -> Result<Vec<Record>, String> {
        let numbered = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let parsed =
            numbered.map(|(at, line)| Record::of(line).map_err(|why| format!("raw.jsonl, line {}: {why}", at + 1)));
        let records: Vec<Record> = parsed.collect::<Result<_, _>>()?;
        let benches = records.iter().map(|record| record.bench.as_str());
        if let [first, other, ..] = distinct(benches)[..] {
            return Err(format!(
                "raw.jsonl has records of {first} and of {other}: keep each in a directory of its own"
            ));
        }
        Ok(records.into_iter().filter(|record| record.value > 0.0).collect())
    }

    fn of(line: &str) -> Result<Record, String> {
        let object: Value = serde_json::from_str(line).map_err(|why| why.to_string())?;
        let word = |key: &str| object[key].as_str().map(str::to_owned).ok_or_else(|| format!("it has no \"{key}\""));
        let figure = |key: &str| match object[key].as_f64().filter(|figure| *figure > 0.0) {
            Some(figure) if !SHOWN.contains(&figure) => {
                Err(format!("\"{key}\" is {}, and no figure of a bench", object[key]))
            }
            figure => Ok(figure),
        };
        object.get("value").ok_or("it has no \"value\"")?;
        let value = figure("value")?.unwrap_or(f64::NAN);
        // What a picture can show of the range.
        let (min, max) = (figure("min")?.unwrap_or(value), figure("max")?.unwrap_or(value));
        if value > 0.0 && !(min..=max).contains(&value) {
            return Err(format!("its \"value\", {value}, is not between its \"min\", {min}, and its \"max\", {max}"));
        }
        let says_no = |key: &str| object[key] == false;
        let flaw = match (says_no("counts"), says_no("constrained")) {
            (true, _) => {
                // Older runs do not say.
                let why = object["why_not_counted"].as_str().unwrap_or("misses did not reach the device");
                Some(format!("does not count: {why}"))
            }
            (false, true) => Some("unconstrained: no cgroup".into()),
            (false, false) => None,
        };
        Ok(Record {
            bench: word("bench")?,
            case: word("case")?,
            system: word("system")?,
            unit: word("unit")?,
            value,
            min,
            max,
            flaw,
        })
    }

    /// What the case is of, if it is one of several lengths: `warm` of `warm-16k`.
    pub fn series(&self) -> Option<&str> {
        let (series, length) = self.case.rsplit_once('-').unwrap_or(("", &self.case));
        let digits = length.strip_suffix(['k', 'm', 'g'])?;
        (!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())).then_some(series)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"bench":"b","case":"warm-16k","system":"s","value":2,"unit":"ns","min":0,"max":3}"#;

    #[test]
    fn lines_are_read_and_what_has_no_place_is_left_out() {
        let without = LINE.replace("\"value\":2", "\"value\":null");
        let records = Record::parse(&format!("{LINE}\n\n{without}\n")).unwrap();
        assert_eq!(records.len(), 1);
        assert_eq!((records[0].value, records[0].min, records[0].max), (2.0, 2.0, 3.0));
        let flaw = |flag: &str| Record::parse(&LINE.replace('}', &format!(",{flag}}}"))).unwrap()[0].flaw.clone();
        assert_eq!((flaw("\"counts\":true"), flaw("\"constrained\":true")), (None, None));
        assert!(flaw("\"counts\":false,\"constrained\":false").is_some_and(|why| why.contains("does not count")));
        assert!(flaw("\"counts\":true,\"constrained\":false").is_some_and(|why| why.contains("unconstrained")));
        let two = Record::parse(&format!("{LINE}\n{}", LINE.replace("\"b\"", "\"c\""))).unwrap_err();
        assert!(two.contains("of b and of c"), "{two}");
        for (bad, why) in [("{", "line 2"), (r#"{"value":1}"#, "\"bench\""), ("{}", "\"value\"")] {
            let said = Record::parse(&format!("{LINE}\n{bad}\n")).unwrap_err();
            assert!(said.contains(why) && said.contains("line 2"), "{said}");
        }
    }

    #[test]
    fn what_no_scale_has_a_place_for_is_refused() {
        for (value, min, max, why) in [
            ("5e-324", "5e-324", "5e-324", "\"value\" is 5e-324"),
            ("1e300", "1", "1e300", "\"value\" is 1e+300"),
            ("2", "1e-40", "3", "\"min\" is 1e-40"),
            ("2", "1", "1e31", "\"max\" is 1e+31"),
            ("2", "3", "4", "not between"),
            ("2", "1", "1.5", "not between"),
        ] {
            let line = LINE.replace("\"value\":2", &format!("\"value\":{value}"));
            let line =
                line.replace("\"min\":0", &format!("\"min\":{min}")).replace("\"max\":3", &format!("\"max\":{max}"));
            let said = Record::parse(&line).unwrap_err();
            assert!(said.contains("line 1: ") && said.contains(why), "{said}");
        }
    }

    #[test]
    fn lengths_make_a_series() {
        let series = |case: &str| {
            let line = LINE.replace("warm-16k", case);
            Record::parse(&line).unwrap()[0].series().map(str::to_owned)
        };
        assert_eq!(series("warm-512m").as_deref(), Some("warm"));
        assert_eq!(series("16m").as_deref(), Some(""));
        assert_eq!((series("64k-1g-warm"), series("rnd-read-1t"), series("k")), (None, None, None));
    }
}
