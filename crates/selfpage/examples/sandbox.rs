//! A host runs a plug-in that writes where it should not, and goes on.
//!
//! The host's ledger lies at a random address far from all else, and in no domain of the plug-in's; the plug-in may only write its
//! own pad, and read the host's settings. Run it with `cargo run --example sandbox -p selfpage`.

use std::sync::Arc;

use selfpage::protection::{Ended, Memory, ProtectionDomain, Rights, mechanism};
use selfpage::{Domain, Region, Result};

/// What a plug-in is given: addresses, with which it can do what it likes.
#[derive(Clone, Copy)]
struct Addresses {
    ledger: usize,
    settings: usize,
    pad: usize,
}

/// A plug-in that behaves.
fn sums_up(at: Addresses) -> u64 {
    // SAFETY: both are regions of the host's, which it may read and write.
    unsafe {
        let sum = (1..=*(at.settings as *const u64)).sum();
        *(at.pad as *mut u64) = sum;
        sum
    }
}

/// One that does not: it takes the ledger for its pad.
fn writes_to_the_ledger(at: Addresses) -> u64 {
    // SAFETY: there is none; the protection domain stops it.
    unsafe { *((at.ledger + 16) as *mut u64) = 0 };
    0
}

/// One that changes its settings.
fn writes_to_the_settings(at: Addresses) -> u64 {
    // SAFETY: there is none; the protection domain stops it.
    unsafe { *(at.settings as *mut u64) += 1 };
    0
}

/// One that follows a wild pointer.
fn jumps_about(at: Addresses) -> u64 {
    // SAFETY: there is none; nothing is mapped there.
    unsafe { *((at.ledger ^ 0x10_0000_0000) as *const u64) }
}

/// Runs all four, and returns what the host has to say.
pub fn report() -> Result<String> {
    let domain = Domain::with_frames(1 << 20).build()?;
    let region =
        |name: &str| -> Result<Arc<Region>> { Ok(Arc::new(domain.region(64 << 10).name(name).far_from_all().zero()?)) };
    let (mut ledger, mut settings) =
        (domain.region(64 << 10).name("ledger").far_from_all().zero()?, region("settings")?);
    ledger.as_mut_slice::<u64>().fill(1000);
    if let Some(settings) = Arc::get_mut(&mut settings) {
        settings.as_mut_slice::<u64>()[0] = 100;
    }
    let (ledger, pad) = (Arc::new(ledger), region("pad")?);

    let plugin = ProtectionDomain::new("plug-in");
    plugin.set(&Memory::of(&settings)?, Rights::READ)?;
    plugin.set(&Memory::of(&pad)?, Rights::READ | Rights::WRITE)?;
    // Nobody gives the plug-in rights on the ledger, so it has none.
    let ledger_memory = Memory::of(&ledger)?;

    let at = Addresses {
        ledger: ledger.as_ptr() as usize,
        settings: settings.as_ptr() as usize,
        pad: pad.as_ptr() as usize,
    };
    let mut said = format!("rights are enforced by {:?}\n", mechanism());
    for plug_in in [sums_up, writes_to_the_ledger, writes_to_the_settings, jumps_about] {
        match plugin.run(move || plug_in(at))? {
            Ended::Well(result) => said += &format!("the plug-in says {result}\n"),
            Ended::Panicked(_) => said += "the plug-in panicked\n",
            Ended::Stopped(violation) => said += &format!("the plug-in was stopped: {violation}\n"),
        }
    }
    let whole = ledger.as_slice::<u64>().iter().all(|entry| *entry == 1000);
    said +=
        &format!("the host goes on; memory {} is {}\n", ledger_memory.name(), if whole { "whole" } else { "damaged" });
    Ok(said)
}

#[allow(dead_code)]
fn main() -> Result<()> {
    print!("{}", report()?);
    Ok(())
}
