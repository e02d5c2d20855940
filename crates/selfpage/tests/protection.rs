//! Protection domains, by keys where the machine has them and by page tables where it has none. One test at a time: by page tables
//! rights are the whole process's.

use std::io::{PipeReader, PipeWriter, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use selfpage::protection::{Access, Ended, Mechanism, Memory, ProtectionDomain, Rights, mechanism, refresh};
use selfpage::store::MemoryStore;
use selfpage::{Domain, Kind, Region, Trap};

#[path = "../../../tests/alone.rs"]
mod alone;
mod child;
mod keyed;
#[path = "../examples/sandbox.rs"]
mod sandbox;
#[path = "../../../tests/skip.rs"]
mod skip;

use keyed::has_keys;

use alone::alone;

const PAGE: usize = 4096;
const READ_WRITE: [Rights; 2] = [Rights::READ, Rights::WRITE];

fn read_write() -> Rights {
    READ_WRITE[0] | READ_WRITE[1]
}

/// That rights are enforced by keys, or else why not.
fn keys() -> Option<()> {
    has_keys().then_some(())
}

/// Anonymous memory of the test's, never unmapped.
fn mapped(pages: usize, prot: i32) -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    // SAFETY: it was just mapped; 0xc3 is the instruction `ret`.
    unsafe {
        start.cast::<u8>().write_bytes(0xc3, pages * PAGE);
        assert_eq!(libc::mprotect(start, pages * PAGE, prot), 0);
    }
    start as usize
}

