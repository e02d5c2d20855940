//! The Linux layer on the kernel that runs the test.
#![allow(clippy::undocumented_unsafe_blocks, reason = "a test: the mappings are its own")]

#[path = "../../../../tests/filter.rs"]
mod filter;
mod ground;
mod group;
#[path = "../../../../tests/physical.rs"]
mod physical;
mod refused;
#[path = "../../../../tests/skip.rs"]
mod skip;

use selfpage_core::addr::{Frame, PAGE_BYTES, VirtAddr};
use selfpage_core::frame::Table;
use selfpage_core::linux::descriptor::Descriptor;
use selfpage_core::linux::memory::{self, Access, Place, Sharing};
use selfpage_core::linux::mmu::{Descriptors, LinuxMmu};
use selfpage_core::linux::pagemap::{Afterwards, Categories, Pagemap, Stretch};
use selfpage_core::linux::uffd::{Features, Message, Modes, Reach, Reading, Uffd, Waiters, Writing};
use selfpage_core::linux::{Errno, clock, futex, signal, thread};
use selfpage_core::mmu::{Mmu, Partial, Refusal, Trap};
use selfpage_core::pageset::PageSet;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use ground::{Ground, Pinned, open_uffd, reserve};
use skip::skip;

const PAGES: u32 = 16;
const LEN: usize = PAGES as usize * PAGE_BYTES;

macro_rules! ground {
    () => {
        match Ground::of(PAGES) {
            Some(ground) => ground,
            None => return,
        }
    };
}

fn stopped(done: u32, why: Refusal) -> Result<(), Partial> {
    Err(Partial { done, why })
}

#[test]
fn pages_move_out_and_in_and_keep_their_contents() {
    let ground = ground!();
    (0..PAGES).for_each(|frame| ground.fill(frame, frame as u8 + 1));
    ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), PAGES).unwrap();
    for index in 0..PAGES as usize {
        assert_eq!(ground.read(index), index as u8 + 1);
        assert!(ground.mmu.present(ground.page(index)));
        assert!(!ground.populated(ground.pool + index * PAGE_BYTES), "the slot is empty while a page has its frame");
    }
    ground.mmu.unmap(ground.page(8), Frame(0), 8).unwrap();
    (0..8).for_each(|frame| assert_eq!(ground.filled_with(frame), frame as u8 + 9));
    // Somebody touched all memory: what is in the slot of a frame that is mapped elsewhere is nobody's.
    ground.fill(9, 0xee);
    ground.mmu.unmap(ground.page(0), Frame(8), 2).unwrap();
    assert_eq!((ground.filled_with(8), ground.filled_with(9)), (1, 2));
    assert!(ground.mmu.present(ground.page(3)) && !ground.mmu.present(ground.page(12)));
}

/// Linux 6.18 may move pages and say that their places were taken.
#[test]
fn pages_that_the_kernel_moved_without_saying_so_are_where_they_should_be() {
    let ground = ground!();
    (0..PAGES).for_each(|frame| ground.fill(frame, frame as u8 + 1));
    let move_two = |uffd: Uffd, to: usize, from: usize| {
        let at = 5 * PAGE_BYTES;
        unsafe { uffd.move_pages(to + at, from + at, 2 * PAGE_BYTES, Waiters::Leave) }.unwrap();
    };
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| ground.read(6));
        // Until it waits: a page that is there would not be waited for.
        let mut message = [Message::EMPTY];
        assert_eq!(ground.descriptors.worker.read(&mut message), Ok(1));
        move_two(ground.descriptors.worker, ground.worker, ground.pool);
        let mapped = ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), PAGES);
        let is_woken = (0..5000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            waits.is_finished()
        });
        ground.descriptors.worker.wake(ground.worker, LEN).unwrap();
        assert_eq!((mapped, is_woken, waits.join().unwrap()), (Ok(()), true, 7));
    });
    (0..PAGES as usize).for_each(|index| assert_eq!(ground.read(index), index as u8 + 1));
    move_two(ground.descriptors.pool, ground.pool, ground.worker);
    assert_eq!(ground.mmu.unmap(ground.page(0), Frame(0), PAGES), Ok(()));
    (0..PAGES).for_each(|frame| assert_eq!(ground.filled_with(frame), frame as u8 + 1));
}

