//! Who calls: whether it is Go's runtime, whose memory stays the kernel's.
//!
//! Where there is C in a Go program, its runtime maps the heap through the C library, and gives pages back by an instruction of its own,
//! which is not seen here. Pages that are out of core would have their old contents afterwards, where Go relies on zeros.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use libc::{Elf64_Ehdr, Elf64_Phdr, Elf64_Sym};

use crate::space::PAGE;

/// What a Go program with C in it exports, and so does a library. Its build ID may have been left out; this may not be exported where
/// Go was linked into a C program.
const EXPORTED: &CStr = c"_cgo_topofstack";
/// The name in the note with a build ID, and its type.
const NOTE: (&[u8], u32) = (b"Go\0\0", 4);

const DT_NULL: u64 = 0;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6fff_fef5;

/// `struct dl_find_object`.
#[repr(C)]
struct Found {
    flags: u64,
    start: usize,
    end: usize,
    map: usize,
    unwinding: usize,
    reserved: [u64; 7],
}

type FindObject = unsafe extern "C" fn(*const c_void, *mut Found) -> c_int;

/// The C library's `_dl_find_object`, which locks nothing: the loader may hold its lock while it waits for who calls us. Null in glibc
/// before 2.35.
static FIND_OBJECT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// There: whether an object is Go's that was loaded with the program. All that call us count as it then.
static ANY_IS_GO: AtomicBool = AtomicBool::new(false);

/// Finds out how callers can be told apart.
pub fn begin() {
    // SAFETY: c-library: the name ends with NUL.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"_dl_find_object".as_ptr()) };
    if found.is_null() {
        // SAFETY: c-library: the callback matches.
        unsafe { libc::dl_iterate_phdr(Some(see_object), std::ptr::null_mut()) };
    }
    FIND_OBJECT.store(found, Ordering::Relaxed);
}

unsafe extern "C" fn see_object(info: *mut libc::dl_phdr_info, _size: usize, _: *mut c_void) -> c_int {
    // SAFETY: c-library: the loader passes a description that is valid during the call, with as many headers as it says.
    let object = unsafe {
        let headers = std::slice::from_raw_parts((*info).dlpi_phdr, usize::from((*info).dlpi_phnum));
        Object { base: (*info).dlpi_addr as usize, headers }
    };
    if object.is_go() {
        ANY_IS_GO.store(true, Ordering::Relaxed);
    }
    0
}

/// Where a call of ours returns to.
#[derive(Clone, Copy)]
pub struct Caller(pub usize);

impl Caller {
    /// Of `syscall(2)`, which Go's runtime does not call.
    pub const BY_NUMBER: Caller = Caller(0);

    /// Whether it is code of an object that Go's runtime is in.
    ///
    /// # Context
    /// Any of the program's, a handler of a signal too.
    pub fn is_go(self) -> bool {
        let find = FIND_OBJECT.load(Ordering::Relaxed);
        if find.is_null() {
            return ANY_IS_GO.load(Ordering::Relaxed);
        }
        // SAFETY: plain-old-data: numbers and addresses.
        let mut found: Found = unsafe { std::mem::zeroed() };
        // SAFETY: c-library: the function of that name has that type, and looks at no memory at the address.
        let is_found = unsafe {
            let find: FindObject = std::mem::transmute(find);
            find(self.0 as *const c_void, &raw mut found) == 0
        };
        // SAFETY: c-library: code of the object called us, so it is loaded.
        is_found && unsafe { Object::at(found.start) }.is_some_and(|object| object.is_go())
    }
}

/// An object that the loader has loaded.
struct Object<'a> {
    /// What is added to the addresses in it.
    base: usize,
    headers: &'a [Elf64_Phdr],
}