fn plain(name: &str, pages: usize) -> Memory {
    let start = mapped(pages, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: it stays mapped.
    unsafe { Memory::plain(name, start..start + pages * PAGE) }.unwrap()
}

/// Asks the kernel what this thread may do with a byte: a refused access is an error there.
struct Probe {
    from: PipeReader,
    into: PipeWriter,
}

impl Probe {
    fn new() -> Probe {
        let (from, into) = std::io::pipe().unwrap();
        Probe { from, into }
    }

    fn may_read(&mut self, memory: &Memory) -> bool {
        // SAFETY: the kernel reads the byte, or refuses to.
        let written = unsafe { libc::write(self.into.as_raw_fd(), memory.range().start as *const _, 1) };
        if written == 1 {
            let mut byte = 0u8;
            // SAFETY: the byte is borrowed for the call.
            assert_eq!(unsafe { libc::read(self.from.as_raw_fd(), (&raw mut byte).cast(), 1) }, 1);
        }
        written == 1
    }

    fn may_write(&mut self, memory: &Memory) -> bool {
        self.into.write_all(&[0xc3]).unwrap();
        // SAFETY: the kernel writes the byte that is there anyway, or refuses to.
        let read = unsafe { libc::read(self.from.as_raw_fd(), memory.range().start as *mut _, 1) };
        if read != 1 {
            let mut byte = 0u8;
            // SAFETY: the byte is borrowed for the call.
            assert_eq!(unsafe { libc::read(self.from.as_raw_fd(), (&raw mut byte).cast(), 1) }, 1);
        }
        read == 1
    }

    fn may(&mut self, memory: &Memory) -> (bool, bool) {
        (self.may_read(memory), self.may_write(memory))
    }
}

const ALL: (bool, bool) = (true, true);
const TO_READ: (bool, bool) = (true, false);
const NOTHING: (bool, bool) = (false, false);

fn reads(addr: usize) -> u8 {
    // SAFETY: mapped; what the domain may not do ends in its handler.
    unsafe { (addr as *const u8).read_volatile() }
}

fn writes(addr: usize) -> u8 {
    // SAFETY: as above.
    unsafe { (addr as *mut u8).write_volatile(0xc3) };
    1
}

fn executes(addr: usize) -> u8 {
    // SAFETY: as above; what lies there returns at once.
    unsafe { std::mem::transmute::<usize, extern "C" fn()>(addr)() };
    2
}

#[test]
fn each_kind_of_access_needs_its_right() {
    let _alone = alone();
    let start = mapped(1, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    // SAFETY: it stays mapped.
    let memory = unsafe { Memory::plain("code", start..start + PAGE) }.unwrap();
    let domain = ProtectionDomain::new("visitor");
    let kinds = [(reads as fn(usize) -> u8, Access::Read), (writes, Access::Write), (executes, Access::Execute)];
    let all = [Rights::READ, Rights::WRITE, Rights::EXECUTE];
    for rights in
        [Rights::NONE, Rights::READ, read_write(), Rights::READ | Rights::EXECUTE, read_write() | Rights::EXECUTE]
    {
        domain.set(&memory, rights).unwrap();
        for ((access, kind), right) in kinds.iter().zip(all) {
            let access = *access;
            match domain.run(move || access(start)).unwrap() {
                Ended::Well(_) => assert!(rights.contains(right), "{kind:?} with {rights}"),
                Ended::Stopped(violation) => {
                    assert!(!rights.contains(right), "{kind:?} with {rights}: {violation}");
                    assert_eq!((violation.addr, violation.access), (start, *kind));
                    let shown = violation.to_string();
                    assert!(shown.contains("domain visitor") && shown.contains("memory code"), "{shown}");
                    assert!(shown.ends_with(&rights.to_string()), "{shown}");
                }
                Ended::Panicked(_) => panic!("{kind:?} with {rights} panicked"),
            }
        }
    }
    // Outside of all domains everything is as it was.
    assert_eq!([reads(start), writes(start), executes(start)], [0xc3, 1, 2]);
}

#[test]
fn domains_nest_and_leaving_restores() {
    let _alone = alone();
    let (ours, theirs) = (plain("ours", 1), plain("theirs", 1));
    let (outer, inner) = (ProtectionDomain::new("outer"), ProtectionDomain::new("inner"));
    outer.set(&ours, read_write()).unwrap();
    inner.set(&ours, Rights::READ).unwrap();
    inner.set(&theirs, read_write()).unwrap();
    let mut probe = Probe::new();
    for _ in 0..3 {
        assert_eq!((probe.may(&ours), probe.may(&theirs)), (ALL, ALL));
        let first = outer.enter().unwrap();
        assert_eq!((probe.may(&ours), probe.may(&theirs)), (ALL, NOTHING));
        let again = outer.enter().unwrap();
        let second = inner.enter().unwrap();
        assert_eq!((probe.may(&ours), probe.may(&theirs)), (TO_READ, ALL));
        drop(second);
        assert_eq!((probe.may(&ours), probe.may(&theirs)), (ALL, NOTHING));
        drop(again);
        drop(first);
    }
    assert_eq!((probe.may(&ours), probe.may(&theirs)), (ALL, ALL));
    // Without rights it is memory like any other.
    let start = ours.range().start;
    drop((outer, inner, ours));
    assert_eq!(writes(start), 1);
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let entry = smaps.split_once(&format!("{start:x}-")).map(|(_, rest)| rest.split("VmFlags").next().unwrap());
    if let Some(key) = entry.and_then(|entry| entry.split("ProtectionKey:").nth(1)) {
        assert_eq!(key.trim(), "0", "{entry:?}");
    }
}

#[test]
fn meta_is_asked_for_by_whatever_changes_rights() {
    let _alone = alone();
    let memory = plain("book", 1);
    let (domain, other) = (ProtectionDomain::new("clerk"), ProtectionDomain::new("other"));
    domain.set(&memory, read_write()).unwrap();
    {
        let _entered = domain.enter().unwrap();
        for asked in [&domain, &other] {
            let refused = asked.set(&memory, Rights::READ).unwrap_err();
            assert_eq!(refused.kind(), Kind::Denied);
            let said = refused.to_string();
            assert!(
                ["memory book", "domain clerk", "Rights::META", "leave"].iter().all(|word| said.contains(word)),
                "{said}"
            );
        }
        assert_eq!(domain.rights(&memory), read_write());
        // SAFETY: it is refused.
        let refused = unsafe { Memory::plain("more", 0..PAGE) }.unwrap_err();
        assert_eq!(refused.kind(), Kind::Denied, "{refused}");
    }
    domain.set(&memory, read_write() | Rights::META).unwrap();
    let mut probe = Probe::new();
    let entered = domain.enter().unwrap();
    domain.set(&memory, Rights::READ | Rights::META).unwrap();
    assert_eq!(probe.may(&memory), TO_READ);
    domain.set(&memory, Rights::NONE).unwrap();
    assert_eq!(probe.may(&memory), NOTHING);
    drop(entered);
    assert_eq!(probe.may(&memory), ALL);
}

#[test]
fn two_threads_have_the_rights_of_their_own_domains_or_one_is_refused() {
    let _alone = alone();
    let (red, blue) = (plain("red", 1), plain("blue", 1));
    let domains = [ProtectionDomain::new("reds"), ProtectionDomain::new("blues")];
    domains[0].set(&red, read_write()).unwrap();
    domains[1].set(&blue, read_write()).unwrap();
    let met = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _entered = domains[0].enter().unwrap();
            met.wait();
            // The other thread enters, or is refused.
            met.wait();
            let mut probe = Probe::new();
            assert_eq!((probe.may(&red), probe.may(&blue)), (ALL, NOTHING));
            met.wait();
        });
        met.wait();
        let entered = domains[1].enter();
        met.wait();
        match mechanism() {
            Mechanism::Keys => {
                let mut probe = Probe::new();
                assert_eq!((probe.may(&red), probe.may(&blue)), (NOTHING, ALL));
                drop(entered);
                assert_eq!((probe.may(&red), probe.may(&blue)), (ALL, ALL));
            }
            _ => {
                let refused = entered.unwrap_err();
                assert_eq!(refused.kind(), Kind::Held);
                let said = refused.to_string();
                assert!(
                    ["blues", "reds", "one domain at a time", "wait"].iter().all(|word| said.contains(word)),
                    "{said}"
                );
            }
        }
        met.wait();
    });
    drop(domains[1].enter().unwrap());
}

