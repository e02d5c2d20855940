//! A logarithmic scale, with its marks.

/// From the least to the greatest mark.
#[derive(Clone, Debug, PartialEq)]
pub struct Scale {
    /// Where lines are drawn and labelled; two or more.
    pub marks: Vec<f64>,
}

/// Values further apart have marks at powers of ten.
const WIDE: f64 = 20.0;

impl Scale {
    /// One that has all values from `least` to `most` on it, both above zero.
    pub fn of(least: f64, most: f64) -> Scale {
        if most / least >= WIDE {
            let powers = least.log10().floor() as i32..=(most.log10().ceil() as i32);
            return Scale { marks: powers.map(|power| 10f64.powi(power)).collect() };
        }
        // About five steps of 1, 2 or 5; values that are all the same have one step around them.
        let rough = ((most - least) / 5.0).max(most / 100.0);
        let power = 10f64.powf(rough.log10().floor());
        let step =
            [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let first = (least / step).floor();
        let last = (most / step).ceil().max(first + 1.0);
        let marks = (first as u64..=last as u64).map(|mark| mark as f64 * step);
        // Zero has no place: half a step stands for it.
        Scale { marks: marks.map(|mark| if mark > 0.0 { mark } else { least.min(step / 2.0) }).collect() }
    }

    /// How far up `value` is: 0 at the least mark, 1 at the greatest.
    pub fn share(&self, value: f64) -> f64 {
        let (least, most) = (self.marks[0].ln(), self.marks[self.marks.len() - 1].ln());
        (value.ln() - least) / (most - least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_values_are_on_it_and_marks_are_round() {
        assert_eq!(Scale::of(3.0, 4_000.0).marks, [1.0, 10.0, 100.0, 1_000.0, 10_000.0]);
        let narrow = Scale::of(0.83, 1.31);
        assert!((narrow.marks[0] - 0.8).abs() < 1e-9 && narrow.marks.len() == 7, "{narrow:?}");
        for (least, most) in [(1.0, 1.0), (0.012, 0.2), (7.0, 7.3), (1.0, 19.0), (90_000.0, 2_000_000.0)] {
            let scale = Scale::of(least, most);
            assert!(scale.share(least) >= 0.0 && scale.share(most) <= 1.0 + 1e-9, "{scale:?}");
            assert!(scale.marks.len() >= 2 && scale.marks.len() <= 12, "{scale:?}");
            assert!(scale.marks.windows(2).all(|two| two[0] < two[1]), "{scale:?}");
        }
    }
}
