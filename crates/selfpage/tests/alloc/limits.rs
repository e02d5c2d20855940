//! The limit of a control group: what is kept goes before it is reached.

use std::io::Write;
use std::time::{Duration, Instant};

use selfpage::alloc;

use crate::limited_group::{Group, REASON};
use crate::own_process;
use crate::skip::skip;

const MIB: usize = 1 << 20;
const LIMIT: usize = 256 * MIB;

fn touched(len_bytes: usize) -> std::ptr::NonNull<u8> {
    let block = alloc::allocate(len_bytes, 1).unwrap();
    // SAFETY: ours, and this long.
    unsafe { block.write_bytes(1, len_bytes) };
    block
}

/// What is kept makes room for what the process has beside it by `take`, which says how many bytes that is.
fn leaves_some_beside<T>(test: &str, take: impl FnOnce() -> (T, usize)) {
    own_process::run(test, || {
        let Some(group) = Group::limited(LIMIT) else { return skip("cgroup", REASON) };
        group.join();
        // Nothing else makes what is kept less.
        alloc::set_retention(Some(1 << 40));
        // SAFETY: the process has no other thread that looks at its environment.
        unsafe { std::env::set_var("MEMORY_PRESSURE_WATCH", "/dev/null") };
        let kept = touched(128 * MIB);
        let _live = touched(64 * MIB);
        // SAFETY: ours.
        unsafe { alloc::free(kept) };
        assert_eq!(alloc::stats().retained_bytes, 192 * MIB);
        let (_others, others_bytes) = take();
        alloc::keeper::start().unwrap();
        let begin = Instant::now();
        while alloc::stats().retained_bytes == 192 * MIB {
            assert!(begin.elapsed() < Duration::from_secs(120), "nothing was given back");
            std::thread::sleep(Duration::from_millis(10));
        }
        let retained = alloc::stats().retained_bytes;
        // A sixteenth is left alone.
        assert!(retained + others_bytes <= LIMIT / 16 * 15, "{} MiB beside {}", retained / MIB, others_bytes / MIB);
        assert!(retained > 120 * MIB, "{} MiB: more went than had to", retained / MIB);
        // Small blocks can take over nothing of what is kept for large ones, which goes in their place.
        let _small: Vec<_> = (0..20).map(|_| touched(MIB - 4096)).collect();
        assert!(alloc::stats().retained_bytes <= retained + 2 * MIB);
    });
}

#[test]
fn what_is_kept_leaves_some_of_what_the_group_may_have() {
    leaves_some_beside("limits::what_is_kept_leaves_some_of_what_the_group_may_have", || {
        (std::hint::black_box(vec![1u8; 52 * MIB]), 52 * MIB)
    });
}

#[test]
fn what_the_kernel_has_for_the_group_is_no_room() {
    const PIPES: usize = 832;
    const PIPE_BYTES: usize = 64 << 10;
    leaves_some_beside("limits::what_the_kernel_has_for_the_group_is_no_room", || {
        let descriptors = libc::rlimit { rlim_cur: 2 * PIPES as u64 + 100, rlim_max: 2 * PIPES as u64 + 100 };
        // SAFETY: test: the limit is borrowed until the call returns.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &descriptors) }, 0);
        let filled = |_| {
            let (read, mut write) = std::io::pipe().unwrap();
            write.write_all(&[1; PIPE_BYTES]).unwrap();
            (read, write)
        };
        ((0..PIPES).map(filled).collect::<Vec<_>>(), PIPES * PIPE_BYTES)
    });
}