#[test]
fn a_thread_outside_is_never_refused() {
    let _alone = alone();
    // Older than all keys, its register denies them.
    let (tell, told) = mpsc::channel::<usize>();
    let (left, early) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (seen, was_early) = (left.clone(), early.clone());
    let outsider = std::thread::spawn(move || {
        for addr in told {
            assert_eq!(reads(addr), 0xc3);
            was_early.store(!seen.load(Ordering::SeqCst), Ordering::SeqCst);
        }
    });
    let memory = plain("vault", 1);
    let domain = ProtectionDomain::new("public");
    let entered = domain.enter().unwrap();
    tell.send(memory.range().start).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    left.store(true, Ordering::SeqCst);
    drop(entered);
    drop(tell);
    outsider.join().unwrap();
    if mechanism() == Mechanism::PageTables {
        assert!(!early.load(Ordering::SeqCst), "it read what the whole process had no right to");
    }
}

#[test]
fn more_domains_than_keys() {
    let _alone = alone();
    let all: Vec<(Memory, ProtectionDomain)> = (0..40)
        .map(|number| {
            let memory = plain(&format!("page {number}"), 1);
            let domain = ProtectionDomain::new(&format!("domain {number}"));
            domain.set(&memory, read_write()).unwrap();
            (memory, domain)
        })
        .collect();
    let mut probe = Probe::new();
    for _ in 0..2 {
        for (number, (memory, domain)) in all.iter().enumerate() {
            let _entered = domain.enter().unwrap();
            assert_eq!(probe.may(memory), ALL, "{domain:?}");
            assert_eq!(probe.may(&all[(number + 1) % all.len()].0), NOTHING, "{domain:?}");
            assert_eq!(probe.may(&all[(number + 20) % all.len()].0), NOTHING, "{domain:?}");
        }
    }
    assert!(all.iter().all(|(memory, _)| probe.may(memory) == ALL));
    let Some(()) = keys() else { return };
    // As many as there are keys can be entered at once, and no more.
    let mut entered = Vec::new();
    let refused = all.iter().take(16).find_map(|(_, domain)| match domain.enter() {
        Ok(one) => {
            entered.push(one);
            None
        }
        Err(why) => Some(why),
    });
    let refused = refused.expect("16 domains with memory of their own, and 15 keys");
    assert_eq!(refused.kind(), Kind::Held, "{refused}");
    assert!(
        refused.to_string().contains("keys are not enough") && refused.to_string().contains("leave one"),
        "{refused}"
    );
    assert!(entered.len() > 8, "{}", entered.len());
    assert_eq!(probe.may(&all[entered.len() - 1].0), ALL);
    assert_eq!(probe.may(&all[0].0), NOTHING);
    while let Some(innermost) = entered.pop() {
        drop(innermost);
        let current = entered.len().checked_sub(1);
        assert!(current.is_none_or(|at| probe.may(&all[at].0) == ALL));
    }
    assert!(all.iter().all(|(memory, _)| probe.may(memory) == ALL));
}