#[test]
fn a_batch_that_stops_says_where_and_why() {
    let ground = ground!();
    (0..6).for_each(|frame| ground.fill(frame, 9));
    // Slots 6 and 7 are holes.
    assert_eq!(ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 8), stopped(6, Refusal::Hole));
    ground.fill(0, 1);
    ground.fill(1, 2);
    assert_eq!(ground.mmu.map(Trap::Worker, ground.page(3), Frame(0), 2), stopped(0, Refusal::Occupied));
    assert_eq!(ground.filled_with(0), 1, "a refused frame keeps its contents");
    assert_eq!(ground.mmu.unmap(ground.page(4), Frame(4), 4), stopped(2, Refusal::Hole));
    assert_eq!(ground.mmu.map(Trap::Worker, ground.page(0), Frame(PAGES - 1), 2), stopped(0, Refusal::Foreign));
    assert!(ground.mmu.bytes(Frame(PAGES)).is_null());
}

#[test]
fn a_page_that_the_program_protected_goes_and_comes_by_copy() {
    let ground = ground!();
    for access in [Access::Read, Access::None] {
        (0..4).for_each(|frame| ground.fill(frame, 0x41 + frame as u8));
        ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 4).unwrap();
        unsafe { memory::protect(ground.worker + PAGE_BYTES, 2 * PAGE_BYTES, access) }.unwrap();
        // The batch crosses mappings: free, protected, protected, free.
        ground.mmu.unmap(ground.page(0), Frame(4), 4).unwrap();
        for frame in 4..8 {
            assert_eq!(ground.filled_with(frame), 0x41 - 4 + frame as u8);
            assert!(!ground.mmu.present(ground.page(frame as usize - 4)));
        }
        ground.mmu.map(Trap::Worker, ground.page(0), Frame(4), 4).unwrap();
        for index in 0..4 {
            assert!(ground.mmu.present(ground.page(index)));
            assert!(!ground.populated(ground.pool + (4 + index) * PAGE_BYTES), "the slot gave its copy up");
        }
        let byte = 1u8;
        let into = libc::iovec { iov_base: (ground.worker + PAGE_BYTES) as *mut _, iov_len: 1 };
        let from = libc::iovec { iov_base: (&raw const byte).cast_mut().cast(), iov_len: 1 };
        let wrote = unsafe { libc::process_vm_writev(libc::getpid(), &from, 1, &into, 1, 0) };
        assert_eq!(wrote, -1, "the program's protection still holds");
        unsafe { memory::protect(ground.worker, LEN, Access::ReadWrite) }.unwrap();
        (0..4).for_each(|index| assert_eq!(ground.read(index), 0x41 + index as u8));
        ground.mmu.drop_pages(ground.page(0), 4);
    }
}

#[test]
fn a_protected_page_without_a_frame_is_a_hole_and_not_zeros() {
    let ground = ground!();
    unsafe { memory::protect(ground.worker, PAGE_BYTES, Access::Read) }.unwrap();
    assert_eq!(ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 1), stopped(0, Refusal::Hole));
    assert_eq!(ground.mmu.unmap(ground.page(0), Frame(0), 1), stopped(0, Refusal::Hole));
}

#[test]
fn a_page_that_can_be_written_is_never_copied_out() {
    let ground = ground!();
    ground.fill(0, 5);
    ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 1).unwrap();
    let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    assert_eq!(unsafe { libc::mprotect(ground.worker as *mut _, PAGE_BYTES, all) }, 0);
    assert_eq!(ground.mmu.unmap(ground.page(0), Frame(0), 1), stopped(0, Refusal::Pinned));
    assert_eq!(ground.read(0), 5);
    assert!(!ground.populated(ground.pool));
}

#[test]
fn a_registered_buffer_pins_its_page_until_it_is_let_go() {
    let ground = ground!();
    ground.fill(0, 3);
    ground.fill(1, 4);
    ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 2).unwrap();
    let Some(pinned) = Pinned::page(ground.worker + PAGE_BYTES) else { return };
    assert_eq!(ground.mmu.unmap(ground.page(0), Frame(0), 2), stopped(1, Refusal::Pinned));
    assert_eq!(ground.read(1), 4);
    pinned.let_go();
    let end = clock::monotonic_ns() + 2_000_000_000;
    while ground.mmu.unmap(ground.page(1), Frame(1), 1).is_err() {
        assert!(clock::monotonic_ns() < end, "the page stays pinned");
    }
    assert_eq!((ground.filled_with(0), ground.filled_with(1)), (3, 4));
}

