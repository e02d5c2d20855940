//! How much is kept, and that it is given back.

use selfpage::alloc::{self, Severity};

use crate::own_process;

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn kept() -> usize {
    let stats = alloc::stats();
    stats.retained_bytes - stats.live_bytes
}

/// Allocates, touches and frees `len_bytes`.
fn use_up(len_bytes: usize) {
    let block = alloc::allocate(len_bytes, 1).unwrap();
    // SAFETY: ours, this long, and gone afterwards.
    unsafe {
        block.write_bytes(1, len_bytes);
        alloc::free(block);
    }
}

#[test]
fn a_quarter_more_than_was_live_is_kept_at_most() {
    own_process::run("bounds::a_quarter_more_than_was_live_is_kept_at_most", || {
        let before = resident_bytes();
        for len_mib in [64, 3, 40, 17, 64, 5, 33] {
            use_up(len_mib << 20);
            let resident = resident_bytes() - before;
            assert!(resident <= (64 << 20) / 4 * 5 + (4 << 20), "{} MiB after {len_mib}", resident >> 20);
        }
        assert!(resident_bytes() - before >= 60 << 20, "nothing is kept");
        alloc::trim(0);
        assert!(resident_bytes() - before < 8 << 20, "trim left {}", resident_bytes() - before);
        alloc::set_retention(Some(0));
        use_up(64 << 20);
        assert!(resident_bytes() - before < 8 << 20, "kept, though nothing may be");
    });
}

#[test]
fn pressure_takes_half_and_then_all() {
    own_process::run("bounds::pressure_takes_half_and_then_all", || {
        let before = resident_bytes();
        use_up(64 << 20);
        assert_eq!(kept(), 64 << 20);
        assert!(alloc::relieve(Severity::Some) >= 32 << 20);
        assert!(kept() <= 32 << 20);
        // What was lazily given back may hold anything, and zeros were asked for.
        let zeroed = alloc::allocate_zeroed(64 << 20, 1).unwrap();
        // SAFETY: ours, and this long.
        let bytes = unsafe { std::slice::from_raw_parts(zeroed.as_ptr(), 64 << 20) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        // SAFETY: ours.
        unsafe { alloc::free(zeroed) };
        alloc::relieve(Severity::Full);
        assert_eq!(kept(), 0);
        assert!(resident_bytes() - before < 8 << 20);
    });
}

#[test]
fn the_peak_is_forgotten_when_it_is_long_ago() {
    own_process::run("bounds::the_peak_is_forgotten_when_it_is_long_ago", || {
        use_up(64 << 20);
        (0..200).for_each(|_| alloc::decay());
        assert_eq!(kept(), 0);
    });
}
