//! Faults on protected memory that the program answers itself: by a handler of a signal, or by libsigsegv.

use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::sync::OnceLock;
use std::{io, ptr};

use super::{Mapping, PAGE_BYTES, check};

/// Answers the fault at an address. `false`: it could not, and the process ends.
pub type Answer = fn(addr: usize) -> bool;

static ANSWER: OnceLock<Answer> = OnceLock::new();

fn answer(addr: usize) -> bool {
    ANSWER.get().is_some_and(|answer| answer(addr))
}

impl Mapping {
    /// Lets pages be read only, or written too; writes that are not allowed are the handler's.
    pub fn protect_pages(&self, pages: Range<usize>, protection: selfpage::Protection) -> io::Result<()> {
        assert!(pages.start <= pages.end && pages.end <= self.len_bytes / PAGE_BYTES);
        let prot = match protection {
            selfpage::Protection::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
            selfpage::Protection::Read => libc::PROT_READ,
            selfpage::Protection::None => libc::PROT_NONE,
        };
        let start = self.base.wrapping_add(pages.start * PAGE_BYTES);
        // SAFETY: own-mapping: within it by the assertion, and writes to it are answered.
        check(unsafe { libc::mprotect(start.cast(), pages.len() * PAGE_BYTES, prot) })
    }
}

/// Has `answer` answer every fault of this process that is a `signal`, by a handler of it.
pub fn by_signal(signal: c_int, answer: Answer) -> io::Result<()> {
    assert!(ANSWER.set(answer).is_ok(), "faults are answered already");
    // SAFETY: plain-old-data: all zeros is a valid sigaction (an empty mask).
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: signal-safe: the handler makes an answer's atomic accesses and calls of the kernel, and no more.
    check(unsafe { libc::sigaction(signal, &action, ptr::null_mut()) })
}

extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: signal-safe: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let addr = unsafe { (*info).si_addr() } as usize;
    if !answer(addr) {
        // SAFETY: signal-safe: signal(2); the access is tried again and ends the process.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

type OnArea = extern "C" fn(addr: *mut c_void, argument: *mut c_void) -> c_int;
type OnFault = extern "C" fn(addr: *mut c_void, serious: c_int) -> c_int;
type Init = unsafe extern "C" fn(dispatcher: *mut *mut c_void);
type Register = unsafe extern "C" fn(*mut *mut c_void, *mut c_void, usize, OnArea, *mut c_void) -> *mut c_void;
type Install = unsafe extern "C" fn(OnFault) -> c_int;
type Dispatch = unsafe extern "C" fn(*mut *mut c_void, *mut c_void) -> c_int;

/// libsigsegv, as far as it is used here.
struct Library {
    init: Init,
    register: Register,
    install: Install,
    dispatch: Dispatch,
}

struct Dispatcher {
    library: Library,
    /// The library's tree of areas.
    areas: *mut *mut c_void,
}

// SAFETY: sigsegv-library: addresses of functions that may be called on any thread, and of a tree that stays as it is.
unsafe impl Send for Dispatcher {}
// SAFETY: sigsegv-library: as above.
unsafe impl Sync for Dispatcher {}

static DISPATCHER: OnceLock<Dispatcher> = OnceLock::new();

impl Library {
    fn load() -> Option<Library> {
        // SAFETY: sigsegv-library: nothing happens when it is loaded.
        let handle = unsafe { libc::dlopen(c"libsigsegv.so.2".as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            return None;
        }
        let find = |name: &CStr| {
            // SAFETY: sigsegv-library, c-string: looks a name up.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
            (!address.is_null()).then_some(address)
        };
        let (init, register) = (find(c"sigsegv_init")?, find(c"sigsegv_register")?);
        let (install, dispatch) = (find(c"sigsegv_install_handler")?, find(c"sigsegv_dispatch")?);
        // SAFETY: sigsegv-library: what has these names has these types.
        unsafe {
            Some(Library {
                init: std::mem::transmute::<*mut c_void, Init>(init),
                register: std::mem::transmute::<*mut c_void, Register>(register),
                install: std::mem::transmute::<*mut c_void, Install>(install),
                dispatch: std::mem::transmute::<*mut c_void, Dispatch>(dispatch),
            })
        }
    }
}

/// Has `answer` answer the faults on `mapping` by libsigsegv. `false`: it is not installed.
pub fn by_library(mapping: &Mapping, answer: Answer) -> io::Result<bool> {
    let Some(library) = Library::load() else { return Ok(false) };
    assert!(ANSWER.set(answer).is_ok(), "faults are answered already");
    let areas = Box::into_raw(Box::new(ptr::null_mut()));
    // SAFETY: sigsegv-library: a dispatcher is one pointer, which stays where it is; the area is mapped.
    unsafe {
        (library.init)(areas);
        (library.register)(areas, mapping.base.cast(), mapping.len_bytes, on_area, ptr::null_mut());
    }
    let Dispatcher { library, .. } = DISPATCHER.get_or_init(|| Dispatcher { library, areas });
    // SAFETY: sigsegv-library, signal-safe: the handler looks the area up and answers.
    match unsafe { (library.install)(on_fault) } {
        0 => Ok(true),
        _ => Err(io::Error::other("libsigsegv does not install its handler")),
    }
}

extern "C" fn on_fault(addr: *mut c_void, _: c_int) -> c_int {
    // SAFETY: sigsegv-library: filled in before the handler was installed.
    DISPATCHER.get().map_or(0, |found| unsafe { (found.library.dispatch)(found.areas, addr) })
}

extern "C" fn on_area(addr: *mut c_void, _: *mut c_void) -> c_int {
    c_int::from(answer(addr as usize))
}
