//! Protection keys.

use super::{Finding, State};
use crate::protection::{Mechanism, mechanism};

/// How protection domains are enforced.
pub(super) fn examine() -> Finding {
    finding(mechanism())
}

fn finding(mechanism: Mechanism) -> Finding {
    const FEATURE: &str = "protection keys";
    match mechanism {
        Mechanism::Keys => Finding::new(FEATURE, State::Present, "each thread switches protection domains by itself"),
        Mechanism::PageTables => Finding::new(
            FEATURE,
            State::Degraded,
            "none: protection domains go by mprotect(2), for the whole process, so one at a time can be entered",
        )
        .remedy(
            "a CPU with pku (Intel server CPUs since 2017, AMD since Zen 3), and no nopku on the kernel's command line",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mechanism_has_its_line() {
        assert_eq!(finding(Mechanism::Keys).state, State::Present);
        let without = finding(Mechanism::PageTables);
        assert!(without.state == State::Degraded && without.remedy.is_some() && without.why.contains("one at a time"));
    }
}
