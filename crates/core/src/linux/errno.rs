//! Error numbers as a type.

use linux_raw_sys::errno as raw;

/// An error number of the kernel's. Making one cannot panic, so it can be made in a trap.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(u16);

macro_rules! names {
    ($($name:ident = $number:ident,)*) => {
        impl Errno {
            $(#[doc = stringify!($number)] pub const $name: Errno = Errno(raw::$number as u16);)*

            const fn name(self) -> Option<&'static str> {
                match self {
                    $(Errno::$name => Some(stringify!($number)),)*
                    _ => None,
                }
            }
        }
    };
}
names! {
    ACCESS = EACCES, AGAIN = EAGAIN, BADF = EBADF, BUSY = EBUSY, EXIST = EEXIST, FAULT = EFAULT, INTR = EINTR,
    INVAL = EINVAL, IO = EIO, NODEV = ENODEV, NOENT = ENOENT, NOMEM = ENOMEM, NOSYS = ENOSYS, NOTTY = ENOTTY,
    NXIO = ENXIO, PERM = EPERM, PROTO = EPROTO, ROFS = EROFS, SRCH = ESRCH, TIMEDOUT = ETIMEDOUT,
    // What a pager may fail with.
    CONNREFUSED = ECONNREFUSED, CONNRESET = ECONNRESET, DQUOT = EDQUOT, FBIG = EFBIG, HOSTUNREACH = EHOSTUNREACH, ISDIR = EISDIR,
    NODATA = ENODATA, NOSPC = ENOSPC, OPNOTSUPP = EOPNOTSUPP, PIPE = EPIPE, REMOTEIO = EREMOTEIO, STALE = ESTALE,
}

impl Errno {
    /// The error of this number.
    pub const fn from_raw_os_error(number: i32) -> Errno {
        Errno(number as u16)
    }
    /// Its number.
    pub const fn raw_os_error(self) -> i32 {
        self.0 as i32
    }
}

impl core::fmt::Debug for Errno {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}

impl core::fmt::Display for Errno {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Debug::fmt(self, f)
    }
}
