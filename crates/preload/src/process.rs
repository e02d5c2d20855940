//! How processes begin and end: fork, exec, exit, and the record that each leaves.

use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use selfpage_heap::next;

use crate::sys::Quiet;
use crate::{environment, filters, heap, managed, maps, objects, pagers, program, record, rights, sys};

pub type Strings = *const *const c_char;

next!(EXECVE: c"execve" as fn(*const c_char, Strings, Strings) -> c_int, next_execve);
next!(EXECVPE: c"execvpe" as fn(*const c_char, Strings, Strings) -> c_int, next_execvpe);
next!(SPAWN: c"posix_spawn" as
    fn(*mut libc::pid_t, *const c_char, *const c_void, *const c_void, Strings, Strings) -> c_int, next_spawn);
next!(SPAWNP: c"posix_spawnp" as
    fn(*mut libc::pid_t, *const c_char, *const c_void, *const c_void, Strings, Strings) -> c_int, next_spawnp);
next!(FEXECVE: c"fexecve" as fn(c_int, Strings, Strings) -> c_int, next_fexecve);
type Handler = Option<unsafe extern "C" fn()>;

next!(REGISTER: c"__register_atfork" as fn(Handler, Handler, Handler, *mut c_void) -> c_int, next_register);

/// Has forks find our locks, and the domain, in order: handlers run backwards before a fork, and forwards after it. Our own heap the
/// library needs up to the last moment and from the first. Our other locks are taken before it brings the domain to rest, and
/// given back after it has been rebuilt. Before all of them comes the list of streams: somebody who has a stream may be at managed memory.
pub fn attend_forks() {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    if BEGUN.swap(true, Ordering::Relaxed) {
        return;
    }
    // SAFETY: c-library: functions that stay loaded.
    unsafe {
        libc::pthread_atfork(Some(just_before_fork), Some(just_after_fork), Some(just_after_fork_in_child));
        selfpage::attend_forks();
        libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child));
    }
    selfpage_heap::hold_streams_over_forks();
}

/// As in the C library, where `pthread_atfork` comes here. The first may be a library's, whose constructor runs before ours: its
/// handlers may use managed memory all the same.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
    library: *mut c_void,
) -> c_int {
    attend_forks();
    // SAFETY: c-library: passed on from our caller.
    unsafe { next_register()(prepare, parent, child, library) }
}

/// Over a fork: the errno that the program had, or why there is no child.
static ERRNO: AtomicI32 = AtomicI32::new(0);

extern "C" fn before_fork() {
    let errno = sys::errno();
    maps::hold();
    ERRNO.store(errno, Ordering::Relaxed);
    pagers::hold();
    heap::hold();
}

/// Ends what `before_fork` began, but for the signals.
fn let_go() -> Option<Quiet> {
    // SAFETY: lock-word: this thread, or the one it is a copy of, ran `before_fork`.
    unsafe {
        heap::let_go();
        pagers::let_go();
        maps::let_go()
    }
}

extern "C" fn after_fork_in_parent() {
    let errno = ERRNO.load(Ordering::Relaxed);
    // A handler of a signal comes after that.
    let quiet = let_go();
    sys::set_errno(errno);
    drop(quiet);
}

extern "C" fn after_fork_in_child() {
    let errno = ERRNO.load(Ordering::Relaxed);
    // A handler of a signal may end this process, or look at what is not for it.
    let quiet = let_go();
    filters::settle_in_child();
    record::settle_in_child();
    objects::settle_in_child();
    crate::threads::settle_in_child();
    rights::settle_in_child();
    maps::settle_in_child();
    sys::set_errno(errno);
    drop(quiet);
}

extern "C" fn just_before_fork() {
    heap::hold_own();
    managed::hold();
    sys::set_errno(ERRNO.load(Ordering::Relaxed));
}

extern "C" fn just_after_fork() {
    ERRNO.store(sys::errno(), Ordering::Relaxed);
    // SAFETY: lock-word: this thread, or the one it is a copy of, ran `just_before_fork`.
    unsafe { heap::let_go_own() };
}

extern "C" fn just_after_fork_in_child() {
    heap::settle_in_child();
    managed::settle_in_child();
    just_after_fork();
}

/// As in the C library, but with the handlers: without them the child would find no memory of the domain's.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> c_int {
    // SAFETY: raw-call: fork takes no arguments.
    unsafe { libc::fork() }
}

