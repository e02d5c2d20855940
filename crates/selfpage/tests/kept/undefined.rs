//! Regions of frames as they come, whose contents nobody has defined: there is nothing to keep of them.

use selfpage::snapshot::Snapshots;
use selfpage::store::MemoryStore;
use selfpage::{Domain, Kind};

use crate::PAGE;

#[test]
fn nothing_is_kept_of_a_region_with_undefined_contents() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("undefined.snap");
    let domain = Domain::with_frames(256 * PAGE).build().unwrap();
    let physical = domain.region(16 * PAGE).physical().unwrap();
    let error = Snapshots::of(&[&physical], &path).expect_err("its contents are undefined");
    assert_eq!(error.kind(), Kind::Invalid, "{error}");
    assert!(error.to_string().contains("stored, restored or zero at first"), "{error}");
    let error = physical.cow_clone(MemoryStore::new(1 << 20).unwrap()).expect_err("its contents are undefined");
    assert_eq!(error.kind(), Kind::Invalid, "{error}");
    assert!(error.to_string().contains("stored, restored or zero at first"), "{error}");
    // Of others they are defined.
    let pinned = domain.region(16 * PAGE).pinned().unwrap();
    let zero = domain.region(16 * PAGE).zero().unwrap();
    Snapshots::of(&[&pinned, &zero], &path).unwrap().take().unwrap();
    zero.cow_clone(MemoryStore::new(1 << 20).unwrap()).unwrap();
}
