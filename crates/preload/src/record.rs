//! What this process's domain counted, appended to the file that `run` reads: one line of JSON, written when the process
//! ends or becomes another program. A process that is killed leaves none. An exec that failed takes the last line of its process back by
//! one that says `goes_on`; and a program that was executed and cannot be entered has a line that says why not.

use std::ffi::{CString, c_int};
use std::fmt::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use crate::lock::Lock;
use crate::managed;
use crate::sys::{self, Quiet, call};
use crate::{heap, maps, pagers};

/// Where to write.
static FILE: OnceLock<Records> = OnceLock::new();

/// The file that `run` reads. It may have ended, and another process have its number: then another file has this name.
struct Records {
    path: CString,
    device: u64,
    inode: u64,
}

impl Records {
    /// From `DEVICE:INODE:PATH`.
    fn read(said: &str) -> Option<Records> {
        let mut parts = said.splitn(3, ':');
        let mut number = || parts.next()?.parse().ok();
        let (device, inode) = (number()?, number()?);
        Some(Records { device, inode, path: CString::new(parts.next()?).ok()? })
    }

    /// Whether an open file is this one, and may become so much longer: beyond the program's limit would be a signal.
    fn takes(&self, about: &libc::stat, len: usize) -> bool {
        // SAFETY: raw-call: the kernel fills a structure of its own.
        unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            call(libc::SYS_prlimit64, [0, libc::RLIMIT_FSIZE as usize, 0, &raw mut limit as usize, 0, 0]) >= 0
                && (about.st_dev, about.st_ino) == (self.device, self.inode)
                && (about.st_size as u64).saturating_add(len as u64) <= limit.rlim_cur
        }
    }
}

const FLAGS: usize = (libc::O_WRONLY | libc::O_APPEND | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY) as usize;

/// The file's number in the pager threads' table, or -1.
static KEPT: AtomicI32 = AtomicI32::new(-1);
/// How system calls were filtered when it was opened. A filter that came since may end the process for what no program does itself.
static FILTERED: AtomicI32 = AtomicI32::new(0);
/// What a pager thread reads and fills: the stack may be managed memory.
// SAFETY: zeroed-valid: plain numbers.
static PASSED: Lock<Passed> = Lock::new(Passed { about: unsafe { std::mem::zeroed() }, bytes: [0; LINE_BYTES] });

struct Passed {
    about: libc::stat,
    bytes: [u8; LINE_BYTES],
}

const LINE_BYTES: usize = 2048;

/// The process that is to write; 0: it has.
static WRITER: AtomicU32 = AtomicU32::new(0);

/// Has a record written to what is named as `DEVICE:INODE:PATH`.
pub fn write_to(said: &str) {
    if let Some(records) = Records::read(said) {
        let _ = FILE.set(records);
        begin();
    }
    // SAFETY: c-library: the handler stays loaded; it runs after those that the program registers.
    unsafe {
        __cxa_at_quick_exit(at_quick_exit, std::ptr::null_mut());
    }
}

unsafe extern "C" {
    fn __cxa_at_quick_exit(handler: extern "C" fn(*mut std::ffi::c_void), library: *mut std::ffi::c_void) -> i32;
}

