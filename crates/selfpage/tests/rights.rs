//! Rights that are the whole process's: threads outside of the domain wait. And `META`: whoever lacks it changes nothing. One test at a
//! time, in a process of their own.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use selfpage::protection::{Ended, Mechanism, Memory, ProtectionDomain, Rights, mechanism};
use selfpage::snapshot::Snapshots;
use selfpage::store::MemoryStore;
use selfpage::{Answer, Domain, Guards, Kind, MemoryFault, Protection, Region, Sampling, Trap};

#[path = "../../../tests/alone.rs"]
mod alone;
#[path = "../../../tests/skip.rs"]
mod skip;

use alone::alone;

const PAGE: usize = 4096;

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
fn code() -> selfpage::Result<Memory> {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a fresh mapping, never unmapped; 0xc3 is the instruction `ret`.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), PAGE, access, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        start.cast::<u8>().write_bytes(0xc3, PAGE);
        Memory::plain("code", start as usize..start as usize + PAGE)
    }
}

#[test]
fn whoever_is_refused_in_the_middle_of_a_switch_waits() {
    let _alone = alone();
    let code = code().unwrap();
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

/// Each domain would be the whole process's, and a thread is in the last.
#[test]
fn memory_that_is_refused_changes_no_domain() {
    let _alone = alone();
    if mechanism() == Mechanism::PageTables {
        return skip::skip("pku", "by page tables every domain is the whole process's; cargo xtask qemu-test --keys");
    }
    let [one, other, held] = ["one", "other", "held"].map(ProtectionDomain::new);
    let met = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _entered = held.enter().unwrap();
            met.wait();
            met.wait();
        });
        met.wait();
        assert_eq!(code().unwrap_err().kind(), Kind::Held);
        let both = one.enter().map(|_entered| scope.spawn(|| other.enter().is_ok()).join().unwrap());
        met.wait();
        assert_eq!(both.ok(), Some(true), "threads may be in both");
    });
}

