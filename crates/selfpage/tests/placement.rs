//! Where regions lie.

use selfpage::{Domain, Kind};

#[path = "../../../tests/skip.rs"]
mod skip;

const PAGE: usize = 4096;

#[test]
fn regions_lie_where_they_are_told() {
    let domain = match Domain::with_frames(64 * PAGE).build() {
        Ok(domain) => domain,
        Err(why) => return skip::skip("uffd", &why.to_string()),
    };
    let far = domain.region(1 << 20).far_from_all().zero().unwrap();
    let other = domain.region(1 << 20).far_from_all().zero().unwrap();
    assert!(far.as_ptr().addr().abs_diff(other.as_ptr().addr()) >= 64 << 30);
    assert!(far.as_ptr().addr().abs_diff(regions_lie_where_they_are_told as *const () as usize) >= 64 << 30);
    let addr = other.as_ptr() as usize;
    drop(other);
    let mut chosen = domain.region(1 << 20).at(addr).name("chosen").zero().unwrap();
    assert_eq!(chosen.as_ptr() as usize, addr);
    chosen.as_mut_slice::<u64>()[0] = 7;
    let taken = domain.region(1 << 20).at(addr + PAGE).zero().unwrap_err();
    assert_eq!(taken.kind(), Kind::Invalid);
    let said = taken.to_string();
    assert!(
        ["anonymous memory", &format!("{addr:#x}"), "choose another"].iter().all(|word| said.contains(word)),
        "{said}"
    );
    let here = regions_lie_where_they_are_told as *const () as usize & !(PAGE - 1);
    let name = std::env::current_exe().unwrap().file_name().unwrap().to_string_lossy().into_owned();
    let said = domain.region(PAGE).at(here).zero().unwrap_err().to_string();
    assert!(said.contains(&name), "names the program's own file: {said}");
    for nowhere in [addr + 1, 1 << 62, 0] {
        assert_eq!(domain.region(PAGE).at(nowhere).zero().unwrap_err().kind(), Kind::Invalid);
    }
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: test: a value of ours; this process opens nothing from here on.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) }, 0);
    let unknown = domain.region(1 << 20).far_from_all().zero().unwrap_err();
    assert_eq!(unknown.kind(), Kind::OutOfSpace);
    let said = unknown.to_string();
    assert!(["/proc/thread-self/maps", "ulimit -n"].iter().all(|word| said.contains(word)), "{said}");
}
