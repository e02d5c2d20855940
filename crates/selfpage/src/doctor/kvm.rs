//! Whether the package `selfpage-guest` gets virtual machines.

use rustix::fs::{Mode, OFlags, open};
use selfpage_core::linux::Errno;
use selfpage_core::linux::probe::Shortfall;

use super::{Finding, probed};

/// A line for it.
pub(super) fn examine() -> Finding {
    let opened = open("/dev/kvm", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    finding(opened.map(drop).map_err(|why| Errno::from_raw_os_error(why.raw_os_error())))
}

fn finding(opened: Result<(), Errno>) -> Finding {
    let remedy = match opened {
        Err(Errno::PERM | Errno::ACCESS) => "add the user to the group kvm; let a container have the device",
        _ => {
            "switch on virtualisation in the firmware, or nested virtualisation in the hypervisor, and load kvm_intel or kvm_amd"
        }
    };
    let answer = opened.map_err(Shortfall::Refused);
    let gain = "closures run on page tables of their own: selfpage-guest, `selfpage bench guest`";
    probed("/dev/kvm", answer, gain, "neither selfpage-guest nor `selfpage bench guest`; nothing else needs it", remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn a_machine_without_kvm_is_told_from_a_user_without_the_right() {
        for (opened, state, word) in [
            (Ok(()), State::Present, ""),
            (Err(Errno::NOENT), State::Absent, "kvm_intel"),
            (Err(Errno::ACCESS), State::Refused, "group kvm"),
            (Err(Errno::PERM), State::Refused, "the device"),
        ] {
            let finding = finding(opened);
            assert_eq!(finding.state, state, "{finding:?}");
            assert!(finding.remedy.as_deref().unwrap_or_default().contains(word), "{finding:?}");
        }
    }
}