/// A domain, or a loud skip.
fn built() -> Option<Domain> {
    match Domain::with_frames(256 * PAGE).build() {
        Ok(domain) => Some(domain),
        Err(error) if error.kind() == Kind::Unsupported => {
            skip::skip("uffd", &error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn what_a_page_refuses_no_more_its_domain_still_may_not() {
    let _alone = alone();
    let Some(domain) = built() else { return };
    let region = Arc::new(domain.region(8 * PAGE).zero().unwrap());
    let memory = Memory::of(&region).unwrap();
    let [writers, readers] = ["writers", "readers"].map(ProtectionDomain::new);
    writers.set(&memory, Rights::READ | Rights::WRITE).unwrap();
    readers.set(&memory, Rights::READ | Rights::META).unwrap();
    let at = region.as_ptr() as usize;
    // SAFETY: a word of the region, which no reference is to.
    let write = move |page: usize| unsafe { ((at + page * PAGE) as *mut u64).write_volatile(1) };
    region.protect(PAGE, PAGE, Protection::Read).unwrap();
    assert!(matches!(writers.run(move || write(1)).unwrap(), Ended::Stopped(_)));
    let (own, tried) = (region.clone(), Arc::new(AtomicBool::new(false)));
    let tries = tried.clone();
    let ended = readers.run(move || {
        own.protect(0, 8 * PAGE, Protection::ReadWrite).unwrap();
        tries.store(true, SeqCst);
        write(2);
    });
    assert!(matches!(ended.unwrap(), Ended::Stopped(_)) && tried.load(SeqCst));
    assert!(matches!(writers.run(move || write(1)).unwrap(), Ended::Well(())));
    (0..8).for_each(write);
}

fn store() -> MemoryStore {
    MemoryStore::new(1 << 22).unwrap()
}

/// What a call came to.
type Called = selfpage::Result<()>;
/// A call that needs `META`, with its name.
type Call<'a> = (&'static str, Box<dyn FnMut() -> Called + 'a>);

/// All that needs `META` on a region, but `set`.
fn calls<'a>(domain: &'a Domain, region: &'a Region, taken: &'a mut Snapshots) -> Vec<Call<'a>> {
    let path = std::env::temp_dir().join(format!("selfpage-rights-{}.snap", std::process::id()));
    let protect = |protection| move || region.protect(0, PAGE, protection);
    let taken = std::rc::Rc::new(std::cell::RefCell::new(taken));
    let (arms, takes) = (taken.clone(), taken);
    vec![
        ("pin", Box::new(|| region.pin(0, PAGE))),
        ("unpin", Box::new(|| region.unpin(0, PAGE))),
        ("prefetch", Box::new(|| region.prefetch(0, PAGE))),
        ("evict", Box::new(|| region.evict(0, 2 * PAGE).map(drop))),
        ("flush", Box::new(|| region.flush(0, PAGE))),
        ("change", Box::new(|| region.while_still(|| region.set_guards(0, PAGE, Guards::Removed))?)),
        ("protect", Box::new(protect(Protection::Read))),
        ("unprotect", Box::new(protect(Protection::ReadWrite))),
        ("sample", Box::new(|| region.sample(Sampling::Whole).map(drop))),
        ("sample the domain", Box::new(|| domain.sample(Sampling::Pages(4)).map(drop))),
        ("clone", Box::new(|| region.cow_clone(store()).map(drop))),
        ("arm a snapshot", Box::new(move || arms.borrow_mut().arm().map(drop))),
        ("take a snapshot", Box::new(move || takes.borrow_mut().take().map(drop))),
        (
            "make snapshots",
            // There are some already; who may not have any is told that first.
            Box::new(move || match Snapshots::of(&[region], &path) {
                Err(why) if why.kind() == Kind::Held => Ok(()),
                other => other.map(drop),
            }),
        ),
    ]
}

#[test]
fn whatever_changes_mappings_asks_for_meta() {
    let _alone = alone();
    let Some(domain) = built() else { return };
    for trap in [Trap::Worker, Trap::Upcall] {
        let region = Arc::new(domain.region(32 * PAGE).name("book").trap(trap).stored(store()).unwrap());
        let memory = Memory::of(&region).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut taken = Snapshots::of(&[&region], dir.path().join("book.snap")).unwrap();
        let clerk = ProtectionDomain::new("clerk");
        let word = region.as_ptr().cast::<u64>();
        // SAFETY: a word of the region, which no reference is to.
        let (write, read) = (|| unsafe { word.write_volatile(7) }, || unsafe { word.read_volatile() });
        write();
        for (rights, denied) in
            [(Rights::READ | Rights::WRITE, true), (Rights::READ | Rights::WRITE | Rights::META, false)]
        {
            clerk.set(&memory, rights).unwrap();
            let entered = clerk.enter().unwrap();
            for (name, mut call) in calls(&domain, &region, &mut taken) {
                match call() {
                    Err(why) if denied => {
                        let said = why.to_string();
                        assert_eq!(why.kind(), Kind::Denied, "{name}: {said}");
                        assert!(["book", "clerk", "META"].iter().all(|word| said.contains(word)), "{name}: {said}");
                    }
                    other => assert!(other.is_ok() && !denied, "{name}, {trap:?}: {other:?}"),
                }
            }
            write();
            assert_eq!((region.protection(0).unwrap(), read()), (Protection::ReadWrite, 7));
            drop(entered);
        }
        // Outside of all domains everything is allowed.
        clerk.set(&memory, Rights::NONE).unwrap();
        calls(&domain, &region, &mut taken).into_iter().for_each(|(name, mut call)| call().expect(name));
    }
}

#[test]
fn contents_neither_move_nor_go_without_meta() {
    let _alone = alone();
    let Some(domain) = built() else { return };
    for trap in [Trap::Worker, Trap::Upcall] {
        let region = |name| Arc::new(domain.region(8 * PAGE).name(name).trap(trap).stored(store()).unwrap());
        // Nobody has rights on the second, so that everybody may move it.
        let (book, notes) = (region("book"), region("notes"));
        let memory = Memory::of(&book).unwrap();
        let word = |region: &Region, page: usize| region.as_ptr().wrapping_add(page * PAGE).cast::<u64>();
        // SAFETY: words of the regions, which no reference is to.
        (0..8).for_each(|page| unsafe {
            word(&book, page).write_volatile(page as u64 + 1);
            word(&notes, page).write_volatile(page as u64 + 101);
        });
        let clerk = ProtectionDomain::new("clerk");
        // SAFETY: as above.
        let calls = || unsafe {
            [
                ("move", book.move_contents(0, PAGE, &book, PAGE)),
                ("move", book.move_contents(2 * PAGE, PAGE, &notes, 2 * PAGE)),
                ("move", notes.move_contents(3 * PAGE, PAGE, &book, 3 * PAGE)),
                ("discard", book.drop_contents(4 * PAGE, PAGE)),
            ]
        };
        clerk.set(&memory, Rights::READ | Rights::WRITE).unwrap();
        let entered = clerk.enter().unwrap();
        for (name, done) in calls() {
            let why = done.unwrap_err();
            let said = why.to_string();
            assert_eq!(why.kind(), Kind::Denied, "{said}");
            assert!([name, "book", "clerk", "META"].iter().all(|word| said.contains(word)), "{trap:?}: {said}");
        }
        for page in 0..8 {
            // SAFETY: as above.
            let found = unsafe { (word(&book, page).read_volatile(), word(&notes, page).read_volatile()) };
            assert_eq!(found, (page as u64 + 1, page as u64 + 101), "{trap:?}: page {page}");
        }
        drop(entered);
        clerk.set(&memory, Rights::READ | Rights::WRITE | Rights::META).unwrap();
        let entered = clerk.enter().unwrap();
        calls().into_iter().for_each(|(name, done)| done.expect(name));
        // SAFETY: as above.
        let found =
            unsafe { [(&book, 1), (&notes, 2), (&book, 3)].map(|(region, page)| word(region, page).read_volatile()) };
        assert_eq!(found, [1, 3, 104], "{trap:?}");
        drop(entered);
    }
}

#[test]
fn a_handler_answers_for_its_region_wherever_the_thread_is() {
    let _alone = alone();
    let Some(domain) = built() else { return };
    for trap in [Trap::Worker, Trap::Upcall] {
        let unprotect = |fault: &MemoryFault<'_>| match fault.protect_page(Protection::ReadWrite) {
            Ok(()) => Answer::Handled,
            Err(_) => Answer::Refuse,
        };
        let region = Arc::new(domain.region(8 * PAGE).trap(trap).handler(unprotect).stored(store()).unwrap());
        let memory = Memory::of(&region).unwrap();
        let mutator = ProtectionDomain::new("mutator");
        mutator.set(&memory, Rights::READ | Rights::WRITE).unwrap();
        region.protect(0, 8 * PAGE, Protection::Read).unwrap();
        let entered = mutator.enter().unwrap();
        assert_eq!(region.protect(0, PAGE, Protection::ReadWrite).unwrap_err().kind(), Kind::Denied, "{trap:?}");
        // SAFETY: a word of the region, which no reference is to.
        unsafe { region.as_ptr().cast::<u64>().write_volatile(1) };
        assert_eq!(region.protection(0).unwrap(), Protection::ReadWrite, "{trap:?}");
        assert_eq!(region.protection(PAGE).unwrap(), Protection::Read, "{trap:?}");
        drop(entered);
    }
}

/// Whatever the thread may that has its thread started, and whether the memory had its key before that or has it since.
#[test]
fn a_handlers_system_calls_may_use_all_memory() {
    let _alone = alone();
    if mechanism() == Mechanism::PageTables {
        return skip::skip("pku", "by page tables rights are not a thread's; cargo xtask qemu-test --keys");
    }
    for key_first in [false, true] {
        // The threads for handlers are a domain's.
        let Some(domain) = built() else { return };
        let notes = Arc::new(domain.region(PAGE).name("notes").zero().unwrap());
        notes.pin(0, PAGE).unwrap();
        let (at, filled) = (notes.as_ptr() as usize, Arc::new(AtomicBool::new(false)));
        let fills = filled.clone();
        let fills_and_unprotects = move |fault: &MemoryFault<'_>| {
            // SAFETY: the kernel writes a byte into the region, which no reference is to.
            fills.store(unsafe { libc::getrandom(at as *mut _, 1, 0) } == 1, SeqCst);
            match fault.protect_page(Protection::ReadWrite) {
                Ok(()) => Answer::Handled,
                Err(_) => Answer::Refuse,
            }
        };
        let clerk = ProtectionDomain::new("clerk");
        let keyed = || {
            let memory = Memory::of(&notes).unwrap();
            clerk.set(&memory, Rights::NONE).unwrap();
            memory
        };
        let made = || domain.region(PAGE).handler(fills_and_unprotects).zero().unwrap();
        // A domain's memory has its key from when somebody enters.
        let (_memory, mut region) = if key_first {
            let memory = keyed();
            let _entered = clerk.enter().unwrap();
            (memory, made())
        } else {
            let region = made();
            let memory = keyed();
            drop(clerk.enter().unwrap());
            (memory, region)
        };
        region.protect(0, PAGE, Protection::Read).unwrap();
        region.as_mut_slice::<u64>()[0] = 1;
        assert!(
            filled.load(SeqCst),
            "key first: {key_first}: the kernel refuses the handler what no domain keeps from it"
        );
    }
}

