//! Whether times from a virtual machine on this machine say anything about hardware.

use std::fs;

use super::super::error::Error;
use super::ring0;

/// An instruction of ring 0 that takes so many times as long as one of ring 3 is not carried out by the CPU.
const EMULATED_FROM: f64 = 20.0;

/// What speaks for it and against it.
#[derive(Clone, Copy, Debug)]
pub struct Evidence {
    extension: Extension,
    second_level: SecondLevel,
    processor: Processor,
    /// How many times as long an instruction of ring 0 takes in a virtual machine as one of ring 3.
    ring0_ratio: f64,
}

/// Whether the CPU says that it runs virtual machines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Extension {
    /// vmx or svm.
    Present,
    Absent,
}

/// Whether a guest's page tables are the CPU's own business, and the host's come behind them: EPT, NPT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SecondLevel {
    On,
    Off,
    /// Neither of KVM's two modules for hardware is there to say.
    Unknown,
}

/// What this system runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Processor {
    Hardware,
    /// Itself a virtual machine's.
    Virtual,
}

impl Evidence {
    /// Asks the CPU and KVM's modules, and tries how long ring 0 takes.
    ///
    /// # Errors
    /// There is no KVM.
    pub fn gather() -> Result<Evidence, Error> {
        let ring0_ratio = ring0::ratio()?;
        let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let module = |path: &str| fs::read_to_string(path).ok();
        Ok(Evidence {
            extension: extension(&flags),
            second_level: second_level(
                module("/sys/module/kvm_intel/parameters/ept").as_deref(),
                module("/sys/module/kvm_amd/parameters/npt").as_deref(),
            ),
            processor: processor(&flags),
            ring0_ratio,
        })
    }

    /// Why no time shall be given; empty: nothing speaks against it.
    pub fn objections(&self) -> Vec<String> {
        let mut all = Vec::new();
        if self.extension == Extension::Absent {
            all.push("the CPU has neither vmx nor svm, so KVM runs guests without hardware for them".to_string());
        }
        match self.second_level {
            SecondLevel::On => {}
            SecondLevel::Off => all.push("ept or npt is off, so a guest's page tables are shadowed".to_string()),
            SecondLevel::Unknown => all.push(
                "neither kvm_intel nor kvm_amd is loaded, to say that a guest's page tables are walked by the CPU"
                    .to_string(),
            ),
        }
        if self.processor == Processor::Virtual {
            all.push("the CPU is itself a hypervisor's, who may emulate or shadow what it shows".to_string());
        }
        // No ratio is no proof either.
        if self.ring0_ratio.is_nan() || self.ring0_ratio >= EMULATED_FROM {
            let ratio = self.ring0_ratio;
            all.push(format!(
                "an instruction at ring 0 takes {ratio:.0} times as long as one at ring 3, so it is emulated"
            ));
        }
        all
    }
}

fn has(cpuinfo: &str, wanted: &[&str]) -> bool {
    let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
    flags.split_ascii_whitespace().any(|flag| wanted.contains(&flag))
}

fn extension(cpuinfo: &str) -> Extension {
    if has(cpuinfo, &["vmx", "svm"]) { Extension::Present } else { Extension::Absent }
}

fn processor(cpuinfo: &str) -> Processor {
    if has(cpuinfo, &["hypervisor"]) { Processor::Virtual } else { Processor::Hardware }
}

fn second_level(ept: Option<&str>, npt: Option<&str>) -> SecondLevel {
    match ept.or(npt).map(str::trim) {
        Some("Y" | "1") => SecondLevel::On,
        Some(_) => SecondLevel::Off,
        None => SecondLevel::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HARDWARE: Evidence = Evidence {
        extension: Extension::Present,
        second_level: SecondLevel::On,
        processor: Processor::Hardware,
        ring0_ratio: 1.1,
    };

    #[test]
    fn hardware_is_believed() {
        assert_eq!(HARDWARE.objections(), Vec::<String>::new());
    }

    #[test]
    fn each_piece_of_evidence_alone_is_enough_to_refuse() {
        let cases = [
            (Evidence { extension: Extension::Absent, ..HARDWARE }, "neither vmx nor svm"),
            (Evidence { second_level: SecondLevel::Off, ..HARDWARE }, "shadowed"),
            (Evidence { second_level: SecondLevel::Unknown, ..HARDWARE }, "neither kvm_intel nor kvm_amd"),
            (Evidence { processor: Processor::Virtual, ..HARDWARE }, "hypervisor"),
            (Evidence { ring0_ratio: 1900.0, ..HARDWARE }, "takes 1900 times as long"),
            (Evidence { ring0_ratio: f64::NAN, ..HARDWARE }, "emulated"),
        ];
        for (evidence, reason) in cases {
            let objections = evidence.objections();
            assert!(objections.len() == 1 && objections[0].contains(reason), "{evidence:?}: {objections:?}");
        }
        let software = Evidence {
            extension: Extension::Absent,
            second_level: SecondLevel::Unknown,
            processor: Processor::Virtual,
            ring0_ratio: 1900.0,
        };
        assert_eq!(software.objections().len(), 4);
    }

    #[test]
    fn what_the_system_says_is_understood() {
        let cpuinfo =
            |flags: &str| format!("vendor_id\t: AuthenticAMD\nflags\t\t: fpu {flags} sse\nbugs\t\t: svm vmx\n");
        for (flags, there, virtual_one) in [
            ("vmx", Extension::Present, Processor::Hardware),
            ("svm", Extension::Present, Processor::Hardware),
            ("svm_lock", Extension::Absent, Processor::Hardware),
            ("hypervisor vmx", Extension::Present, Processor::Virtual),
        ] {
            let text = cpuinfo(flags);
            assert_eq!((extension(&text), processor(&text)), (there, virtual_one), "{flags}");
        }
        assert_eq!(second_level(Some("Y\n"), None), SecondLevel::On);
        assert_eq!(second_level(None, Some("1\n")), SecondLevel::On);
        assert_eq!(second_level(Some("N\n"), None), SecondLevel::Off);
        assert_eq!(second_level(None, Some("0\n")), SecondLevel::Off);
        assert_eq!(second_level(None, None), SecondLevel::Unknown);
    }
}
