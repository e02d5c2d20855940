//! What a CPU does that has nothing to do: it decides how long it takes to wake a thread there.

use super::{Finding, State, setting};

const DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";
const POLL_NS: &str = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";

/// A line for it.
pub(super) fn examine() -> Finding {
    before_halt(setting(DRIVER).as_deref(), setting(POLL_NS).as_deref())
}

/// How long a CPU looks for work before it halts.
fn before_halt(driver: Option<&str>, poll_ns: Option<&str>) -> Finding {
    const FEATURE: &str = "guest_halt_poll_ns";
    let why = match (driver, poll_ns) {
        (Some("haltpoll"), Some("0")) => {
            let why = "0: an idle CPU of this virtual machine halts at once, and only its host can wake it: faults of worker regions and \
                       waits for the disk take longer";
            return Finding::new(FEATURE, State::Degraded, why).remedy(format!("echo 200000 > {POLL_NS}"));
        }
        (Some("haltpoll"), Some(ns)) => format!("{ns}: an idle CPU looks for work so many ns before it halts"),
        (driver, _) => format!("of no use here: the driver for idle CPUs is {}", driver.unwrap_or("none")),
    };
    Finding::new(FEATURE, State::Present, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_guest_that_halts_at_once_has_a_remedy() {
        let (haltpoll, other) = (Some("haltpoll"), Some("intel_idle"));
        for (driver, poll_ns, state, word) in [
            (haltpoll, Some("0"), State::Degraded, "0: an idle CPU of this virtual machine halts at once"),
            (haltpoll, Some("200000"), State::Present, "200000: an idle CPU looks for work"),
            (haltpoll, None, State::Present, "haltpoll"),
            // The module is there, and its setting means nothing.
            (other, Some("0"), State::Present, "intel_idle"),
            (None, None, State::Present, "none"),
        ] {
            let finding = before_halt(driver, poll_ns);
            assert_eq!(finding.state, state, "{finding:?}");
            assert_eq!(finding.remedy.is_some(), state == State::Degraded, "{finding:?}");
            assert!(finding.why.starts_with(word) || finding.why.ends_with(word), "{finding:?}");
        }
    }
}
