//! A closure runs at ring 3 of a virtual machine over data eight times as large as its frames, and its page faults are answered in
//! there, by core's own fault path. In the middle its frames are taken back and overwritten, and it goes on in others.

mod domain;

use std::time::Duration;

use domain::Domain;
use selfpage_core::fault::Fault;
use selfpage_guest::{Call, Guest, Kind, Machine, host_call};

/// What is told from within.
const FILLED: u64 = 1;
const SORTED: u64 = 2;
const REVOKED: u64 = 3;
/// 64 frames, and a region of 512 pages at an address where no process has anything.
const FRAMES_LOG2_BYTES: u8 = 18;
const PAGES: usize = 512;
const REGION: usize = 0x1234_5678_9000;
const WORDS: usize = PAGES * 512;
/// Faults after which the frames are taken back.
const REVOKED_AFTER: u64 = 2000;

fn main() {
    let machine = Box::leak(Box::new(Machine::new(16 << 20, 8 << 20).expect("24 MiB are to be had")));
    let (mut guest, parts) = match Guest::new(machine) {
        Ok(made) => made,
        Err(error) if error.kind() == Kind::Unsupported => {
            println!("SKIP(kvm: {error})");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    guest.set_limit(Duration::from_secs(300));
    let counts = guest.counts();
    let domain = Domain::new(parts, FRAMES_LOG2_BYTES, REGION, PAGES).expect("8 MiB are enough for it");
    let mut faults = 0;
    let handler = move |fault: Fault| {
        faults += 1;
        if faults == REVOKED_AFTER {
            domain.clean();
            domain.revoke();
            domain.give_others(FRAMES_LOG2_BYTES);
            // SAFETY: the handler asks in a guest.
            unsafe { host_call(REVOKED, [faults, 0, 0]) };
        }
        domain.resolve(fault)
    };
    let tell = |call: Call| {
        let number = call.arguments[0];
        match call.number {
            FILLED => println!("from within: {number} words are filled"),
            SORTED => println!("from within: {number} words are sorted"),
            _ => println!("from the handler: frames revoked and overwritten at fault {number}; the domain has others"),
        }
        0
    };
    // SAFETY: the domain works on its own frames only; the closure asks in a guest.
    let result =
        unsafe { guest.run(handler, tell, || work(REGION, |number| _ = host_call(number, [WORDS as u64, 0, 0]))) };
    let sum = result.expect("the closure comes to its end");
    let expected = expected();
    println!("{sum:#x} in the guest, {expected:#x} expected");
    println!("{} faults answered in the guest, {} exits from it", counts.faults(), counts.exits());
    println!("{:?}", domain.state.counters.read());
    assert_eq!(sum, expected);
}

/// Sorts numbers that are in no order, in place, and sums them up so that the order counts.
fn work(region: usize, tell: impl Fn(u64)) -> u64 {
    let at: *mut u64 = std::ptr::with_exposed_provenance_mut(region);
    // SAFETY: a region of so many words, zero at first, that nobody else uses.
    let words = unsafe { std::slice::from_raw_parts_mut(at, WORDS) };
    fill(words);
    tell(FILLED);
    words.sort_unstable();
    tell(SORTED);
    sum(words)
}

fn expected() -> u64 {
    let mut words = vec![0; WORDS];
    fill(&mut words);
    words.sort_unstable();
    sum(&words)
}

fn fill(words: &mut [u64]) {
    let mut dice = 0x5eed_u64;
    for word in words {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        *word = dice;
    }
}

fn sum(words: &[u64]) -> u64 {
    words.iter().fold(0, |sum, word| sum.rotate_left(5) ^ word)
}