extern "C" fn at_quick_exit(_: *mut std::ffi::c_void) {
    end();
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = end;

/// This process will write.
pub fn begin() {
    WRITER.store(sys::pid(), Ordering::SeqCst);
}

/// A forked child will write, and has pager threads of its own.
pub fn settle_in_child() {
    KEPT.store(-1, Ordering::SeqCst);
    begin();
}

/// Has pager threads open the file, since the process may become a user who cannot.
pub fn keep_open() {
    if WRITER.load(Ordering::SeqCst) != sys::pid() || KEPT.load(Ordering::SeqCst) >= 0 {
        return;
    }
    let Some(records) = FILE.get() else { return };
    FILTERED.store(filtered(), Ordering::SeqCst);
    if let Some(file) = pagers::one_makes(libc::SYS_open, [records.path.as_ptr() as usize, FLAGS, 0, 0, 0]) {
        KEPT.store(file as i32, Ordering::SeqCst);
    }
}

/// How system calls of the calling thread are filtered, as the kernel numbers it.
fn filtered() -> i32 {
    // SAFETY: raw-call: no memory is passed.
    unsafe { call(libc::SYS_prctl, [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0]) as i32 }
}

/// Runs `exec`, on the record. If it returns it has failed, and this process lives on: what was written is taken back.
pub fn over_exec(exec: impl FnOnce() -> c_int) -> c_int {
    let pid = sys::pid();
    if WRITER.load(Ordering::SeqCst) != pid {
        // After vfork the record is our parent's, whose memory this is.
        return exec();
    }
    end();
    let result = exec();
    if let Some(file) = FILE.get() {
        let mut line = Line::new();
        if writeln!(line, "{{\"pid\":{pid},\"goes_on\":true}}").is_ok() {
            line.append_to(file);
        }
        begin();
    }
    result
}

/// Says that a program is executed which will not be managed. A child after vfork may say so: nothing of its parent's changes.
pub fn not_managed(path: &[u8], why: &str) {
    let Some(file) = FILE.get() else { return };
    let mut line = Line::new();
    let said = line.quoted("{\"not_managed\":", &path[..path.len().min(1024)]);
    if said.and_then(|()| writeln!(line, ",\"why\":\"{why}\"}}")).is_ok() {
        line.append_to(file);
    }
}

/// A line on the stack: nothing is allocated where a process ends.
struct Line {
    bytes: [u8; LINE_BYTES],
    len: usize,
}

impl Line {
    fn new() -> Line {
        Line { bytes: [0; LINE_BYTES], len: 0 }
    }

    /// A key, and bytes as a string: what would end it, or is no ASCII, is replaced.
    fn quoted(&mut self, key: &str, bytes: &[u8]) -> std::fmt::Result {
        write!(self, "{key}\"")?;
        let plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\') || byte == b' ';
        bytes.iter().try_for_each(|byte| self.write_char(if plain(*byte) { *byte as char } else { '?' }))?;
        self.write_char('"')
    }

    fn append_to(&self, records: &Records) {
        // SAFETY: raw-call: the name ends with NUL; the bytes outlive the call, and the kernel fills a structure of its own.
        unsafe {
            let file = call(libc::SYS_open, [records.path.as_ptr() as usize, FLAGS, 0, 0, 0, 0]);
            if file < 0 {
                return self.append_by_pagers(records);
            }
            let mut about: libc::stat = std::mem::zeroed();
            if call(libc::SYS_fstat, [file as usize, &raw mut about as usize, 0, 0, 0, 0]) >= 0
                && records.takes(&about, self.len)
            {
                call(libc::SYS_write, [file as usize, self.bytes.as_ptr() as usize, self.len, 0, 0, 0]);
            }
            call(libc::SYS_close, [file as usize, 0, 0, 0, 0, 0]);
        }
    }

    /// The same where the process became another user, who cannot open the file: pager threads have had it open since.
    fn append_by_pagers(&self, records: &Records) {
        if filtered() != FILTERED.load(Ordering::SeqCst) {
            return;
        }
        // Whoever has it is about to say the same.
        let (Ok(file), Some(mut passed)) = (usize::try_from(KEPT.load(Ordering::SeqCst)), PASSED.try_take()) else {
            return;
        };
        let about = &raw mut passed.about as usize;
        let is_known = pagers::one_makes(libc::SYS_fstat, [file, about, 0, 0, 0]).is_some_and(|result| result >= 0);
        if is_known && records.takes(&passed.about, self.len) {
            passed.bytes = self.bytes;
            pagers::one_makes(libc::SYS_write, [file, passed.bytes.as_ptr() as usize, self.len, 0, 0]);
        }
    }
}

impl std::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = self.bytes.get_mut(self.len..self.len + text.len()).ok_or(std::fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}

/// Writes the record, once.
pub extern "C" fn end() {
    // After vfork this is the child, in our memory: it has counted nothing.
    let writer = sys::pid();
    if WRITER.compare_exchange(writer, 0, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        return;
    }
    let (Some(file), Some(managed)) = (FILE.get(), managed::get()) else { return };
    let _quiet = Quiet::begin();
    managed.domain.flush_trace();
    let mut line = Line::new();
    if describe(&mut line, writer, managed).is_ok() {
        line.append_to(file);
    }
}

fn describe(line: &mut Line, pid: u32, managed: &managed::Managed) -> std::fmt::Result {
    let stats = managed.domain.stats();
    let counts = stats.counts;
    write!(line, "{{\"pid\":{pid},")?;
    let mut name = [0u8; 16];
    // SAFETY: raw-call: the kernel writes at most 16 bytes, the last of them NUL.
    unsafe { call(libc::SYS_prctl, [libc::PR_GET_NAME as usize, name.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    line.quoted("\"program\":", name.split(|byte| *byte == 0).next().unwrap_or_default())?;
    let unmanaged = heap::unmanaged_bytes() + maps::unmanaged_bytes_max();
    for (name, value) in [
        ("frames_bytes", stats.frames_bytes),
        ("resident_bytes_max", stats.resident_bytes_max),
        ("faults_total", counts.faults_total),
        ("fills_total", counts.fills_total),
        ("saves_total", counts.saves_total),
        ("evictions_total", counts.evictions_total),
        ("bytes_filled", counts.bytes_filled),
        ("bytes_saved", counts.bytes_saved),
        ("unmanaged_bytes_max", unmanaged as u64),
    ] {
        write!(line, ",\"{name}\":{value}")?;
    }
    for (name, nanoseconds) in [("fault_us_p50", stats.fault_ns_p50), ("fault_us_p99", stats.fault_ns_p99)] {
        write!(line, ",\"{name}\":{}.{:03}", nanoseconds / 1000, nanoseconds % 1000)?;
    }
    writeln!(line, "}}")
}