impl Object<'_> {
    /// The object that begins there, if its headers are where linkers put them.
    ///
    /// # Safety
    /// *c-library*: the loader has loaded an object there, and it stays.
    unsafe fn at(start: usize) -> Option<Object<'static>> {
        // SAFETY: c-library: passed on from our caller: a page at least, which is not written to.
        let headers = unsafe {
            let head = &*(start as *const Elf64_Ehdr);
            let (at, count) = (usize::try_from(head.e_phoff).ok()?, usize::from(head.e_phnum));
            let end = at.checked_add(count * size_of::<Elf64_Phdr>())?;
            if !head.e_ident.starts_with(b"\x7fELF") || !at.is_multiple_of(align_of::<Elf64_Phdr>()) || end > PAGE {
                return None;
            }
            std::slice::from_raw_parts((start + at) as *const Elf64_Phdr, count)
        };
        let lowest = headers.iter().filter(|one| one.p_type == libc::PT_LOAD).map(|one| one.p_vaddr as usize).min()?;
        Some(Object { base: start.wrapping_sub(lowest & !(PAGE - 1)), headers })
    }

    fn is_go(&self) -> bool {
        self.headers.iter().any(|header| match header.p_type {
            libc::PT_NOTE => self.part(header).is_some_and(|notes| has_note(notes, header.p_align as usize)),
            libc::PT_DYNAMIC => self.part(header).is_some_and(|dynamic| self.exports(dynamic, EXPORTED)),
            _ => false,
        })
    }

    /// What a header is about, if it is loaded.
    fn part(&self, header: &Elf64_Phdr) -> Option<&[u8]> {
        let end = |one: &Elf64_Phdr| one.p_vaddr.wrapping_add(one.p_memsz);
        let is_loaded = self.headers.iter().any(|one| {
            one.p_type == libc::PT_LOAD
                && one.p_flags & libc::PF_R != 0
                && one.p_vaddr <= header.p_vaddr
                && end(header) <= end(one)
        });
        let start = self.base.wrapping_add(header.p_vaddr as usize) as *const u8;
        // SAFETY: c-library: the loader has mapped it, and a running program does not write to it.
        is_loaded.then(|| unsafe { std::slice::from_raw_parts(start, header.p_memsz as usize) })
    }

    /// Whether it has a function of that name for others.
    fn exports(&self, dynamic: &[u8], name: &CStr) -> bool {
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let entries = dynamic.chunks_exact(16).map(|entry| (word(&entry[..8]), word(&entry[8..])));
        let find = |tag| {
            let (_, value) = entries.clone().take_while(|entry| entry.0 != DT_NULL).find(|entry| entry.0 == tag)?;
            // The loader may have added the base already.
            let value = value as usize;
            Some(if value < self.base { value + self.base } else { value })
        };
        let (Some(symbols), Some(names)) = (find(DT_SYMTAB), find(DT_STRTAB)) else { return false };
        let table = Symbols { symbols: symbols as *const Elf64_Sym, names };
        // SAFETY: c-library: the tables of a loaded object are as ELF has them: the loader itself looks symbols up in them.
        unsafe {
            match (find(DT_GNU_HASH), find(DT_HASH)) {
                (Some(hashes), _) => table.has_by_gnu_hash(hashes as *const u32, name),
                (None, Some(hashes)) => table.has_by_hash(hashes as *const u32, name),
                (None, None) => false,
            }
        }
    }
}

/// An object's table of symbols, and where their names are.
struct Symbols {
    symbols: *const Elf64_Sym,
    names: usize,
}

impl Symbols {
    /// # Safety
    /// *c-library*: the table has so many symbols.
    unsafe fn is(&self, index: u32, name: &CStr) -> bool {
        // SAFETY: c-library: passed on from our caller; names end with NUL.
        unsafe {
            let symbol = &*self.symbols.add(index as usize);
            symbol.st_shndx != 0 && CStr::from_ptr((self.names + symbol.st_name as usize) as *const _) == name
        }
    }