#[test]
fn pages_shared_with_a_forked_child_are_moved_all_the_same() {
    let ground = ground!();
    (0..4).for_each(|frame| ground.fill(frame, 0x20 + frame as u8));
    ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 2).unwrap();
    ground.give_to_child();
    // Advice for one of the pages makes two mappings of the region, which one call does not cross.
    let second = (ground.worker + PAGE_BYTES) as *mut libc::c_void;
    assert_eq!(unsafe { libc::madvise(second, PAGE_BYTES, libc::MADV_DONTDUMP) }, 0);
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut byte = 0u8;
        unsafe {
            libc::close(pipe[1]);
            libc::read(pipe[0], (&raw mut byte).cast(), 1);
            // The parent took its pages away; ours hold what they held.
            let kept = *(ground.worker as *const u8) == 0x20 && *((ground.pool + 3 * PAGE_BYTES) as *const u8) == 0x23;
            libc::_exit(i32::from(!kept));
        }
    }
    ground.mmu.unmap(ground.page(0), Frame(0), 2).unwrap();
    ground.mmu.map(Trap::Worker, ground.page(2), Frame(2), 2).unwrap();
    assert_eq!(
        (ground.filled_with(0), ground.filled_with(1), ground.read(2), ground.read(3)),
        (0x20, 0x21, 0x22, 0x23)
    );
    let mut status = 0;
    unsafe {
        libc::close(pipe[1]);
        libc::waitpid(child, &mut status, 0);
    }
    assert_eq!(status, 0, "the child lost contents");
}

#[test]
fn a_worker_region_tells_a_thread_and_wakes_it() {
    let ground = ground!();
    let (uffd, page, addr) = (ground.descriptors.worker, ground.page(5), ground.worker + 5 * PAGE_BYTES + 123);
    ground.fill(0, 0x55);
    let faulter = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            faulter.store(thread::id(), Ordering::Release);
            unsafe { (addr as *const u8).read_volatile() }
        });
        let mut messages = [Message::EMPTY; 4];
        assert_eq!(uffd.read(&mut messages), Ok(1));
        let fault = messages[0].fault().unwrap();
        assert_eq!((fault.addr, fault.write, fault.minor, fault.protected), (addr, false, false, false));
        assert_eq!(fault.thread, faulter.load(Ordering::Acquire));
        ground.mmu.map(Trap::Worker, page, Frame(0), 1).unwrap();
        assert_eq!(reader.join().unwrap(), 0x55);
    });
}

#[test]
fn poison_fails_who_waits_and_who_comes_later() {
    let ground = ground!();
    let (uffd, addr) = (ground.descriptors.worker, ground.worker);
    ground.fill(1, 1);
    ground.mmu.map(Trap::Worker, ground.page(1), Frame(1), 1).unwrap();
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let write = |addr: usize| match unsafe { libc::write(pipe[1], addr as *const _, 1) } {
        -1 => std::io::Error::last_os_error().raw_os_error(),
        _ => None,
    };
    assert_eq!(write(addr + PAGE_BYTES), None);
    ground.mmu.poison(Trap::Worker, ground.page(1)); // Populated: its contents go.
    assert_eq!(write(addr + PAGE_BYTES), Some(libc::EFAULT));
    // A child inherits the poison: a guard in its place would be SIGSEGV.
    ground.give_to_child();
    let child = unsafe { libc::fork() };
    if child == 0 {
        unsafe {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
            ((addr + PAGE_BYTES) as *const u8).read_volatile();
            libc::_exit(0);
        }
    }
    let mut status = 0;
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(libc::WTERMSIG(status), libc::SIGBUS);
    if Uffd::open(Reach::EveryFault, Reading::Waits).is_err() {
        return skip("uffd-kernel", "faults inside system calls are not served here");
    }
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write(addr));
        assert_eq!(uffd.read(&mut [Message::EMPTY]), Ok(1));
        ground.mmu.poison(Trap::Worker, ground.page(0));
        assert_eq!(writer.join().unwrap(), Some(libc::EFAULT));
    });
}

