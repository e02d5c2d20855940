//! A system call that fails, as a container's filter or an older kernel has it fail. Include it where tests need it:
//! `#[path = "../../../tests/filter.rs"] mod filter;`, then `Call::any(libc::SYS_userfaultfd).fails(libc::EPERM)`.

use std::io;

/// A system call by its number, and by what the lower half of one of its arguments is.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    number: libc::c_long,
    /// Counted from 0.
    argument: u32,
    least: u32,
    most: u32,
}

#[allow(dead_code)]
impl Call {
    pub const fn any(number: libc::c_long) -> Self {
        Self::up_to(number, 0, u32::MAX)
    }

    pub const fn with(number: libc::c_long, argument: u32, value: u32) -> Self {
        Self { number, argument, least: value, most: value }
    }

    pub const fn up_to(number: libc::c_long, argument: u32, most: u32) -> Self {
        Self { number, argument, least: 0, most }
    }

    /// Has it fail on this thread, and on those that it starts, from now on. For `pre_exec` too.
    pub fn fails(self, errno: i32) -> io::Result<()> {
        self.filter(libc::SECCOMP_RET_ERRNO | errno as u32, 0)
    }

    /// Has it fail on every thread from now on.
    pub fn fails_everywhere(self, errno: i32) -> io::Result<()> {
        self.filter(libc::SECCOMP_RET_ERRNO | errno as u32, libc::SECCOMP_FILTER_FLAG_TSYNC)
    }

    /// Has it end the thread that makes it, and no other: this one, and those that it starts, from now on.
    pub fn ends_its_thread(self) -> io::Result<()> {
        self.filter(libc::SECCOMP_RET_KILL_THREAD, 0)
    }

    fn filter(self, answer: u32, flags: libc::c_ulong) -> io::Result<()> {
        let line = |code: u32, k, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
        let load = |at| line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0, 0);
        let jump = |how, to, jt, jf| line(libc::BPF_JMP | how | libc::BPF_K, to, jt, jf);
        let end = |what| line(libc::BPF_RET | libc::BPF_K, what, 0, 0);
        let mut lines = [
            // The kernel's `struct seccomp_data`: number, architecture, instruction, arguments.
            load(0),
            jump(libc::BPF_JEQ, self.number as u32, 0, 4),
            load(16 + 8 * self.argument),
            jump(libc::BPF_JGE, self.least, 0, 2),
            jump(libc::BPF_JGT, self.most, 1, 0),
            end(answer),
            end(libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: lines.len() as u16, filter: lines.as_mut_ptr() };
        // SAFETY: test: the kernel copies the program.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) == 0
        };
        if done { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