    /// # Safety
    /// *c-library*: the hashes are this table's, as `DT_GNU_HASH` has them.
    unsafe fn has_by_gnu_hash(&self, hashes: *const u32, name: &CStr) -> bool {
        let hash =
            name.to_bytes().iter().fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add((*byte).into()));
        // SAFETY: c-library: passed on from our caller.
        unsafe {
            let (buckets, first, bloom_words) = (*hashes, *hashes.add(1), *hashes.add(2));
            if buckets == 0 {
                return false;
            }
            let in_buckets = hashes.add(4 + 2 * bloom_words as usize);
            let chain = in_buckets.add(buckets as usize);
            let mut index = *in_buckets.add((hash % buckets) as usize);
            while index >= first {
                let other = *chain.add((index - first) as usize);
                if other | 1 == hash | 1 && self.is(index, name) {
                    return true;
                }
                if other & 1 != 0 {
                    break;
                }
                index += 1;
            }
            false
        }
    }

    /// # Safety
    /// *c-library*: the hashes are this table's, as `DT_HASH` has them.
    unsafe fn has_by_hash(&self, hashes: *const u32, name: &CStr) -> bool {
        let hash = name.to_bytes().iter().fold(0u32, |hash, byte| {
            let hash = (hash << 4).wrapping_add((*byte).into());
            (hash ^ (hash >> 24 & 0xf0)) & 0x0fff_ffff
        });
        // SAFETY: c-library: passed on from our caller.
        unsafe {
            let buckets = *hashes;
            if buckets == 0 {
                return false;
            }
            let chain = hashes.add(2 + buckets as usize);
            let mut index = *hashes.add(2 + (hash % buckets) as usize);
            while index != 0 {
                if self.is(index, name) {
                    return true;
                }
                index = *chain.add(index as usize);
            }
            false
        }
    }
}

/// Whether Go's note is among these, which are aligned so.
fn has_note(mut notes: &[u8], align: usize) -> bool {
    // Linkers write 0 and 1 too, and mean 4.
    let align = if align == 8 { 8 } else { 4 };
    while let Some((head, rest)) = notes.split_at_checked(12) {
        let number =
            |at: usize| head[at..at + 4].iter().rev().fold(0u32, |number, byte| number << 8 | u32::from(*byte));
        let (name_len, desc_len, kind) = (number(0) as usize, number(4) as usize, number(8));
        if (rest.get(..name_len), kind) == (Some(NOTE.0), NOTE.1) {
            return true;
        }
        let desc_at = (12 + name_len).next_multiple_of(align);
        match notes.get((desc_at + desc_len).next_multiple_of(align)..) {
            Some(next) => notes = next,
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(name: &[u8], kind: u32, desc: &[u8]) -> Vec<u8> {
        let numbers = [name.len() as u32, desc.len() as u32, kind];
        let mut note: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        for part in [name, desc] {
            note.extend_from_slice(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    #[test]
    fn gos_note_is_found_among_others() {
        let (build, go) = (note(b"GNU\0", 3, b"twenty bytes of it.."), note(b"Go\0\0", 4, b"odd"));
        assert!(has_note(&[&build[..], &go].concat(), 4));
        assert!(has_note(&[&go[..], &build].concat(), 4));
        assert!(!has_note(&build, 4));
        assert!(!has_note(&note(b"Go\0\0", 1, b"list"), 4), "of another kind");
        assert!(!has_note(&note(b"GNU\0", 4, b"gold"), 4), "of another name");
        assert!(!has_note(&build[..14], 4), "cut short");
        assert!(!has_note(&[0xff; 24], 4), "lengths beyond its end");
        assert!(!has_note(&[], 8));
    }

    #[test]
    fn this_program_is_not_gos() {
        begin();
        assert!(!Caller(begin as *const () as usize).is_go());
        assert!(!Caller(libc::getpid as *const () as usize).is_go());
        assert!(!Caller::BY_NUMBER.is_go());
    }
}
