//! Instructions of ring 3 are counted one by one, whoever carries them out.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]
#![cfg(target_arch = "x86_64")]

mod possible;

use std::arch::asm;

use selfpage_core::fault::{Fault, Outcome};
use selfpage_guest::{Call, Guest, Handler, Machine, Stepped, handler_call, host_call};

/// What the closure tells the process.
const BEGIN: u64 = 1;
const END: u64 = 2;

/// Two instructions a round.
fn rounds(count: u64) {
    // SAFETY: it counts a register down.
    unsafe { asm!("2:", "dec {0}", "jnz 2b", inout(reg) count => _) };
}

/// Answers with as many rounds as it is asked for.
struct Counting;

impl Handler for Counting {
    fn fault(&mut self, _: Fault) -> Outcome {
        Outcome::NotOurs
    }

    fn answer(&mut self, call: Call) -> u64 {
        rounds(call.arguments[0]);
        call.number
    }
}

/// What a closure and its handler take for so many rounds each, between two calls and by itself behind them.
fn stepped(closure: u64, handler: u64) -> Option<Stepped> {
    let machine = Box::leak(Box::new(Machine::new(16 << 20, 1 << 20).unwrap()));
    let (guest, _) = possible::here(Guest::new(machine))?;
    let (steps, mut counted) = (guest.steps(), None);
    let answer = |call: Call| {
        match call.number {
            BEGIN => steps.begin(),
            _ => counted = Some(steps.end()),
        }
        0
    };
    // SAFETY: nothing is made of what the guest has for itself; the closure asks in a guest.
    let result = unsafe {
        guest.run(Counting, answer, move || {
            rounds(1000);
            host_call(BEGIN, [0; 3]);
            rounds(closure);
            let answered = handler_call(7, [handler, 0, 0]);
            host_call(END, [0; 3]);
            rounds(1000);
            answered + handler_call(8, [1000, 0, 0])
        })
    };
    assert_eq!(result.unwrap(), 15);
    // What came behind the end did not count.
    assert_eq!(Some(steps.end()), counted);
    counted
}

#[test]
fn each_instruction_of_ring_3_counts_once() {
    let Some(few) = stepped(10, 10) else { return };
    println!("{few:?} for 20 instructions each");
    assert!((20..200).contains(&few.closure) && (20..2000).contains(&few.handler), "{few:?}");
    assert_eq!(stepped(10, 10), Some(few));
    assert_eq!(stepped(110, 10), Some(Stepped { closure: few.closure + 200, ..few }));
    assert_eq!(stepped(10, 60), Some(Stepped { handler: few.handler + 100, ..few }));
}
