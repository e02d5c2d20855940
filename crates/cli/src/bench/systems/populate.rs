//! The kernel's fastest way to map pages that exist: a memory file, mapped with MAP_POPULATE.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::MemfdFlags;

use super::super::case::Access;
use super::super::error::Error;
use super::super::raw::{self, Mapping, PAGE_BYTES};
use super::super::sizes::Sizes;
use super::super::tables::{Change, PASSES, Took, Work, one_pass};

/// Mapped for this access.
pub fn measure(access: Access, work: Work, sizes: Sizes) -> Result<Took, Error> {
    let Work::Mapping(wanted, _) = work else {
        return Err(Error::Failed(format!("the kernel has no call for {work:?}")));
    };
    let failed = |error: io::Error| Error::Failed(format!("map a memory file: {error}"));
    let size_pages = sizes.frames_bytes as usize / PAGE_BYTES;
    let file = file_of_pages(size_pages).map_err(failed)?;
    check(&Mapping::populated(&file, size_pages * PAGE_BYTES, access).map_err(failed)?, size_pages)?;
    let mut mapping = None;
    let mut passes = Vec::new();
    for _ in 0..PASSES {
        passes.push(one_pass(wanted, |change| {
            match (change, &mapping) {
                (Change::Map, _) => {
                    let fresh = Mapping::populated(&file, size_pages * PAGE_BYTES, access);
                    mapping = Some(fresh.map_err(failed)?);
                }
                (Change::Protect, Some(mapping)) => mapping.protect().map_err(failed)?,
                (Change::Protect, None) => {}
                (Change::Unmap, _) => mapping = None,
            }
            Ok(())
        })?);
    }
    Ok(Took { passes, calls: 1, things: size_pages })
}

/// A memory file whose pages exist, each with its number.
fn file_of_pages(size_pages: usize) -> io::Result<File> {
    let file = File::from(rustix::fs::memfd_create("selfpage-bench", MemfdFlags::CLOEXEC)?);
    for page in 0..size_pages {
        let mut bytes = [0; PAGE_BYTES];
        bytes[..8].copy_from_slice(&(page as u64).to_ne_bytes());
        file.write_all_at(&bytes, (page * PAGE_BYTES) as u64)?;
    }
    Ok(file)
}

/// The right pages are there, and none of them faults any more.
fn check(mapping: &Mapping, size_pages: usize) -> Result<(), Error> {
    let before = raw::usage().minor_faults;
    let memory = mapping.memory();
    if let Some(page) = (0..size_pages).find(|page| memory.read(*page, 0) != *page as u64) {
        return Err(Error::Failed(format!("page {page} of the memory file is not what was written")));
    }
    let faults = raw::usage().minor_faults - before;
    if faults > size_pages as u64 / 100 {
        return Err(Error::Failed(format!("MAP_POPULATE left {faults} of {size_pages} pages out")));
    }
    Ok(())
}
