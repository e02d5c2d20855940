//! The limit of a control group: what is kept goes before it is reached.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use selfpage::alloc;

use crate::own_process;
use crate::skip::skip;

const MIB: usize = 1 << 20;
const LIMIT: usize = 256 * MIB;

/// A group for this process alone, below the one it was in.
struct Group {
    before: PathBuf,
    own: PathBuf,
}

impl Group {
    fn limited() -> Option<Group> {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let group = |start: &str, mount: &str| {
            let line = groups.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(start))?;
            Some(PathBuf::from(format!("/sys/fs/cgroup{mount}{line}")))
        };
        let places = [(group("memory:", "/memory"), "memory.limit_in_bytes"), (group(":", ""), "memory.max")];
        places.into_iter().find_map(|(before, limit)| {
            let before = before?;
            let own = before.join(format!("selfpage-test-{}", std::process::id()));
            fs::create_dir(&own).ok()?;
            let group = Group { before, own };
            fs::write(group.own.join(limit), LIMIT.to_string()).ok()?;
            fs::write(group.own.join("cgroup.procs"), std::process::id().to_string()).ok()?;
            Some(group)
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.before.join("cgroup.procs"), std::process::id().to_string());
        let _ = fs::remove_dir(&self.own);
    }
}

fn touched(len_bytes: usize) -> std::ptr::NonNull<u8> {
    let block = alloc::allocate(len_bytes, 1).unwrap();
    // SAFETY: ours, and this long.
    unsafe { block.write_bytes(1, len_bytes) };
    block
}

#[test]
fn what_is_kept_leaves_some_of_what_the_group_may_have() {
    own_process::run("limits::what_is_kept_leaves_some_of_what_the_group_may_have", || {
        let Some(_group) = Group::limited() else {
            return skip("cgroup", "no control group with a limit can be made: be root, outside of a container");
        };
        // Nothing else makes what is kept less.
        alloc::set_retention(Some(1 << 40));
        // SAFETY: the process has no other thread that looks at its environment.
        unsafe { std::env::set_var("MEMORY_PRESSURE_WATCH", "/dev/null") };
        let kept = touched(128 * MIB);
        let _live = touched(64 * MIB);
        // SAFETY: ours.
        unsafe { alloc::free(kept) };
        assert_eq!(alloc::stats().retained_bytes, 192 * MIB);
        let others = std::hint::black_box(vec![1u8; 52 * MIB]);
        alloc::keeper::start().unwrap();
        let begin = Instant::now();
        while alloc::stats().retained_bytes == 192 * MIB {
            assert!(begin.elapsed() < Duration::from_secs(120), "nothing was given back");
            std::thread::sleep(Duration::from_millis(10));
        }
        let retained = alloc::stats().retained_bytes;
        // A sixteenth is left alone.
        assert!(retained + others.len() <= LIMIT / 16 * 15, "{} MiB beside {}", retained / MIB, others.len() / MIB);
        assert!(retained > 120 * MIB, "{} MiB: more went than had to", retained / MIB);
        // Small blocks can take over nothing of what is kept for large ones, which goes in their place.
        let _small: Vec<_> = (0..20).map(|_| touched(MIB - 4096)).collect();
        assert!(alloc::stats().retained_bytes <= retained + 2 * MIB);
    });
}
