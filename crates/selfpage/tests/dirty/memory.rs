//! Memory of each kind, a page at a time.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::swap::swapped;

pub const PAGE: usize = 4096;
pub const HUGE: usize = 2 << 20;
const REGION: &str = "region";
const ANONYMOUS: &str = "anonymous";
const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

/// Huge pages that are set aside as long as this lives, for one test at a time.
pub struct HugePages {
    count: usize,
    before: String,
    _turn: MutexGuard<'static, ()>,
}

impl HugePages {
    pub fn set_aside(count: usize) -> HugePages {
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::fs::read_to_string(HUGE_PAGES).unwrap_or_default();
        // What other tests have mapped counts, though nobody sets it aside any more.
        let all = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let number = |name: &str| {
            let line = all.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|number| number.trim().parse::<usize>().ok()).unwrap_or(0)
        };
        // What is reserved was seen below zero, with 16 CPUs, while other tests unmap theirs.
        let taken =
            number("HugePages_Total:").wrapping_add(number("HugePages_Rsvd:")).wrapping_sub(number("HugePages_Free:"));
        let _ = std::fs::write(HUGE_PAGES, (taken + count).to_string());
        HugePages { count, before, _turn }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(HUGE_PAGES, &self.before);
    }
}

/// A mapping of whole pages.
pub struct Memory {
    kind: &'static str,
    start: usize,
    len: usize,
}

impl Memory {
    /// It may be longer than what the machine has.
    pub fn anonymous(pages: usize) -> Memory {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Memory::map(ANONYMOUS, pages * PAGE, flags, None).unwrap()
    }

    /// Shared with forked children.
    pub fn shared(pages: usize) -> Memory {
        Memory::map("shared", pages * PAGE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, None).unwrap()
    }

    /// Of a file on disk.
    pub fn file(pages: usize) -> Memory {
        let file = tempfile::tempfile_in(std::env::temp_dir()).unwrap();
        file.set_len((pages * PAGE) as u64).unwrap();
        Memory::map("file", pages * PAGE, libc::MAP_SHARED, Some(&file)).unwrap()
    }

    /// Of a file on disk, whose changes stay here.
    pub fn private_file(pages: usize) -> Memory {
        let file = tempfile::tempfile_in(std::env::temp_dir()).unwrap();
        file.write_all_at(&vec![7; pages * PAGE], 0).unwrap();
        Memory::map("private file", pages * PAGE, libc::MAP_PRIVATE, Some(&file)).unwrap()
    }

    /// Of shared memory, whose changes stay here.
    pub fn private_memfd(pages: usize) -> Memory {
        let (_, file) = Memory::of_memfd(pages);
        Memory::map("private file", pages * PAGE, libc::MAP_PRIVATE, Some(&file)).unwrap()
    }

    /// Of a memfd of the test's.
    pub fn memfd(pages: usize) -> Memory {
        Memory::of_memfd(pages).0
    }

    /// The same with the memfd.
    pub fn of_memfd(pages: usize) -> (Memory, File) {
        // SAFETY: the name ends with zero, and the descriptor is new.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"dirty".as_ptr(), libc::MFD_CLOEXEC)) };
        file.set_len((pages * PAGE) as u64).unwrap();
        (Memory::map("memfd", pages * PAGE, libc::MAP_SHARED, Some(&file)).unwrap(), file)
    }

    /// A region, which outlives this.
    pub fn of(region: &selfpage::Region) -> Memory {
        Memory { kind: REGION, start: region.as_ptr() as usize, len: region.len_bytes() }
    }

    /// With huge pages, or none where the kernel gives none.
    pub fn huge(pages: usize) -> Option<Memory> {
        let mut memory =
            Memory::map("huge", pages * PAGE + HUGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None).unwrap();
        let start = memory.start.next_multiple_of(HUGE);
        // SAFETY: the test's own mapping; what is outside of the huge pages goes.
        unsafe {
            libc::munmap(memory.start as *mut _, start - memory.start);
            libc::munmap((start + pages * PAGE) as *mut _, memory.start + HUGE - start);
            (memory.start, memory.len) = (start, pages * PAGE);
            libc::madvise(start as *mut _, memory.len, libc::MADV_HUGEPAGE);
        }
        memory.write(0, 1);
        let mut resident = [0u8; HUGE / PAGE];
        // SAFETY: the kernel writes a byte for each page.
        unsafe { libc::mincore(start as *mut _, HUGE, resident.as_mut_ptr()) };
        if resident.iter().all(|page| page & 1 == 1) {
            return Some(memory);
        }
        crate::skip::skip(
            "thp",
            "no transparent huge pages: write madvise into /sys/kernel/mm/transparent_hugepage/enabled",
        );
        None
    }