#[test]
fn keys_that_change_hands_give_nobody_more() {
    let _alone = alone();
    let Some(()) = keys() else { return };
    let own = plain("own", 1);
    let resident = ProtectionDomain::new("resident");
    resident.set(&own, read_write()).unwrap();
    let met = Barrier::new(2);
    let others: Vec<_> = (0..30).map(|number| plain(&format!("other {number}"), 1)).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _entered = resident.enter().unwrap();
            let mut probe = Probe::new();
            met.wait();
            met.wait();
            assert!(others.iter().all(|memory| probe.may(memory) == NOTHING));
            // Its rights were taken back meanwhile; its register says otherwise.
            assert_eq!(probe.may(&own), NOTHING);
            met.wait();
        });
        met.wait();
        for memory in &others {
            let domain = ProtectionDomain::new("passer-by");
            domain.set(memory, read_write()).unwrap();
            drop(domain.enter().unwrap());
        }
        resident.set(&own, Rights::NONE).unwrap();
        met.wait();
        met.wait();
    });
}

#[test]
fn the_rights_within_a_domain_of_the_whole_process_are_waited_for() {
    let _alone = alone();
    let Some(()) = keys() else { return };
    let start = mapped(1, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    // SAFETY: it stays mapped.
    let code = unsafe { Memory::plain("code", start..start + PAGE) }.unwrap();
    let (readers, runners) = (ProtectionDomain::new("readers"), ProtectionDomain::new("runners"));
    readers.set(&code, Rights::READ).unwrap();
    runners.set(&code, Rights::READ | Rights::EXECUTE).unwrap();
    let (met, left) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let entered = readers.enter().unwrap();
            met.wait();
            met.wait();
            std::thread::sleep(Duration::from_millis(50));
            left.store(true, Ordering::SeqCst);
            drop(entered);
        });
        met.wait();
        let _outer = readers.enter().unwrap();
        let _inner = runners.enter().unwrap();
        met.wait();
        assert_eq!(executes(start), 2);
        assert!(left.load(Ordering::SeqCst), "the page tables are the readers' until they have left");
    });
}

