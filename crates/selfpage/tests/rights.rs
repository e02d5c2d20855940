//! Rights that are the whole process's: threads outside of the domain wait.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use selfpage::protection::{Memory, ProtectionDomain, Rights};

const PAGE: usize = 4096;

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has the calling thread run on one CPU with the others that ask for it, and give way to them at once.
fn crowd(policy: i32) {
    // SAFETY: the structures are borrowed until each call returns; what is refused changes nothing.
    unsafe {
        let mut here: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut here);
        let first = (0..libc::CPU_SETSIZE as usize).find(|cpu| libc::CPU_ISSET(*cpu, &here)).unwrap_or(0);
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(first, &mut one);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &one);
        libc::sched_setscheduler(0, policy, &libc::sched_param { sched_priority: 0 });
    }
}

/// Memory that anybody may execute: no machine has keys for that, so a domain without the right takes it from the whole process.
fn code() -> Memory {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping, never unmapped; 0xc3 is the instruction `ret`.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), PAGE, access, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        start.cast::<u8>().write_bytes(0xc3, PAGE);
        Memory::plain("code", start as usize..start as usize + PAGE).unwrap()
    }
}

#[test]
fn whoever_is_refused_in_the_middle_of_a_switch_waits() {
    let _alone = alone();
    let code = code();
    let start = code.range().start;
    let domain = ProtectionDomain::new("switched");
    domain.set(&code, Rights::NONE).unwrap();
    let (stop, calls) = (AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        // Where the switch wakes one of these, it runs in the very next moment of the switch.
        for _ in 0..4 {
            scope.spawn(|| {
                crowd(libc::SCHED_OTHER);
                while !stop.load(SeqCst) {
                    // SAFETY: what lies there returns at once; a refusal that is told would end the test.
                    unsafe { std::mem::transmute::<usize, extern "C" fn()>(start)() };
                    calls.fetch_add(1, SeqCst);
                    std::thread::sleep(Duration::from_micros(50));
                }
            });
        }
        scope.spawn(|| {
            crowd(libc::SCHED_IDLE);
            let began = Instant::now();
            for _ in 0..3000 {
                drop(domain.enter().unwrap());
                if began.elapsed() > Duration::from_secs(5) {
                    break;
                }
            }
            stop.store(true, SeqCst);
        });
    });
    assert!(calls.load(SeqCst) > 0);
}