    /// Of huge pages that are set aside for it, or none where root has not.
    pub fn hugetlb(pages: usize, sharing: i32) -> Option<Memory> {
        // What is mapped stays set aside until it is unmapped, unless a page of it is removed.
        Memory::of_huge_pages(&HugePages::set_aside((pages * PAGE).div_ceil(HUGE)), pages, sharing)
    }

    pub fn of_huge_pages(aside: &HugePages, pages: usize, sharing: i32) -> Option<Memory> {
        let (flags, count) = (sharing | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB, aside.count);
        let mapped = Memory::map("hugetlb", (pages * PAGE).next_multiple_of(HUGE), flags, None);
        mapped.map_err(|why| crate::skip::skip("hugetlb", &format!("{why}: write {count} into {HUGE_PAGES}"))).ok()
    }

    pub fn map(kind: &'static str, len: usize, flags: i32, file: Option<&File>) -> std::io::Result<Memory> {
        let (access, file) = (libc::PROT_READ | libc::PROT_WRITE, file.map_or(-1, AsRawFd::as_raw_fd));
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, file, 0) };
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Memory { kind, start: at as usize, len })
    }

    /// Whether a forked child has it as any other memory: regions have more to do.
    pub fn is_plain(&self) -> bool {
        self.kind != REGION
    }

    /// Whether a page that is discarded counts as written. What the kernel keeps of one elsewhere, hugetlb included, is that it was not
    /// written, as of one that it has put into swap.
    pub fn is_discarded_by_page(&self) -> bool {
        self.kind == ANONYMOUS
    }

    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    pub fn page(&self, page: usize) -> usize {
        assert!(page * PAGE < self.len);
        self.start + page * PAGE
    }

    pub fn index(&self, addr: usize) -> usize {
        (addr - self.start) / PAGE
    }

    pub fn read(&self, page: usize) -> u64 {
        // SAFETY: mapped, and every byte of it is a number.
        unsafe { ptr::read_volatile(self.page(page) as *const u64) }
    }

    pub fn write(&self, page: usize, value: u64) {
        // SAFETY: mapped, and nobody holds a reference to it.
        unsafe { ptr::write_volatile(self.page(page) as *mut u64, value) }
    }

    /// Gives madvise(2) on some pages.
    pub fn advise(&self, pages: Range<usize>, advice: i32) {
        // SAFETY: mapped, and nobody holds a reference to it.
        let given = unsafe { libc::madvise(self.page(pages.start) as *mut _, pages.len() * PAGE, advice) };
        assert_eq!(given, 0, "{}", std::io::Error::last_os_error());
    }

    /// Maps fresh memory over some pages.
    pub fn map_over(&self, pages: Range<usize>) {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let at = self.page(pages.start) as *mut _;
        // SAFETY: mapped, and nobody holds a reference to it.
        let mapped = unsafe { libc::mmap(at, pages.len() * PAGE, access, flags | libc::MAP_FIXED, -1, 0) };
        assert_eq!(mapped, at);
    }

    /// How many pages lie in swap now.
    pub fn swapped(&self) -> usize {
        swapped(self.start, self.len / PAGE)
    }

    /// Writes by a system call.
    pub fn write_by_kernel(&self, page: usize) {
        // SAFETY: mapped, and nobody else holds a reference to it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.page(page) as *mut u8, PAGE) };
        File::open("/dev/urandom").unwrap().read_exact(bytes).unwrap();
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} memory of {} pages", self.kind, self.len / PAGE)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.kind != REGION {
            // SAFETY: mapped by `map`.
            unsafe { libc::munmap(self.start as *mut _, self.len) };
        }
    }
}
