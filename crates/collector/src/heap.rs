//! The collector's heap, watched by a tracker: which pages were written since the last look.

use std::ops::Range;

use selfpage::dirty::{Dirty, DirtyTracker, Wordless};

use crate::library::Library;

const PAGE_BYTES: usize = 4096;
/// The collector's table has a bit for a page, and begins anew with its first one behind its last: at most 2^21 of them, in all releases
/// (`PHT_HASH`, `LOG_PHT_ENTRIES`). So many pages in a row are all of it.
const TABLE_BYTES: usize = PAGE_BYTES << 22;
/// The most that is scanned at once: the room for what is found grows with it.
const PIECE_BYTES: usize = 64 << 30;

/// A range of memory that holds part of the heap, or other memory of the program that lies between such parts.
struct Part {
    range: Range<usize>,
    watch: Watch,
}

/// What is known of the writes to a part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Watch {
    /// It was armed after the last look: until now every page of it counts as written.
    Begun,
    /// It was armed at the last look.
    Armed,
    /// It cannot be armed, and counts as written at every look.
    Refused,
}

/// The heap.
pub struct Heap {
    library: Library,
    tracker: DirtyTracker,
    parts: Vec<Part>,
    /// The size of the heap for which `parts` was made. A heap never moves and never shrinks.
    len_bytes: usize,
    /// The process that armed the parts.
    process: u32,
    found: Dirty,
}

impl Heap {
    pub fn new(library: Library, tracker: DirtyTracker) -> Heap {
        let process = std::process::id();
        // Reservations lie between the parts, and nothing is reachable from where no page is.
        let tracker = tracker.passing_holes();
        Heap { library, tracker, parts: Vec::new(), len_bytes: 0, process, found: Dirty::new() }
    }

    /// Arms what the heap has grown by. A mapping that came in place of an armed one is the tracker's to know.
    ///
    /// # Context
    /// The collector's lock is held, so the heap stays as it is, and all threads still run: memory may be allocated.
    pub fn follow(&mut self) {
        let process = std::process::id();
        if process != self.process {
            // A forked child has a tracker that opens its descriptors at the next call: not with all threads stopped.
            (self.process, self.len_bytes) = (process, 0);
            self.parts.clear();
        }
        // SAFETY: collector-call: both only read a word.
        let len_bytes = unsafe { (self.library.heap_bytes)() + (self.library.unmapped_bytes)() };
        if len_bytes == self.len_bytes {
            return;
        }
        // SAFETY: collector-library: words of the library's, which change under the collector's lock only.
        let bounds = unsafe { *self.library.heap_least..*self.library.heap_greatest };
        let mappings = mappings(&bounds);
        if mappings.is_empty() {
            // They could not be read, or the bounds are not where this collector has them: any page may be written, until that changes.
            self.parts = vec![Part { range: 0..TABLE_BYTES, watch: Watch::Refused }];
            return;
        }
        self.join();
        for new in mappings.iter().flat_map(|mapping| without(mapping, &self.parts)).collect::<Vec<_>>() {
            let part = self.arm(new);
            self.parts.push(part);
        }
        self.parts.sort_by_key(|part| part.range.start);
        self.len_bytes = len_bytes;
        let longest = self.parts.iter().map(|part| part.range.len()).max().unwrap_or(0);
        self.found = Dirty::with_room(longest.min(PIECE_BYTES));
    }

    /// Armed parts that touch become one. What could not be armed is forgotten, to be tried again.
    fn join(&mut self) {
        self.parts.retain(|part| part.watch != Watch::Refused);
        self.parts.dedup_by(|next, part| {
            let touch = part.range.end == next.range.start && part.watch == next.watch;
            if touch {
                part.range.end = next.range.end;
            }
            touch
        });
    }

    fn arm(&self, range: Range<usize>) -> Part {
        // SAFETY: collector-heap: memory of the collector's or of the program's, and none of it is protected by us.
        let armed = unsafe { self.tracker.arm(range.clone()) };
        Part { range, watch: if armed.is_ok() { Watch::Begun } else { Watch::Refused } }
    }

