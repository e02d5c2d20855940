//! Where a store can be no sparse file. The tool has this file too, and looks before it begins anything: nothing else of this library
//! stands in it.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io::{Error, ErrorKind};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use selfpage::store::StoreError;

/// That files at that place may have holes.
pub fn check(place: &Path) -> Result<(), StoreError> {
    let Some(kind) = without_holes(place) else { return Ok(()) };
    let cause =
        format!("files on {kind} have no holes: all the room there is would be written full before the program begins");
    Err(StoreError {
        object: place.display().to_string(),
        cause: Error::new(ErrorKind::Unsupported, cause),
        remedy: "name a place on ext4, XFS or Btrfs (--store)",
    })
}

/// The name of the file system of that place, or of where it would be made, if it has no holes in files.
fn without_holes(place: &Path) -> Option<&'static str> {
    const EXFAT_SUPER_MAGIC: i64 = 0x2011_BAB0;
    let kind = |path: &Path| {
        let path = CString::new(path.as_os_str().as_bytes()).ok()?;
        let mut about = MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: c-library: the name ends with NUL, and what is read was written where the call says so.
        unsafe { (libc::statfs(path.as_ptr(), about.as_mut_ptr()) == 0).then(|| about.assume_init().f_type) }
    };
    let beside = || kind(place.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(".".as_ref()));
    match kind(place).or_else(beside)? {
        libc::MSDOS_SUPER_MAGIC => Some("vfat"),
        EXFAT_SUPER_MAGIC => Some("exFAT"),
        _ => None,
    }
}