#[test]
fn a_forked_child_stays_in_its_domain_alone() {
    let _alone = alone();
    let (own, hidden) = (plain("own", 1), plain("hidden", 1));
    let (domain, other) = (ProtectionDomain::new("parent"), ProtectionDomain::new("other"));
    domain.set(&own, read_write()).unwrap();
    other.set(&hidden, read_write()).unwrap();
    let mut probe = Probe::new();
    let met = Barrier::new(2);
    let status = std::thread::scope(|scope| {
        scope.spawn(|| {
            // In the child nobody else is in the domain.
            let _entered = domain.enter().unwrap();
            met.wait();
            met.wait();
        });
        met.wait();
        let mut entered = Some(domain.enter().unwrap());
        let status = child::in_child(|| {
            let inside = (probe.may(&own), probe.may(&hidden)) == (ALL, NOTHING);
            drop(entered.take());
            let outside = (probe.may(&own), probe.may(&hidden)) == (ALL, ALL);
            let second = other.enter().is_ok_and(|_entered| probe.may(&own) == NOTHING);
            child::say(&format!("right inside: {inside}, outside: {outside}, in another domain: {second}"));
            inside && outside && second
        });
        assert_eq!((probe.may(&own), probe.may(&hidden)), (ALL, NOTHING));
        drop(entered);
        met.wait();
        status
    });
    assert_eq!(status, 0, "what the child found");
    assert_eq!(probe.may(&hidden), ALL);
}

static SEEN: AtomicUsize = AtomicUsize::new(0);
static TO_SEE: AtomicUsize = AtomicUsize::new(0);

extern "C" fn looks(_: i32) {
    refresh();
    SEEN.store(reads(TO_SEE.load(Ordering::SeqCst)).into(), Ordering::SeqCst);
}