    /// Tells the collector each page that was written since the last call, and begins anew.
    ///
    /// # Context
    /// All threads that know of the heap are stopped, wherever they were: nothing is allocated.
    pub fn tell(&mut self) {
        let library = self.library;
        let tell = |range: Range<usize>| {
            for page in range.take(TABLE_BYTES).step_by(PAGE_BYTES) {
                // SAFETY: collector-call: sets a bit in a table of the collector's; the address is only a number.
                unsafe { (library.mark_dirty)(page as *const _) };
            }
        };
        for part in &mut self.parts {
            let mut rearm = |piece| {
                rearm(&self.tracker, part.watch, &piece, &mut self.found) && {
                    self.found.ranges().for_each(tell);
                    true
                }
            };
            if part.watch != Watch::Refused && pieces(&part.range).all(&mut rearm) {
                part.watch = Watch::Armed;
            } else {
                tell(part.range.clone());
                part.watch = Watch::Refused;
            }
        }
    }
}

/// Finds what was written, and makes it clean again. False where that is not to be known: what is not the collector's may have gone.
fn rearm(tracker: &DirtyTracker, watch: Watch, range: &Range<usize>, found: &mut Dirty) -> bool {
    // What is not armed is found as a whole. It was armed until now, so that it is known to be possible.
    let is_as_it_was = |tracker: &Wordless<'_>| watch == Watch::Armed || tracker.disarm(range);
    tracker.wordless().filter(is_as_it_was).is_some_and(|tracker| tracker.scan_and_rearm(range, found))
}

fn pieces(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.clone().step_by(PIECE_BYTES).map(move |start| start..end.min(start.saturating_add(PIECE_BYTES)))
}

/// The private anonymous mappings, as far as they lie within `bounds`. Those of the heap are among them. Rights do not matter: some
/// releases take them from free parts, and give them back when a part is used again.
fn mappings(bounds: &Range<usize>) -> Vec<Range<usize>> {
    // That of `/proc/self` is empty where the first thread has ended.
    let maps = selfpage::task::text("/proc/thread-self/maps".as_ref()).unwrap_or_default();
    let parsed = maps.lines().filter_map(anonymous);
    let clipped = parsed.map(|range| range.start.max(bounds.start)..range.end.min(bounds.end));
    let whole = clipped.map(|range| range.start / PAGE_BYTES * PAGE_BYTES..range.end.next_multiple_of(PAGE_BYTES));
    whole.filter(|range| !range.is_empty()).collect()
}

/// What of `mapping` lies in none of `parts`, which are in order.
fn without(mapping: &Range<usize>, parts: &[Part]) -> Vec<Range<usize>> {
    let mut left = Vec::new();
    let mut start = mapping.start;
    for part in parts.iter().filter(|part| part.range.start < mapping.end && part.range.end > mapping.start) {
        left.push(start..part.range.start);
        start = part.range.end;
    }
    left.push(start..mapping.end);
    left.retain(|range| range.start < range.end);
    left
}

