//! What this process's domain counted, appended to the file that `run` reads if its user asked for it: one line of JSON, written when the
//! process ends or becomes another program. A process that is killed leaves none. One that filters its system calls writes it before, and later
//! counts get into it as into memory. A call that failed takes the last line of its process back by one that says `goes_on`; and a program
//! that was executed and cannot be entered has a line that says why not.

mod mapped;

use std::ffi::{CString, c_int};
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;
use std::str::Utf8Chunk;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use selfpage_core::linux::{futex, thread};

use crate::limits::RECORDS_BYTES;
use crate::lock::Lock;
use crate::managed;
use crate::sys::{self, Quiet, call};
use crate::{filters, heap, maps, pagers, rights};

/// Where to write.
static FILE: OnceLock<Records> = OnceLock::new();

/// Whether what processes counted goes there, too. Else nobody reads it, and the file would grow for as long as they come and go.
static COUNTS_ARE_ASKED: AtomicBool = AtomicBool::new(false);

/// The file that `run` reads. It may have ended, and another process have its number: then another file has this name.
struct Records {
    path: CString,
    /// The PID namespace of `run`.
    namespace: u64,
    device: u64,
    inode: u64,
}

impl Records {
    /// From `NAMESPACE:DEVICE:INODE:PATH`.
    fn read(said: &str) -> Option<Records> {
        let mut parts = said.splitn(4, ':');
        let mut number = || parts.next()?.parse().ok();
        let (namespace, device, inode) = (number()?, number()?, number()?);
        Some(Records { namespace, device, inode, path: CString::new(parts.next()?).ok()? })
    }

    /// Opens it: its number, or an error.
    fn open(&self) -> isize {
        // SAFETY: raw-call: the name ends with NUL.
        unsafe { call(libc::SYS_open, [self.path.as_ptr() as usize, FLAGS, 0, 0, 0, 0]) }
    }

    /// Has pager threads open it, if they have not: their descriptors are their own.
    fn open_by_pagers(&self) {
        if KEPT.load(Ordering::SeqCst) >= 0 {
            return;
        }
        FILTERED.store(filters::mode(), Ordering::SeqCst);
        let opened = pagers::one_makes(libc::SYS_open, [self.path.as_ptr() as usize, FLAGS, 0, 0, 0]);
        if let Some(file) = opened {
            KEPT.store(file as i32, Ordering::SeqCst);
        }
    }

    /// Whether `run` lives, or may, and this process does not see its part of /proc.
    fn is_hidden(&self, said: &str) -> bool {
        let is_shared = std::fs::metadata("/proc/self/ns/pid").map_or(true, |own| own.ino() == self.namespace);
        if is_shared {
            // SAFETY: raw-call: no memory is passed, and no signal sent.
            let asked = number_of_run(said).map(|run| unsafe { call(libc::SYS_kill, [run as usize, 0, 0, 0, 0, 0]) });
            return asked.is_some_and(|result| result != -libc::ESRCH as isize);
        }
        // By another number /proc is an outer namespace's, and shows who lives.
        std::fs::read_link("/proc/self").is_ok_and(|own| own.as_os_str() == sys::pid().to_string().as_str())
    }

    /// Whether an open file is this one, and may become so much longer: beyond the program's limit would be a signal. `run` finds by its length
    /// that it was full.
    fn takes(&self, about: &libc::stat, len: usize) -> bool {
        // SAFETY: raw-call: the kernel fills a structure of its own.
        unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            call(libc::SYS_prlimit64, [0, libc::RLIMIT_FSIZE as usize, 0, &raw mut limit as usize, 0, 0]) >= 0
                && (about.st_dev, about.st_ino) == (self.device, self.inode)
                && (about.st_size as u64) < RECORDS_BYTES
                && (about.st_size as u64).saturating_add(len as u64) <= limit.rlim_cur
        }
    }
}

fn close(file: usize) {
    // SAFETY: raw-call: our own descriptor.
    unsafe { call(libc::SYS_close, [file, 0, 0, 0, 0, 0]) };
}

/// The number of `run`'s process, by `NAMESPACE:DEVICE:INODE:/proc/NUMBER/…`.
pub fn number_of_run(said: &str) -> Option<u32> {
    said.split_once(":/proc/")?.1.split('/').next()?.parse().ok()
}

const FLAGS: usize = (libc::O_RDWR | libc::O_APPEND | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY) as usize;

/// The file's number in the pager threads' table, or -1.
static KEPT: AtomicI32 = AtomicI32::new(-1);
/// How system calls were filtered when it was opened. A filter that came since may end the process for what no program does itself.
static FILTERED: AtomicI32 = AtomicI32::new(0);
/// What a pager thread reads and fills: the stack may be managed memory.
// SAFETY: zeroed-valid: plain numbers.
static PASSED: Lock<Passed> = Lock::new(unsafe { std::mem::zeroed() });