#[test]
fn a_handler_of_a_signal_has_the_rights_of_its_thread() {
    let _alone = alone();
    let memory = plain("seen", 1);
    let domain = ProtectionDomain::new("signalled");
    domain.set(&memory, Rights::READ).unwrap();
    TO_SEE.store(memory.range().start, Ordering::SeqCst);
    // SAFETY: the handler reads memory and stores a number.
    unsafe { libc::signal(libc::SIGUSR1, looks as *const () as usize) };
    for _ in 0..2 {
        SEEN.store(0, Ordering::SeqCst);
        let _entered = domain.enter().unwrap();
        // SAFETY: sent to this thread, which has a handler for it.
        unsafe { libc::raise(libc::SIGUSR1) };
        assert_eq!(SEEN.load(Ordering::SeqCst), 0xc3);
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let _alone = alone();
    let memory = plain("data", 2);
    let range = memory.range();
    let domain = ProtectionDomain::new("asks");
    for (rights, word) in [(Rights::WRITE, "add Rights::READ"), (Rights::READ | Rights::EXECUTE, "allows read, write")]
    {
        let refused = domain.set(&memory, rights).unwrap_err();
        assert_eq!(refused.kind(), Kind::Invalid);
        let said = refused.to_string();
        assert!([word, "domain asks", "memory data"].iter().all(|word| said.contains(word)), "{said}");
    }
    assert_eq!(domain.rights(&memory), Rights::NONE);
    let ranges = [
        (range.clone(), "clone that Memory"),
        (range.start + PAGE..range.end, "memory data"),
        (range.start..range.start, "whole pages"),
        (range.start + 1..range.end, "whole pages"),
        (PAGE..2 * PAGE, "map it"),
    ];
    for (range, word) in ranges {
        // SAFETY: it is refused.
        let refused = unsafe { Memory::plain("again", range) }.unwrap_err();
        assert_eq!(refused.kind(), Kind::Invalid);
        assert!(refused.to_string().contains(word), "{refused}");
    }
    let deep: Vec<_> = (0..16).map(|_| domain.enter().unwrap()).collect();
    assert_eq!(domain.enter().unwrap_err().kind(), Kind::OutOfSpace);
    deep.into_iter().rev().for_each(drop);
}

/// A domain, or a loud skip.
fn built(frames: usize) -> Option<Domain> {
    match Domain::with_frames(frames * PAGE).build() {
        Ok(domain) => Some(domain),
        Err(error) if error.kind() == Kind::Unsupported => {
            skip::skip("uffd", &error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn stored(domain: &Domain, pages: usize, trap: Trap) -> Region {
    let store = MemoryStore::new((2 * pages * PAGE) as u64).unwrap();
    domain.region(pages * PAGE).name("paged").trap(trap).stored(store).unwrap()
}

#[test]
fn regions_are_paged_in_domains_as_outside() {
    const PAGES: usize = 256;
    let _alone = alone();
    let Some(domain) = built(64) else { return };
    for trap in [Trap::Worker, Trap::Upcall] {
        let region = Arc::new(stored(&domain, PAGES, trap));
        let start = region.as_ptr() as usize;
        let memory = Memory::of(&region).unwrap();
        let (writers, readers) = (ProtectionDomain::new("writers"), ProtectionDomain::new("readers"));
        writers.set(&memory, read_write()).unwrap();
        readers.set(&memory, Rights::READ).unwrap();
        let strangers = ProtectionDomain::new("strangers");
        drop(strangers.enter().unwrap());
        let word = |page: usize| (start + page * PAGE) as *mut u64;
        for round in 1..4u64 {
            {
                let _entered = writers.enter().unwrap();
                // SAFETY: the region's words, which no reference is to.
                (0..PAGES).for_each(|page| unsafe { word(page).write_volatile(round << 32 | page as u64) });
            }
            let _entered = readers.enter().unwrap();
            for page in 0..PAGES {
                // SAFETY: as above.
                assert_eq!(unsafe { word(page).read_volatile() }, round << 32 | page as u64, "{trap:?}");
            }
            assert_eq!(region.evict(0, PAGE).unwrap_err().kind(), Kind::Denied);
        }
        assert!(domain.stats().counts.bytes_saved > 0);
        let stopped = strangers.run(move || reads(start)).unwrap();
        assert!(matches!(stopped, Ended::Stopped(_)), "{stopped:?}");
        region.evict(0, PAGES * PAGE).unwrap();
    }
}

#[test]
fn writes_that_meet_an_eviction_are_not_lost() {
    const PAGES: usize = 64;
    let _alone = alone();
    let Some(domain) = built(32) else { return };
    for trap in [Trap::Worker, Trap::Upcall] {
        let region = Arc::new(stored(&domain, PAGES, trap));
        let start = region.as_ptr() as usize;
        let memory = Memory::of(&region).unwrap();
        let [counters, strangers] = ["counters", "strangers"].map(ProtectionDomain::new);
        counters.set(&memory, read_write()).unwrap();
        drop(strangers.enter().unwrap());
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _entered = counters.enter().unwrap();
                for count in 0..20_000u64 {
                    let word = (start + (count as usize % 8) * PAGE) as *mut u64;
                    // SAFETY: the region's words, which no reference is to.
                    unsafe { word.write_volatile(word.read_volatile() + 1) };
                }
                done.store(true, Ordering::SeqCst);
            });
            while !done.load(Ordering::SeqCst) {
                let _ = region.evict(0, 8 * PAGE);
            }
        });
        // SAFETY: as above.
        let counted = (0..8).map(|page| unsafe { ((start + page * PAGE) as *const u64).read_volatile() }).sum::<u64>();
        assert_eq!(counted, 20_000, "{trap:?}");
    }
}

#[test]
fn the_sandbox_survives() {
    let _alone = alone();
    if built(16).is_none() {
        return;
    }
    let said = sandbox::report().unwrap();
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines.len(), 6, "{said}");
    assert_eq!(lines[1], "the plug-in says 5050");
    assert!(lines[2].contains("domain plug-in: a write") && lines[2].contains("memory ledger"), "{said}");
    assert!(
        lines[3].contains("a write") && lines[3].ends_with("memory settings, where its rights are: read"),
        "{said}"
    );
    assert!(lines[4].contains("a read") && lines[4].contains("no memory there"), "{said}");
    assert_eq!(lines[5], "the host goes on; memory ledger is whole");
}