/// `start-end rw-p offset device inode name`, where there is no file.
fn anonymous(line: &str) -> Option<Range<usize>> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?;
    let inode = words.nth(2)?;
    let is_other = words.next().is_some_and(|name| name.starts_with("[stack") || name.starts_with("[v"));
    if !rights.ends_with('p') || inode != "0" || is_other {
        return None;
    }
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use selfpage::dirty::Mechanism;

    use super::*;
    use crate::child::without_first_thread;
    use crate::skip::skip;

    /// A heap of `heap_bytes` within `bounds`, which tells `told`. None, and said so, where there is no collector or no tracker.
    fn heap(
        bounds: &'static [usize; 2],
        heap_bytes: unsafe extern "C" fn() -> usize,
        told: unsafe extern "C" fn(*const c_void),
    ) -> Option<Heap> {
        extern "C" fn none() -> usize {
            0
        }
        let library = Library::load().inspect_err(|why| skip("libgc", &why.to_string())).ok()?;
        let tracker = DirtyTracker::with(Mechanism::WriteProtection);
        let tracker = tracker.inspect_err(|why| skip("uffd", &why.to_string())).ok()?;
        let [heap_least, heap_greatest] = bounds;
        let unmapped_bytes = none;
        let words = Library { heap_least, heap_greatest, ..library };
        Some(Heap::new(Library { heap_bytes, unmapped_bytes, mark_dirty: told, ..words }, tracker))
    }

    /// Fresh memory at an address of the kernel's choice.
    fn map(len_bytes: usize, access: i32) -> usize {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, access, flags, -1, 0) };
        assert_ne!(mapped, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        mapped.addr()
    }

    fn open(start: usize, len_bytes: usize) {
        // SAFETY: the test's own mapping.
        let opened = unsafe { libc::mprotect(start as *mut _, len_bytes, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(opened, 0);
    }

    fn write(page: usize) {
        // SAFETY: mapped and open, and nobody has a reference to it.
        unsafe { (page as *mut u8).write_volatile(1) }
    }

    fn page_tables_kib() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
        line.split_ascii_whitespace().next().unwrap().parse().unwrap()
    }

    #[test]
    fn a_reservation_between_two_parts_costs_nothing_and_no_write_to_it_is_missed() {
        static TOLD: Mutex<Vec<usize>> = Mutex::new(Vec::new());
        static HEAP_BYTES: AtomicUsize = AtomicUsize::new(1 << 20);
        extern "C" fn heap_bytes() -> usize {
            HEAP_BYTES.load(Ordering::Relaxed)
        }
        extern "C" fn told(page: *const c_void) {
            let mut told = TOLD.lock().unwrap();
            // To be shown where they are not as expected.
            if told.len() < 100 {
                told.push(page.addr());
            }
        }
        // More than is scanned at once. Its end is opened at first, and what is in front of that later, as a released part of the heap is.
        let len_bytes = PIECE_BYTES + (8 << 30);
        let start = map(len_bytes, libc::PROT_NONE);
        let end = start + len_bytes;
        let parts = [start..start + (1 << 20), end - (1 << 20)..end];
        parts.iter().for_each(|part| open(part.start, part.len()));
        let bounds = Box::leak(Box::new([start, end]));
        let Some(mut heap) = heap(bounds, heap_bytes, told) else { return };
        let mut tell = || {
            TOLD.lock().unwrap().clear();
            heap.follow();
            heap.tell();
            TOLD.lock().unwrap().clone()
        };
        let (first, last, between) = (parts[0].start, parts[1].end - PAGE_BYTES, start + PIECE_BYTES + (1 << 30));
        [first, last].into_iter().for_each(write);
        let before = page_tables_kib();
        assert_eq!(tell(), [first, last], "what is there when it is seen first");
        assert_eq!(tell(), [0; 0]);
        write(last);
        write(first + PAGE_BYTES);
        assert_eq!(tell(), [first + PAGE_BYTES, last]);
        open(between, 1 << 20);
        write(between);
        assert_eq!(tell(), [between], "opened without a word, and new");
        // SAFETY: the test's own mapping.
        unsafe { libc::madvise(first as *mut _, PAGE_BYTES, libc::MADV_DONTNEED) };
        assert_eq!(tell(), [0; 0], "a page that is gone refers to nothing");
        write(first);
        HEAP_BYTES.fetch_add(1, Ordering::Relaxed);
        write(between);
        assert_eq!(tell(), [first, between], "the mappings are looked at again");
        assert_eq!(tell(), [0; 0]);
        let tables = page_tables_kib() - before;
        assert!(tables < 1 << 10, "{tables} KiB of page tables");
    }

    #[test]
    fn a_heap_without_bounds_is_told_as_a_whole() {
        static UNTOUCHED: [usize; 2] = [usize::MAX, 0];
        static TOLD: AtomicUsize = AtomicUsize::new(0);
        extern "C" fn some() -> usize {
            1 << 20
        }
        extern "C" fn told(_: *const c_void) {
            TOLD.fetch_add(1, Ordering::Relaxed);
        }
        let Some(mut heap) = heap(&UNTOUCHED, some, told) else { return };
        for _ in 0..2 {
            TOLD.store(0, Ordering::Relaxed);
            heap.follow();
            heap.tell();
            assert_eq!(TOLD.load(Ordering::Relaxed), TABLE_BYTES / PAGE_BYTES);
        }
    }

    #[test]
    fn mappings_are_found_where_the_first_thread_has_ended() {
        let ended = without_first_thread(|| !mappings(&(0..usize::MAX)).is_empty());
        assert_eq!(ended, 0, "how the child ended");
    }

    #[test]
    fn mappings_are_found_beside_a_file_whose_name_is_no_text() {
        use std::os::unix::ffi::OsStrExt;
        let name = [b"selfpage-\xe9-", std::process::id().to_string().as_bytes()].concat();
        let path = std::env::temp_dir().join(std::ffi::OsStr::from_bytes(&name));
        std::fs::write(&path, [0; PAGE_BYTES]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        // SAFETY: a new mapping.
        let mapped = unsafe {
            let file = std::os::fd::AsRawFd::as_raw_fd(&file);
            libc::mmap(std::ptr::null_mut(), PAGE_BYTES, libc::PROT_READ, libc::MAP_PRIVATE, file, 0)
        };
        assert_ne!(mapped, libc::MAP_FAILED);
        let found = mappings(&(0..usize::MAX));
        // SAFETY: the test's own mapping.
        unsafe { libc::munmap(mapped, PAGE_BYTES) };
        std::fs::remove_file(path).unwrap();
        assert!(!found.is_empty());
    }

    #[test]
    fn a_heap_is_private_memory_without_a_file() {
        let found = anonymous("7f1200000000-7f1200040000 rw-p 00000000 00:00 0 ");
        assert_eq!(found, Some(0x7f12_0000_0000..0x7f12_0004_0000));
        assert!(anonymous("7f1200000000-7f1200040000 rwxp 00000000 00:00 0 [anon:heap]").is_some());
        assert!(anonymous("7f1200000000-7f1200040000 ---p 00000000 00:00 0 ").is_some());
        assert!(anonymous("55e0c0000000-55e0c0021000 rw-p 00000000 00:00 0          [heap]").is_some());
        for other in [
            "7f1200000000-7f1200040000 rw-s 00000000 00:01 7 /dev/zero (deleted)",
            "7f1200000000-7f1200040000 rw-p 00021000 fe:00 1234 /usr/lib/libc.so.6",
            "7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]",
            "7ffc000f7000-7ffc000f9000 r-xp 00000000 00:00 0 [vdso]",
            "",
        ] {
            assert_eq!(anonymous(other), None, "{other}");
        }
    }

    #[test]
    fn a_heap_that_grew_is_armed_where_it_is_new() {
        let part = |range| Part { range, watch: Watch::Armed };
        let parts = [part(2..4), part(4..5), part(7..9)];
        assert_eq!(without(&(0..10), &parts), [0..2, 5..7, 9..10]);
        assert_eq!(without(&(3..8), &parts), vec![5..7]);
        assert!(without(&(2..5), &parts).is_empty());
        assert_eq!(without(&(9..13), &parts[..1]), vec![9..13]);
    }

    #[test]
    fn mappings_are_clipped_to_the_bounds() {
        let memory = vec![1u8; 1 << 20];
        let inside = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES);
        let bounds = inside..inside + 8 * PAGE_BYTES;
        assert_eq!(mappings(&bounds), [bounds]);
    }
}