struct Passed {
    about: libc::stat,
    bytes: [u8; LINE_BYTES],
}

const LINE_BYTES: usize = 2048;
/// So much of it a name takes at most.
const QUOTED_BYTES: usize = 1024;

/// The process that is to write, with [`WRITING`] while a thread of it does; 0: it has.
static WRITER: AtomicU32 = AtomicU32::new(0);
/// No process has a number so high.
const WRITING: u32 = 1 << 31;
/// How long a thread that ends the process waits for another one that writes. The thread it waits for may wait for it.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_US: u32 = 100_000;

/// Has a record written to what is named as `NAMESPACE:DEVICE:INODE:PATH`.
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

/// The user wants to see what processes counted, and hears it here where the file is out of this process's reach.
pub fn ask_for_counts(said: &str) {
    COUNTS_ARE_ASKED.store(true, Ordering::SeqCst);
    let Some(records) = FILE.get() else { return };
    let file = records.open();
    if file >= 0 {
        return close(file as usize);
    }
    let why = match -file as i32 {
        libc::EACCES | libc::EPERM => format!("it has no right to open {:?}", records.path),
        libc::ENOENT if records.is_hidden(said) => {
            format!("{:?} is not in its /proc; start `selfpage run` where that one is mounted", records.path)
        }
        // Where there is none any more nobody waits for it.
        _ => return,
    };
    sys::say(&format!("selfpage: not in the statistics, because {why}\n"));
}

fn counts_are_asked() -> bool {
    COUNTS_ARE_ASKED.load(Ordering::SeqCst)
}

/// A forked child will write, and has pager threads of its own.
pub fn settle_in_child() {
    KEPT.store(-1, Ordering::SeqCst);
    COUNT_ON_IT.store(0, Ordering::SeqCst);
    mapped::settle_in_child();
    if !filters::are_set() {
        begin();
    }
}

/// Whether this process has yet to write. Once it has, nothing is asked of the kernel: a filter of system calls may forbid it.
fn will_write() -> bool {
    let writer = WRITER.load(Ordering::SeqCst);
    // After vfork this is a child, in its parent's memory, and the record is the parent's.
    writer != 0 && writer == sys::pid()
}

/// Waits while another thread writes: it would not get to the end of it. No thread comes here as it writes, since it hears no signals.
fn await_writer() {
    let begun = Instant::now();
    let mut writer = WRITER.load(Ordering::SeqCst);
    while writer & WRITING != 0 && writer == sys::pid() | WRITING && begun.elapsed() < PATIENCE {
        let _ = futex::wait(&WRITER, writer, LOOK_US);
        writer = WRITER.load(Ordering::SeqCst);
    }
}

/// Has pager threads open the file, since the process may become a user who cannot, or lose sight of it.
pub fn keep_open() {
    if let (true, Some(records)) = (will_write(), FILE.get()) {
        records.open_by_pagers();
    }
}

/// Runs `exec`, on the record. If it returns it has failed, and this process lives on: what was written is taken back.
pub fn over_exec(exec: impl FnOnce() -> c_int) -> c_int {
    mapped::write();
    // Under a filter there is one already, which stays; but not where the filter is only about to be. A child after vfork has none.
    if filters::are_in_force() || !rights::is_own_process() {
        await_writer();
        return exec();
    }
    on_record(exec, |_| true)
}

/// Whether what a record says is to change when it has been written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lasts {
    Yes,
    No,
}

/// How many threads make a call after which no record can be written, or end the process.
static COUNT_ON_IT: AtomicU32 = AtomicU32::new(0);

/// Makes such a call, in the process that has the record: there may be another program, or what it takes to write one may be forbidden. Where
/// it has failed, and no other counts on what was written, that is taken back.
pub fn on_record<R>(call: impl FnOnce() -> R, has_failed: impl FnOnce(&R) -> bool) -> R {
    let Some(file) = FILE.get() else { return call() };
    // Before it looks whether it is written: who takes it back looks in the other order.
    COUNT_ON_IT.fetch_add(1, Ordering::SeqCst);
    write_if_due(Lasts::Yes);
    let result = call();
    if !has_failed(&result) || filters::are_set() {
        counts_no_more();
    } else {
        take_back(file);
    }
    result
}

/// Whether it was the last one that did.
fn counts_no_more() -> bool {
    // In a child that a handler of a signal has forked in the call nobody does.
    let counted =
        COUNT_ON_IT.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1)).unwrap_or(0);
    counted == 1
}