static HANDLER_MMU: AtomicPtr<LinuxMmu> = AtomicPtr::new(std::ptr::null_mut());
static HANDLED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_sigbus(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let page = VirtAddr(unsafe { (*info).si_addr() } as usize).page();
    let mmu = unsafe { &*HANDLER_MMU.load(Ordering::Acquire) };
    if mmu.map(Trap::Upcall, page, Frame(2), 1).is_err() {
        unsafe { libc::_exit(99) }
    }
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn an_upcall_region_signals_the_thread_and_fails_system_calls() {
    let ground = ground!();
    ground.fill(2, 0x66);
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
    HANDLER_MMU.store((&raw const ground.mmu).cast_mut(), Ordering::Release);
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    assert_eq!(unsafe { libc::write(pipe[1], ground.upcall as *const _, 1) }, -1);
    assert_eq!(unsafe { (ground.upcall as *const u8).read_volatile() }, 0x66);
    assert_eq!(HANDLED.load(Ordering::Relaxed), 1);
    assert_eq!(unsafe { libc::write(pipe[1], ground.upcall as *const _, 1) }, 1);
}

#[test]
fn lost_descriptors_and_foreign_mappings_are_told_apart() {
    let ground = ground!();
    ground.fill(0, 7);
    unsafe { ground.mmu.adopt(Descriptors { worker: Uffd(Descriptor::ABSENT), ..ground.descriptors }) };
    assert_eq!(ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 1), stopped(0, Refusal::NoDescriptor));
    // The program closed ours and opened something else under its number.
    let other = Descriptor::open(c"/dev/null", 0).unwrap();
    unsafe {
        ground.mmu.adopt(Descriptors { worker: Uffd(other), pagemap: Pagemap(other), ..ground.descriptors });
    }
    assert_eq!(ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 1), stopped(0, Refusal::NoDescriptor));
    assert!(!ground.mmu.present(ground.page(0)), "presence is known without our descriptor");
    unsafe { ground.mmu.adopt(ground.descriptors) };
    ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 1).unwrap();
    assert!(ground.mmu.present(ground.page(0)));
    unsafe { memory::unmap(ground.worker + PAGE_BYTES, PAGE_BYTES) }.unwrap();
    ground.fill(1, 7);
    assert_eq!(ground.mmu.map(Trap::Worker, ground.page(1), Frame(1), 1), stopped(0, Refusal::Foreign));
    unsafe { memory::map_anonymous(Place::Free(ground.worker + PAGE_BYTES), PAGE_BYTES, Access::ReadWrite) }.unwrap();
    assert_eq!(ground.mmu.map(Trap::Worker, ground.page(1), Frame(1), 1), stopped(0, Refusal::Foreign));
    unsafe { memory::protect(ground.worker + PAGE_BYTES, PAGE_BYTES, Access::Read) }.unwrap();
    assert_eq!(ground.mmu.map(Trap::Worker, ground.page(1), Frame(1), 1), stopped(0, Refusal::Foreign));
    assert_eq!(ground.filled_with(1), 7);
}

#[test]
fn what_the_program_mapped_over_a_region_stays() {
    let ground = ground!();
    for frame in 0..4 {
        ground.fill(frame, 1 + frame as u8);
    }
    ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 4).unwrap();
    let own = ground.worker + 2 * PAGE_BYTES;
    unsafe {
        memory::map_anonymous(Place::Over(own), PAGE_BYTES, Access::ReadWrite).unwrap();
        (own as *mut u8).write_bytes(99, PAGE_BYTES);
    }
    assert_eq!(ground.mmu.unmap(ground.page(0), Frame(0), 4), stopped(2, Refusal::Foreign));
    assert_eq!(ground.mmu.unmap(ground.page(2), Frame(2), 2), stopped(0, Refusal::Foreign));
    assert_eq!(ground.mmu.unmap(ground.page(3), Frame(3), 1), Ok(()));
    ground.mmu.populate(Frame(2), 1).unwrap();
    assert_eq!(ground.mmu.copy_out(ground.page(2), Frame(2)), Err(Refusal::Foreign));
    ground.mmu.drop_pages(ground.page(0), 4);
    ground.mmu.poison(Trap::Worker, ground.page(2));
    assert_eq!(ground.read(2), 99);
    // Half of a region with other rights is the region's still.
    for (trap, start) in [(Trap::Worker, ground.worker + 8 * PAGE_BYTES), (Trap::Upcall, ground.upcall)] {
        let page = VirtAddr(start).page();
        ground.mmu.populate(Frame(8), 4).unwrap();
        ground.mmu.map(trap, page, Frame(8), 4).unwrap();
        unsafe { memory::protect(start, 2 * PAGE_BYTES, Access::Read) }.unwrap();
        assert_eq!(ground.mmu.unmap(page, Frame(8), 4), Ok(()));
        ground.mmu.release(Frame(8), 4);
    }
}

