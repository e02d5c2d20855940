//! A closure runs at ring 3 of a virtual machine over data eight times as large as its frames, under core's own fault path. In the
//! middle its frames are taken back and overwritten, and it goes on in others.

mod domain;

use domain::Domain;
use selfpage_guest::{Guest, HostCall, Kind, Machine, host_call};

/// 64 frames, and a region of 512 pages at an address where no process has anything.
/// What the closure tells of.
const FILLED: u64 = 1;
const SORTED: u64 = 2;
const FRAMES_LOG2_BYTES: u8 = 18;
const PAGES: usize = 512;
const REGION: usize = 0x1234_5678_9000;
const WORDS: usize = PAGES * 512;
/// Faults after which the frames are taken back.
const REVOKED_AFTER: u32 = 2000;

fn main() {
    let machine = Box::leak(Box::new(Machine::new(16 << 20).expect("16 MiB are to be had")));
    let (guest, parts) = match Guest::new(machine) {
        Ok(made) => made,
        Err(error) if error.kind() == Kind::Unsupported => {
            println!("SKIP(kvm: {error})");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let domain = Domain::new(parts, FRAMES_LOG2_BYTES, REGION, PAGES);
    let mut faults = 0;
    let answer = |fault| {
        faults += 1;
        if faults == REVOKED_AFTER {
            domain.clean();
            domain.revoke();
            domain.give_others(FRAMES_LOG2_BYTES);
            println!("frames revoked and overwritten at fault {faults}; the domain has others now");
        }
        domain.resolve(fault)
    };
    let tell = |call: HostCall| {
        println!(
            "from within: {} words are {}",
            call.arguments[0],
            if call.number == FILLED { "filled" } else { "sorted" }
        );
        0
    };
    // SAFETY: the domain works on its own frames only; the closure asks in a guest.
    let result =
        unsafe { guest.run(answer, tell, || work(REGION, |number| _ = host_call(number, [WORDS as u64, 0, 0]))) };
    let sum = result.expect("the closure comes to its end");
    let expected = expected();
    println!("{sum:#x} in the guest, {expected:#x} expected; {faults} faults");
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