/// Ends the process, on the record.
pub fn exit(status: c_int) -> ! {
    record::end();
    loop {
        // SAFETY: raw-call: no memory is passed.
        unsafe { sys::call(libc::SYS_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
    }
}

/// As in the C library.
#[unsafe(no_mangle)]
pub extern "C" fn _exit(status: c_int) -> ! {
    exit(status)
}

/// As in the C library.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn _Exit(status: c_int) -> ! {
    exit(status)
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(path: *const c_char, args: Strings, env: Strings) -> c_int {
    // SAFETY: c-library: passed on from our caller.
    unsafe { environment::of(program::see(path), env, |env| record::over_exec(|| next_execve()(path, args, env))) }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, args: Strings) -> c_int {
    // SAFETY: c-library: passed on from our caller; the environment is the C library's.
    unsafe { execve(path, args, libc_environ()) }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(file: *const c_char, args: Strings) -> c_int {
    // SAFETY: c-library: passed on from our caller; the environment is the C library's.
    unsafe { execvpe(file, args, libc_environ()) }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(file: *const c_char, args: Strings, env: Strings) -> c_int {
    // SAFETY: c-library: passed on from our caller.
    unsafe {
        let exec = |env| record::over_exec(|| next_execvpe()(file, args, env));
        environment::of(program::see_in_path(file), env, exec)
    }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(file: c_int, args: Strings, env: Strings) -> c_int {
    // SAFETY: c-library: passed on from our caller.
    record::over_exec(|| unsafe { next_fexecve()(file, args, env) })
}

/// As in C libraries from 2.34 on.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execveat(
    directory: c_int,
    path: *const c_char,
    args: Strings,
    env: Strings,
    flags: c_int,
) -> c_int {
    let args = [directory as usize, path as usize, args as usize, env as usize, flags as usize, 0];
    // SAFETY: raw-call: passed on from our caller.
    record::over_exec(|| sys::in_c(unsafe { sys::call(libc::SYS_execveat, args) }) as c_int)
}

/// As in the C library, whose own exec is not ours.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    args: Strings,
    env: Strings,
) -> c_int {
    // SAFETY: c-library: passed on from our caller.
    unsafe { environment::of(program::see(path), env, |env| next_spawn()(pid, path, actions, attributes, args, env)) }
}

/// As in the C library.
///
/// # Safety
/// As C has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawnp(
    pid: *mut libc::pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    args: Strings,
    env: Strings,
) -> c_int {
    // SAFETY: c-library: passed on from our caller.
    unsafe {
        let spawn = |env| next_spawnp()(pid, file, actions, attributes, args, env);
        environment::of(program::see_in_path(file), env, spawn)
    }
}

/// What a variadic exec was told lies in a row: the strings, null, and for `execle` the environment.
unsafe extern "C" fn execl_of(path: *const c_char, args: Strings) -> c_int {
    // SAFETY: c-library: `in_a_row` passes what the program passed.
    unsafe { execv(path, args) }
}

unsafe extern "C" fn execlp_of(file: *const c_char, args: Strings) -> c_int {
    // SAFETY: c-library: as above.
    unsafe { execvp(file, args) }
}

unsafe extern "C" fn execle_of(path: *const c_char, args: Strings) -> c_int {
    let mut count = 0;
    // SAFETY: c-library: as above; the strings end with null, and the environment follows.
    unsafe {
        while !(*args.add(count)).is_null() {
            count += 1;
        }
        execve(path, args, (*args.add(count + 1)).cast())
    }
}

/// A variadic function: lays its arguments, of which five come in registers, in a row on the stack, and calls `$to` with
/// the first argument and that row.
macro_rules! in_a_row {
    ($($name:ident, $to:ident;)*) => {
        $(
            /// As in the C library.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $name() -> c_int {
                // Who unwinds through a naked function finds no more than is said here.
                naked_asm!(
                    ".cfi_startproc",
                    "pop rax",
                    ".cfi_adjust_cfa_offset -8",
                    ".cfi_register rip, rax",
                    "push r9",
                    ".cfi_adjust_cfa_offset 8",
                    "push r8",
                    ".cfi_adjust_cfa_offset 8",
                    "push rcx",
                    ".cfi_adjust_cfa_offset 8",
                    "push rdx",
                    ".cfi_adjust_cfa_offset 8",
                    "push rsi",
                    ".cfi_adjust_cfa_offset 8",
                    "mov rsi, rsp",
                    "push rax",
                    ".cfi_adjust_cfa_offset 8",
                    ".cfi_rel_offset rip, 0",
                    "call {to}",
                    "pop rcx",
                    ".cfi_adjust_cfa_offset -8",
                    ".cfi_register rip, rcx",
                    "add rsp, 40",
                    ".cfi_adjust_cfa_offset -40",
                    "push rcx",
                    ".cfi_adjust_cfa_offset 8",
                    ".cfi_rel_offset rip, 0",
                    "ret",
                    ".cfi_endproc",
                    to = sym $to,
                )
            }
        )*
    };
}

in_a_row! {
    execl, execl_of;
    execlp, execlp_of;
    execle, execle_of;
}

fn libc_environ() -> Strings {
    unsafe extern "C" {
        static environ: Strings;
    }
    // SAFETY: c-library: the C library's variable; a program that changes it meanwhile is at fault with or without us.
    unsafe { environ }
}