/// Takes back what was written for a call that has failed, unless other threads count on it: the last of these does so.
fn take_back(file: &Records) {
    // A handler of a signal that ended the process here would wait for its own thread.
    let _quiet = Quiet::begin();
    let pid = sys::pid();
    while let Err(writer) = WRITER.compare_exchange(0, pid | WRITING, Ordering::SeqCst, Ordering::Relaxed) {
        // It is to be written again, as in such a child.
        if writer != pid | WRITING {
            counts_no_more();
            return;
        }
        await_writer();
    }
    // One who counts on it from now on waits until this is done.
    let is_to_go = counts_no_more() && !filters::are_set();
    if is_to_go {
        mapped::forget();
        let mut line = Line::new();
        if counts_are_asked() && writeln!(line, "{{\"pid\":{pid},\"goes_on\":true}}").is_ok() {
            line.append_to(file, Way::EachTime);
        }
    }
    WRITER.store(if is_to_go { pid } else { 0 }, Ordering::SeqCst);
    futex::wake(&WRITER, u32::MAX);
}

/// Says that a program is executed which will not be managed. A child after vfork may say so: nothing of its parent's changes.
pub fn not_managed(path: &[u8], why: &str) {
    let Some(file) = FILE.get() else { return };
    let mut line = Line::new();
    let said = line.quoted("{\"not_managed\":", path);
    if said.and_then(|()| writeln!(line, ",\"why\":\"{why}\"}}")).is_ok() {
        line.append_to(file, Way::Once);
    }
}

/// How a line gets into the file.
#[derive(Clone, Copy)]
enum Way {
    /// Once, whichever process says it.
    Once,
    EachTime,
    /// It is written anew later, by what is said of somebody.
    Lasting(Who),
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

    /// A key, and bytes as a string, up to a character that finds no room. Bytes that are no text are replaced.
    fn quoted(&mut self, key: &str, bytes: &[u8]) -> std::fmt::Result {
        write!(self, "{key}\"")?;
        let end = self.len + QUOTED_BYTES;
        let replaced = |chunk: &Utf8Chunk<'_>| (!chunk.invalid().is_empty()).then_some(char::REPLACEMENT_CHARACTER);
        for char in bytes.utf8_chunks().flat_map(|chunk| chunk.valid().chars().chain(replaced(&chunk))) {
            let before = self.len;
            match char {
                '"' | '\\' => write!(self, "\\{char}"),
                _ if char.is_control() => write!(self, "\\u{:04x}", u32::from(char)),
                _ => self.write_char(char),
            }?;
            if self.len > end {
                self.len = before;
                break;
            }
        }
        self.write_char('"')
    }

    fn append_to(&self, records: &Records, way: Way) {
        let file = records.open();
        if file < 0 {
            // A filter that nobody heard of may have refused it, and end the process for what no program does itself.
            if !filters::one_came_unheard() {
                records.open_by_pagers();
            }
            return self.append_by_pagers(records, way);
        }
        // SAFETY: zeroed-valid: plain numbers.
        let mut about = unsafe { std::mem::zeroed() };
        // SAFETY: raw-call: what is passed outlives the call.
        let make = |number, [a, b, c, d, e]: [usize; 5]| unsafe { call(number, [a, b, c, d, e, 0]) };
        self.append(records, file as usize, (&mut about, &self.bytes), make, way);
        close(file as usize);
    }

    /// The same where the process became another user, has another root or has limited itself, and cannot open the file: pager threads have had
    /// it open since, or may open it still. So they may where the process has no descriptor left.
    fn append_by_pagers(&self, records: &Records, way: Way) {
        if filters::mode() != FILTERED.load(Ordering::SeqCst) {
            return;
        }
        // Whoever has it is about to say the same.
        let (Ok(file), Some(mut passed)) = (usize::try_from(KEPT.load(Ordering::SeqCst)), PASSED.try_take()) else {
            return;
        };
        let make = |number, args| pagers::one_makes(number, args).unwrap_or(-1);
        passed.bytes = self.bytes;
        let Passed { about, bytes } = &mut *passed;
        self.append(records, file, (about, bytes), make, way);
    }

    fn append(
        &self,
        records: &Records,
        file: usize,
        (about, bytes): (&mut libc::stat, &[u8; LINE_BYTES]),
        make: impl Fn(i64, [usize; 5]) -> isize,
        way: Way,
    ) {
        let is_known = make(libc::SYS_fstat, [file, std::ptr::from_mut(about) as usize, 0, 0, 0]) >= 0;
        if !is_known || !records.takes(about, self.len) {
            return;
        }
        if matches!(way, Way::Once) && self.is_in(file, about.st_size as usize, &make) {
            return;
        }
        let written = make(libc::SYS_write, [file, bytes.as_ptr() as usize, self.len, 0, 0]);
        if let (Way::Lasting(who), true) = (way, written == self.len as isize) {
            mapped::map(file, self.len, make, who);
        }
    }

