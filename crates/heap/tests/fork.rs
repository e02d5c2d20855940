//! A program that has the heap by one line, and forks while its threads allocate. Alone in a process.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use selfpage_heap::Allocator;

#[global_allocator]
static HEAP: Allocator = Allocator;

fn take_and_give_back(size: usize) {
    let layout = Layout::from_size_align(size, 16).unwrap();
    // SAFETY: the size is not zero; the block is ours, of that layout.
    unsafe {
        let block = HEAP.alloc(layout);
        block.write(1);
        HEAP.dealloc(block, layout);
    }
}

/// Before the heap's first block: so it is this handler's turn in the child before it is the heap's.
#[used]
#[unsafe(link_section = ".preinit_array")]
static FIRST: extern "C" fn() = register_first;

extern "C" fn register_first() {
    // SAFETY: a function that stays.
    unsafe { libc::pthread_atfork(Some(handler), Some(handler), Some(handler)) };
}

unsafe extern "C" fn handler() {
    take_and_give_back(2 << 20);
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

static HANDLED: AtomicUsize = AtomicUsize::new(0);

#[test]
fn the_child_may_allocate_whatever_other_threads_were_doing() {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                (0..100).for_each(|_| take_and_give_back(3 << 20));
            }
        });
        let ended: Vec<i32> = (0..100)
            .map(|_| {
                // SAFETY: the child calls nothing but the heap and `_exit`.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // A lock that nobody gives back would hold it for ever.
                    // SAFETY: calls without pointers.
                    unsafe { libc::alarm(30) };
                    // The harness would catch a panic, and the child end well.
                    let taken = std::panic::catch_unwind(|| take_and_give_back(3 << 20));
                    // SAFETY: ends the child at once.
                    unsafe { libc::_exit(taken.is_err().into()) };
                }
                let mut status = 0;
                // SAFETY: our child, and a place for its status.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                status
            })
            .take_while(|status| *status == 0)
            .collect();
        done.store(true, Ordering::Relaxed);
        assert_eq!(ended.len(), 100, "a child was held");
        assert_eq!(HANDLED.load(Ordering::Relaxed), 200, "on this side");
    });
}