#[test]
fn slots_are_populated_clean_and_released() {
    let ground = ground!();
    ground.fill(3, 1);
    ground.mmu.populate(Frame(0), PAGES).unwrap();
    assert_eq!((ground.filled_with(2), ground.filled_with(3)), (0, 1), "populating keeps what is there");
    ground.mmu.release(Frame(0), PAGES);
    assert!(!ground.populated(ground.pool + 3 * PAGE_BYTES));
    ground.mmu.populate(Frame(3), 1).unwrap();
    assert_eq!(ground.filled_with(3), 0);
    // The count of a populate that fails: the end of the pool is not mapped.
    unsafe { memory::unmap(ground.pool + 8 * PAGE_BYTES, PAGE_BYTES) }.unwrap();
    assert_eq!(ground.mmu.populate(Frame(0), PAGES), stopped(8, Refusal::NoMemory));
}

#[test]
fn locked_pools_and_regions_move_and_are_released() {
    let ground = ground!();
    if memory::lock_on_fault(ground.pool, LEN).and(memory::lock_on_fault(ground.worker, LEN)).is_err() {
        return skip("memlock", "RLIMIT_MEMLOCK is too low");
    }
    ground.fill(0, 8);
    ground.mmu.map(Trap::Worker, ground.page(0), Frame(0), 1).unwrap();
    assert_eq!(ground.read(0), 8);
    ground.mmu.drop_pages(ground.page(0), 1);
    assert!(!ground.mmu.present(ground.page(0)));
}

#[test]
fn written_pages_are_found_and_holes_are_not() {
    let (start, pagemap) = (reserve(LEN), Pagemap(Descriptor::open_pagemap().unwrap()));
    let uffd = match open_uffd(Features::WP_ASYNC.and(Features::WP_UNPOPULATED)) {
        Ok(uffd) => uffd,
        Err(why) => return skip("uffd", &format!("WP_ASYNC is refused: {why}")),
    };
    let write = |index: usize| unsafe { ((start + index * PAGE_BYTES) as *mut u8).write_volatile(1) };
    unsafe { uffd.register(start, LEN, Modes::WP.and(Modes::MISSING)) }.unwrap();
    let source = vec![1u8; PAGE_BYTES];
    let copy = |index: usize, writing| unsafe {
        let to = start + index * PAGE_BYTES;
        uffd.copy(to, source.as_ptr() as usize, PAGE_BYTES, Waiters::Wake, writing).unwrap();
    };
    copy(0, Writing::Allowed);
    copy(1, Writing::Allowed);
    copy(4, Writing::Protected);
    copy(5, Writing::Allowed);
    copy(6, Writing::Protected);
    let written = |afterwards| {
        let mut stretches = [Stretch::default(); 8];
        let found = pagemap.written(start, start + LEN, afterwards, &mut stretches).unwrap();
        assert_eq!(found.end, start + LEN);
        let page = |addr: usize| (addr - start) / PAGE_BYTES;
        stretches[..found.stretches].iter().flat_map(|one| page(one.start())..page(one.end())).collect::<Vec<_>>()
    };
    write(6);
    assert_eq!(written(Afterwards::Leave), [0, 1, 5, 6]);
    unsafe { uffd.set_writing(start, 2 * PAGE_BYTES, Writing::Protected) }.unwrap();
    assert_eq!(written(Afterwards::Protect), [5, 6]);
    assert_eq!(written(Afterwards::Leave), []);
    write(4);
    assert_eq!(written(Afterwards::Leave), [4]);
    assert_eq!(pagemap.categories(start + 8 * PAGE_BYTES), Ok(Categories::NONE));
    // Protecting the holes would have armed markers, which a map runs into.
    copy(8, Writing::Allowed);
}

