//! futex(2) by number, where the kernel changes the word itself. It waits for no pager then, and a word on an absent page would be `EFAULT`.

use crate::maps;
use crate::sys::call;

const LOCK_PI2: i32 = 13;
const WORD_BYTES: usize = size_of::<u32>();

/// futex(2).
///
/// # Safety
/// *raw-call*: as for the call.
pub unsafe fn futex(args: [usize; 6]) -> isize {
    let [word, operation, _, _, second, _] = args;
    let make = || {
        // SAFETY: raw-call: passed on from our caller.
        unsafe { call(libc::SYS_futex, args) }
    };
    match operation as i32 & libc::FUTEX_CMD_MASK {
        // Whoever sleeps in the call has the word changed when it wakes. It may leave by a handler that jumps out, so nothing is left to
        // be taken back after the call: such a word stays in core, as a mutex does.
        libc::FUTEX_LOCK_PI | LOCK_PI2 | libc::FUTEX_TRYLOCK_PI | libc::FUTEX_UNLOCK_PI => {
            maps::keep(word, WORD_BYTES);
            make()
        }
        libc::FUTEX_WAIT_REQUEUE_PI | libc::FUTEX_CMP_REQUEUE_PI => {
            maps::keep(second, WORD_BYTES);
            make()
        }
        // Any word may be one, and nobody sleeps.
        libc::FUTEX_WAKE_OP => maps::while_in_core(second, WORD_BYTES, make),
        _ => make(),
    }
}