#[test]
fn a_tracked_region_has_no_key() {
    let _alone = alone();
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let region = domain.region(4 * PAGE).tracked().zero().unwrap();
    match (mechanism(), Memory::of(&Arc::new(region))) {
        (Mechanism::Keys, Err(why)) => assert!(why.to_string().contains("tracked"), "{why}"),
        (Mechanism::Keys, Ok(_)) => panic!("its pages could not leave their frames"),
        (_, made) => assert!(made.is_ok(), "{:?}", made.err()),
    }
}

/// The kernel moves no page whose mapping has a key where the frames' has none.
#[test]
fn pages_of_regions_in_domains_are_protected_against_every_access() {
    let _alone = alone();
    let domain = match Domain::with_frames(64 * PAGE).build() {
        Ok(domain) => domain,
        Err(error) => return skip::skip("uffd", &error.to_string()),
    };
    for trap in [Trap::Worker, Trap::Upcall] {
        let store = MemoryStore::new((32 * PAGE) as u64).unwrap();
        let region = Arc::new(domain.region(16 * PAGE).trap(trap).stored(store).unwrap());
        let word = |page: usize| region.as_ptr().wrapping_add(page * PAGE).cast::<u64>();
        // SAFETY: the region's words, which no reference is to.
        (0..16).for_each(|page| unsafe { word(page).write_volatile(page as u64 + 1) });
        let memory = Memory::of(&region).unwrap();
        let readers = ProtectionDomain::new("readers");
        readers.set(&memory, Rights::READ).unwrap();
        drop(readers.enter().unwrap());
        region.protect(2 * PAGE, 8 * PAGE, Protection::None).unwrap();
        region.protect(4 * PAGE, PAGE, Protection::ReadWrite).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { word(4).read_volatile() }, 5, "{trap:?}");
        region.evict(0, 16 * PAGE).unwrap();
        region.protect(0, 16 * PAGE, Protection::ReadWrite).unwrap();
        // SAFETY: as above.
        (0..16).for_each(|page| assert_eq!(unsafe { word(page).read_volatile() }, page as u64 + 1, "{trap:?}"));
    }
}