#[test]
fn pages_that_shared_memory_has_are_mapped() {
    let uffd = match open_uffd(Features::MINOR_SHMEM.and(Features::MISSING_SHMEM)) {
        Ok(uffd) => uffd,
        Err(why) => return skip("uffd", &format!("MINOR_SHMEM is refused: {why}")),
    };
    let file = memory::memfd(c"frames", LEN).unwrap();
    let map = || unsafe { memory::map_file(Place::Anywhere, LEN, Access::ReadWrite, Sharing::Shared, file, 0) };
    let (owner, user) = (map().unwrap(), map().unwrap());
    unsafe { (owner as *mut u8).write(0x77) };
    unsafe { uffd.register(user, LEN, Modes::MINOR.and(Modes::MISSING)) }.unwrap();
    unsafe { uffd.map_existing(user, PAGE_BYTES, Waiters::Wake, Writing::Allowed) }.unwrap();
    assert_eq!(unsafe { (user as *const u8).read() }, 0x77);
    let absent = unsafe { uffd.map_existing(user, 2 * PAGE_BYTES, Waiters::Wake, Writing::Allowed) }.unwrap_err();
    assert_eq!((absent.done_bytes, absent.why), (0, Errno::EXIST));
    memory::seal(file, memory::Seals::GROW.and(memory::Seals::SHRINK)).unwrap();
    assert_eq!(memory::set_len(file, 2 * LEN), Err(Errno::PERM));
    file.close().unwrap();
}

#[test]
fn the_calling_thread_is_known_and_bound() {
    let before = signal::block_all();
    assert_eq!(signal::block_all(), signal::block_all());
    assert!(signal::block_all().contains(libc::SIGBUS as u32) && !before.contains(libc::SIGBUS as u32));
    signal::restore(before);
    std::thread::spawn(|| {
        assert_eq!(thread::id(), unsafe { libc::gettid() } as u32);
        let allowed = thread::CpuSet::of(0).unwrap();
        let cpu = thread::cpu();
        assert!(allowed.contains(cpu) && !allowed.without(cpu).contains(cpu));
        thread::CpuSet::only(cpu).bind(0).unwrap();
        assert!(thread::CpuSet::of(0).unwrap().without(cpu).is_empty());
        let inherited = Descriptor::open(c"/dev/null", 0).unwrap();
        let number = inherited.raw() as u32;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                thread::unshare_descriptors().unwrap();
                thread::close_descriptors(number, number).unwrap();
                assert_eq!(inherited.close(), Err(Errno::BADF));
            });
            scope.spawn(|| {
                thread::leave_descriptors().unwrap();
                assert_eq!(Descriptor::open(c"/dev/null", 0).unwrap().raw(), 0, "there is none but this");
            });
        });
        assert_eq!(inherited.close(), Ok(()), "the other thread closed it in its own table only");
    })
    .join()
    .unwrap();
}

#[test]
fn a_sleeper_wakes_by_time_by_change_and_by_call() {
    let word = AtomicU32::new(1);
    let start = clock::monotonic_ns();
    assert_eq!(futex::wait(&word, 1, 3000), Err(Errno::TIMEDOUT));
    assert!(clock::monotonic_ns() - start >= 3_000_000);
    assert_eq!(futex::wait(&word, 2, 0), Err(Errno::AGAIN));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while word.load(Ordering::Acquire) == 1 {
                let _ = futex::wait(&word, 1, 0);
            }
        });
        while futex::wake(&word, 1) == 0 {
            thread::give_way();
        }
        word.store(0, Ordering::Release);
        futex::wake(&word, 1);
    });
}

/// A cut has every writer wait for as long as it takes to move a set, of a region of any size.
#[test]
fn pages_that_change_sets_cost_nothing_where_there_are_none() {
    const LEN: usize = 8 << 20;
    let words = || {
        let at = NonNull::new(reserve(LEN) as *mut AtomicU64).unwrap();
        // SAFETY: table-memory: a mapping of zeros that nobody else uses.
        PageSet::new(unsafe { Table::new(at, LEN / 8) })
    };
    let (from, to) = (words(), words());
    // Whoever only reads finds the kernel's page of zeros everywhere; a write takes a page.
    assert_eq!((from.count(), to.count()), (0, 0));
    let last = LEN as u64 * 8 - 1;
    from.insert(5);
    from.insert(last);
    let before = faults();
    to.take_all(&from);
    let taken = faults() - before;
    assert!(taken < 16, "{taken} pages of the two tables were written to, of {}", 2 * LEN / PAGE_BYTES);
    assert_eq!((from.count(), to.count(), to.next(0), to.next(6)), (0, 2, Some(5), Some(last)));
}

/// How many faults of this thread the kernel has answered.
fn faults() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) }, 0);
    unsafe { usage.assume_init() }.ru_minflt
}