    /// Whether the first bytes of an open file, which nobody cuts short, have this line. Two processes at once may both find that they have not.
    fn is_in(&self, file: usize, len: usize, make: impl Fn(i64, [usize; 5]) -> isize) -> bool {
        let start = make(libc::SYS_mmap, [0, len, libc::PROT_READ as usize, libc::MAP_SHARED as usize, file]);
        if start <= 0 {
            return false;
        }
        // SAFETY: owned-range: our own mapping, of that many bytes of the file.
        let found = unsafe { libc::memmem(start as *const _, len, self.bytes.as_ptr().cast(), self.len) };
        make(libc::SYS_munmap, [start as usize, len, 0, 0, 0]);
        !found.is_null()
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
    mapped::write();
    if filters::are_in_force() {
        return;
    }
    // Where one has been written for a call that fails after this, nobody writes another. A child after vfork ends by itself.
    if rights::is_own_process() {
        COUNT_ON_IT.fetch_add(1, Ordering::SeqCst);
    }
    write_if_due(Lasts::No);
}

fn write_if_due(lasts: Lasts) {
    loop {
        if will_write() && write(lasts) {
            return;
        }
        // Whoever ends the process now would end it before the other thread has written.
        await_writer();
        // That may have taken back what it had written.
        if !will_write() {
            return;
        }
    }
}

/// Whether it was this thread that did: another one may have been first.
fn write(lasts: Lasts) -> bool {
    let pid = sys::pid();
    // A handler of a signal that ended the process here would wait for its own thread.
    let _quiet = Quiet::begin();
    if WRITER.compare_exchange(pid, pid | WRITING, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        return false;
    }
    write_line(pid, lasts);
    WRITER.store(0, Ordering::SeqCst);
    futex::wake(&WRITER, u32::MAX);
    true
}

fn write_line(pid: u32, lasts: Lasts) {
    let (Some(file), Some(managed)) = (FILE.get(), managed::get()) else { return };
    managed.domain.flush_trace();
    if !counts_are_asked() {
        return;
    }
    let (who, mut line) = (Who::calls(pid), Line::new());
    if line.describe(&who, managed).and_then(|()| line.end(if lasts == Lasts::Yes { SPARE_BYTES } else { 0 })).is_ok() {
        line.append_to(file, if lasts == Lasts::Yes { Way::Lasting(who) } else { Way::EachTime });
    }
}

/// What is to be asked of others about a process, or waited for.
#[derive(Clone, Copy)]
struct Who {
    pid: u32,
    name: [u8; 16],
    mappings_unmanaged_bytes: usize,
}

impl Who {
    fn calls(pid: u32) -> Who {
        let mut name = [0; 16];
        // Other threads may have names of their own.
        if thread::id() == pid || sys::read_small(c"/proc/self/comm", &mut name).is_empty() {
            // SAFETY: raw-call: the kernel writes at most 16 bytes, the last of them NUL.
            unsafe { call(libc::SYS_prctl, [libc::PR_GET_NAME as usize, name.as_mut_ptr() as usize, 0, 0, 0, 0]) };
        }
        Who { pid, name, mappings_unmanaged_bytes: maps::unmanaged_bytes_max() }
    }
}

/// By how much a line may become longer whose counts grow.
const SPARE_BYTES: usize = 200;

impl Line {
    /// Says what has been counted so far. Nothing is asked of the kernel.
    fn describe(&mut self, who: &Who, managed: &managed::Managed) -> std::fmt::Result {
        let stats = managed.domain.stats();
        let counts = stats.counts;
        write!(self, "{{\"pid\":{},", who.pid)?;
        self.quoted("\"program\":", who.name.split(|byte| matches!(byte, 0 | b'\n')).next().unwrap_or_default())?;
        let unmanaged = heap::unmanaged_bytes() + who.mappings_unmanaged_bytes;
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
            write!(self, ",\"{name}\":{value}")?;
        }
        for (name, nanoseconds) in [("fault_us_p50", stats.fault_ns_p50), ("fault_us_p99", stats.fault_ns_p99)] {
            write!(self, ",\"{name}\":{}.{:03}", nanoseconds / 1000, nanoseconds % 1000)?;
        }
        self.write_char('}')
    }

    /// Ends it after as many spaces.
    fn end(&mut self, spaces: usize) -> std::fmt::Result {
        writeln!(self, "{:spaces$}", "")
    }
}
