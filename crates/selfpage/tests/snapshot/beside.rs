//! A file of the program's own under the name that new snapshots have at first.

use selfpage::Kind;
use selfpage::snapshot::{Snapshot, Snapshots};
use selfpage::{Domain, Region};

use super::PAGE;

fn region() -> (Domain, Region) {
    let domain = Domain::with_frames(64 * PAGE).build().unwrap();
    let region = domain.region(16 * PAGE).zero().unwrap();
    (domain, region)
}

#[test]
fn it_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (path, new) = (dir.path().join("one.snap"), dir.path().join("one.snap.new"));
    let (_domain, region) = region();
    let zeros_first = [vec![0; 20 * PAGE], b"Dear Sir or Madam".to_vec()].concat();
    for letter in [b"Dear Sir or Madam".as_slice(), b"Hi", &zeros_first] {
        std::fs::write(&new, letter).unwrap();
        let why = Snapshots::of(&[&region], &path).map(|_| ()).unwrap_err();
        assert_eq!(why.kind(), Kind::Invalid);
        assert!(why.to_string().contains("one.snap.new") && why.to_string().contains("move it away"), "{why}");
        assert_eq!(std::fs::read(&new).unwrap(), letter);
        // Nobody keeps a lock on it.
        std::fs::File::open(&new).unwrap().try_lock().unwrap();
    }
    std::fs::remove_file(&new).unwrap();
    // So too where there is a snapshot, and a new file begins later.
    Snapshots::of(&[&region], &path).unwrap().take().unwrap();
    std::fs::write(&new, "Dear Sir or Madam").unwrap();
    let mut snapshots = Snapshots::of(&[&region], &path).unwrap();
    assert_eq!(snapshots.take().map(|_| ()).unwrap_err().kind(), Kind::Invalid);
    drop(snapshots);
    assert_eq!(std::fs::read(&new).unwrap(), b"Dear Sir or Madam");
    Snapshot::open(&path).unwrap().verify().unwrap();
}

#[test]
fn what_is_no_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, new) = (dir.path().join("one.snap"), dir.path().join("one.snap.new"));
    let (_domain, region) = region();
    let name = std::ffi::CString::new(new.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: test: a name that ends.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    assert_eq!(Snapshots::of(&[&region], &path).map(|_| ()).unwrap_err().kind(), Kind::Invalid);
    assert!(new.exists());
}

#[test]
fn what_a_crash_left_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let (path, new) = (dir.path().join("one.snap"), dir.path().join("one.snap.new"));
    let (_domain, region) = region();
    for left in [Vec::new(), vec![0; 3], vec![0; 100 * PAGE], b"SELFSNAP and the rest".to_vec()] {
        std::fs::write(&new, left).unwrap();
        Snapshots::of(&[&region], &path).unwrap().take().unwrap();
        Snapshot::open(&path).unwrap().verify().unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}
