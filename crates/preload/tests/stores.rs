//! Where pages go under `selfpage run`, and what becomes of a program whose store fails.

mod run;

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use run::Ran;
use selfpage::store::FileStore;

const FRAMES: [&str; 2] = ["--frames", "8M"];
const PAGE: u64 = 4096;
/// What tests/c/pages.c has on each of its pages.
const TEXT: &[u8] = b"selfpage keeps this page";

fn pages() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    PROGRAM.get_or_init(|| run::possible().then(|| run::compile("pages", &[]))).as_deref()
}

fn case(options: &[&str], name: &str) -> Option<Ran> {
    pages().map(|program| run::run_with(Path::new("/"), &[&FRAMES, options].concat(), program, &[name]))
}

/// Everything came back right, though pages went, and frames were as many as was said.
#[track_caller]
fn right(ran: Ran) -> Ran {
    let ran = ran.ok();
    assert!(ran.text().ends_with("ok\n"), "{}", ran.text());
    assert!(ran.stats["evictions_total"].as_u64().unwrap() > 4096, "{}", ran.stats);
    assert!(ran.stats["bytes_saved"].as_u64().unwrap() > 8 << 20, "{}", ran.stats);
    assert!(ran.stats["resident_bytes_max"].as_u64().unwrap() <= 8 << 20, "{}", ran.stats);
    ran
}

#[test]
fn each_policy_runs_a_program_right() {
    for policy in selfpage::POLICIES {
        let Some(ran) = case(&["--policy", policy], "work") else { return };
        right(ran);
    }
}

#[test]
fn the_policy_that_was_named_decides() {
    let fills = |policy| Some(case(&["--policy", policy], "cycle")?.ok().stats["fills_total"].as_u64().unwrap());
    let (Some(lru), Some(mru)) = (fills("lru"), fills("mru")) else { return };
    assert!(mru * 3 < lru * 2, "{mru} fills with mru, {lru} with lru");
}

#[test]
fn memory_as_a_store_writes_nothing_to_a_disk() {
    let directory = run::directory();
    let written_bytes = |store: &str| {
        let ran = right(case(&["--store", store], "work_and_say_what_was_written")?);
        Some(ran.text().lines().next().unwrap().parse::<u64>().unwrap())
    };
    let Some(written) = written_bytes("memory") else { return };
    assert_eq!(written, 0);
    // A disk it was that would have been written to.
    let written = written_bytes(directory.path().to_str().unwrap()).unwrap();
    assert!(written > 8 << 20, "{written} bytes");
}

/// The kernel moves data on threads of its own, and there can be none.
#[test]
fn a_program_at_its_limit_on_threads_has_its_pages() {
    if let Some(ran) = case(&[], "work_without_threads") {
        right(ran);
    }
}

/// How many pages of a store's file hold what the program had on them.
fn kept(path: &Path) -> usize {
    let file = std::fs::File::open(path).unwrap();
    let mut page = vec![0; PAGE as usize];
    let offsets = (PAGE..file.metadata().unwrap().len()).step_by(PAGE as usize);
    // A file of the whole capacity is mostly holes; what lies in it lies at the front.
    let pages = offsets.take(32 << 10).filter(|offset| {
        file.read_exact_at(&mut page, *offset).unwrap();
        page[8..].starts_with(TEXT)
    });
    pages.count()
}

#[test]
fn a_named_store_has_the_pages_and_can_be_used_again() {
    let directory = run::directory();
    let path = directory.path().join("store");
    for _ in 0..2 {
        let Some(ran) = case(&["--store", path.to_str().unwrap()], "work") else { return };
        right(ran);
        let about = path.metadata().unwrap();
        assert_eq!(about.mode() & 0o777, 0o600);
        assert!(kept(&path) > 2048, "{} pages", kept(&path));
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn a_place_whose_name_is_no_text() {
    let Some(program) = pages() else { return };
    let directory = run::directory();
    let (place, stats) = (directory.path().join(OsStr::from_bytes(b"caf\xe9")), directory.path().join("stats"));
    std::fs::create_dir(&place).unwrap();
    let mut command = Command::new(run::tool());
    command.arg("run").args(FRAMES).arg("--store").arg(&place).arg("--trace").arg(place.join("trace"));
    let output = command.arg("--stats").arg(&stats).arg("--").arg(program).arg("work").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stats = std::fs::read_to_string(stats).unwrap();
    assert!(stats.contains("\"pid\"") && place.join("trace").is_file(), "it was not managed: {stats}");
}

#[test]
fn a_device() {
    let Some(program) = pages() else { return };
    let directory = run::directory();
    let disk = directory.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    let made = Command::new("losetup").args(["--find", "--show"]).arg(&disk).output();
    let Ok(made) = made.map(|output| (output.status.success(), String::from_utf8(output.stdout).unwrap())) else {
        return run::skip("losetup", "there is no losetup: apt-get install mount");
    };
    if !made.0 {
        return run::skip("losetup", "a file cannot be made a device here: it takes root, and loop devices");
    }
    let device = made.1.trim();
    let ran = run::run_with(Path::new("/"), &[&FRAMES[..], &["--store", device]].concat(), program, &["work"]);
    assert!(Command::new("losetup").args(["--detach", device]).status().unwrap().success());
    right(ran);
    assert!(kept(&disk) > 2048, "{} pages", kept(&disk));
}

#[test]
fn another_user_who_has_no_place_for_pages() {
    let python = "/usr/bin/python3";
    if !run::possible() || !run::has(python) {
        return;
    }
    let directory = run::directory();
    // The directory is its maker's alone.
    let place = directory.path().to_str().unwrap();
    let become_another =
        "import os; os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
os.execv('/bin/echo', ['echo', 'ran'])";
    let options = [&FRAMES[..], &["--store", place]].concat();
    let ran = run::run_with(Path::new("/"), &options, python, &["-S", "-c", become_another]);
    if ran.errors().contains("PermissionError") || ran.errors().contains("libselfpage_frames.so") {
        return run::skip("root", "it takes root to become another user, and a place that such a one may read");
    }
    assert_eq!((ran.code(), ran.text().as_str()), (0, "ran\n"), "{}", ran.errors());
    assert!(ran.errors().contains("not managed, because it runs as another user: ") && ran.errors().contains(place));
}

#[test]
fn a_file_that_holds_something_else_is_refused_and_left_as_it_is() {
    let Some(program) = pages() else { return };
    let directory = run::directory();
    let path = directory.path().join("letters");
    for contents in [b"dear all".to_vec(), vec![b'x'; 3 << 20]] {
        std::fs::write(&path, &contents).unwrap();
        let options = [&FRAMES[..], &["--store", path.to_str().unwrap()]].concat();
        let ran = run::run_with(Path::new("/"), &options, program, &["work"]);
        assert_eq!(ran.code(), 2, "{}", ran.errors());
        assert!(ran.errors().starts_with("selfpage run: ") && ran.errors().lines().count() == 1, "{}", ran.errors());
        for part in [path.to_str().unwrap(), "something that is not a store's", "remove it, or name another"] {
            assert!(ran.errors().contains(part), "{part} is missing: {}", ran.errors());
        }
        assert_eq!(ran.text(), "");
        assert!(std::fs::read(&path).unwrap() == contents);
    }
}

/// `work_twice`, when it has worked once; it goes on when it is told to.
fn half_done(store: &Path) -> Option<Child> {
    let program = pages()?;
    let mut command = Command::new("timeout");
    command.args(["--kill-after=1", "150"]).arg(run::tool()).arg("run").args(FRAMES).arg("--store").arg(store);
    command.arg("--").arg(program).arg("work_twice");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    Some(child)
}

/// Has it go on: its status, what it said, and its errors.
fn go_on(mut child: Child) -> (i32, String, String) {
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (run::code(output.status), text(output.stdout), text(output.stderr))
}

#[test]
fn a_second_program_gets_a_store_of_its_own_beside_one_that_is_in_use() {
    let directory = run::directory();
    let path = directory.path().join("store");
    let Some(first) = half_done(&path) else { return };
    let second = case(&["--store", path.to_str().unwrap()], "work").unwrap();
    right(second);
    assert_eq!(go_on(first), (0, "ok\n".into(), String::new()));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "files were left");
}

/// A program ended by SIGBUS, with a line that says why.
#[track_caller]
fn ended_by_sigbus(code: i32, errors: &str, why: &str) {
    assert_eq!(code, 128 + libc::SIGBUS, "{errors}");
    let told: Vec<_> = errors.lines().filter(|line| line.contains(why)).collect();
    assert!(!told.is_empty(), "{why} is not said: {errors}");
    for line in told {
        assert!(line.starts_with("selfpage: ") && line.contains("region mappings at 0x"), "{line}");
    }
}

#[test]
fn a_file_damaged_behind_the_programs_back_is_noticed() {
    let directory = run::directory();
    let path = directory.path().join("store");
    let Some(child) = half_done(&path) else { return };
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    for offset in (PAGE..64 << 20).step_by(PAGE as usize) {
        let _ = file.write_all_at(b"x", offset + 2000);
    }
    let (code, text, errors) = go_on(child);
    assert_eq!(text, "");
    ended_by_sigbus(code, &errors, "the store gave back other bytes than were saved");
}

#[test]
fn a_file_cut_short_behind_the_programs_back_is_noticed() {
    let directory = run::directory();
    let path = directory.path().join("store");
    let Some(child) = half_done(&path) else { return };
    OpenOptions::new().write(true).open(&path).unwrap().set_len(PAGE).unwrap();
    let (code, text, errors) = go_on(child);
    assert_eq!(text, "");
    ended_by_sigbus(code, &errors, "the file ends before this page");
}

/// A limit on the size of files, of which one page is the store's own.
const LIMIT: [&str; 2] = ["prlimit", "--fsize=4194304"];

#[test]
fn a_store_that_is_full_is_said_to_be() {
    let Some(program) = pages() else { return };
    let ran = run::run_under(&LIMIT, Path::new("/"), &FRAMES, program, &["fill_much"]);
    assert_eq!(ran.text(), "");
    ended_by_sigbus(ran.code(), &ran.errors(), "the store is full (ENOSPC)");
    // Without a limit there is room.
    assert_eq!(case(&[], "fill_much").unwrap().ok().text(), "ok\n");
}

#[test]
fn a_program_that_handles_sigbus_goes_on() {
    let Some(program) = pages() else { return };
    let ran = run::run_under(&LIMIT, Path::new("/"), &FRAMES, program, &["catch_sigbus"]);
    assert_eq!((ran.code(), ran.text().as_str()), (0, "ok\n"), "{}", ran.errors());
    assert!(ran.errors().contains("the store is full (ENOSPC)"), "{}", ran.errors());
}

#[test]
fn a_limit_on_files_that_comes_later_is_told() {
    let Some(ran) = case(&[], "limit_files") else { return };
    assert_eq!(ran.text(), "");
    ended_by_sigbus(
        ran.code(),
        &ran.errors(),
        "no frame, because pages cannot be saved: the limit on the size of files",
    );
}

/// Runs a case with a disk of its own of that size at `at`, where `line` of a shell's begins it.
fn on_a_disk(at: &str, size: &str, line: &str, store: &str, arguments: &[&str]) -> Option<Ran> {
    let program = pages()?;
    let mount = format!("mount -t tmpfs -o size={size} tmpfs {at} && {line}");
    let alone = ["unshare", "--mount", "sh", "-c", &mount, "sh"];
    let tried = Command::new(alone[0]).args(&alone[1..]).arg("true").output();
    if !tried.is_ok_and(|output| output.status.success()) {
        run::skip("mount", "a disk for this test alone cannot be mounted: it takes root");
        return None;
    }
    let options = [&FRAMES[..], &["--store", store]].concat();
    Some(run::run_under(&alone, Path::new("/"), &options, program, arguments))
}

/// What files may have at most there, no file system says.
#[test]
fn a_disk_with_more_room_than_a_file_of_it_may_have() {
    let directory = run::directory();
    let at = directory.path().to_str().unwrap();
    // Without extents, and with small blocks, a file has 16 GiB.
    let make = "mkfs.ext4 -q -F -b1024 -O^extent,^64bit,^metadata_csum,^has_journal,^resize_inode -i1048576";
    let image = format!("{at}/image");
    let line = format!(
        "PATH=$PATH:/sbin:/usr/sbin; truncate -s 20G {image} && {make} -Elazy_itable_init=1,nodiscard {image} && mkdir {at}/disk && \
         mount -o loop {image} {at}/disk && exec \"$@\""
    );
    for store in ["disk", "disk/named"] {
        let Some(ran) = on_a_disk(at, "200m", &line, &format!("{at}/{store}"), &["work"]) else { return };
        right(ran);
    }
}

#[test]
fn a_disk_that_fills_up_under_the_store() {
    let directory = run::directory();
    let at = directory.path().to_str().unwrap();
    let arguments = ["fill_the_disk", &format!("{at}/ballast")];
    let Some(ran) = on_a_disk(at, "40m", "exec \"$@\"", at, &arguments) else { return };
    assert_eq!(ran.text(), "");
    ended_by_sigbus(ran.code(), &ran.errors(), "the store is full (ENOSPC)");
}

#[test]
fn a_file_that_is_used_again_holds_as_much_as_before() {
    let directory = run::directory();
    let at = directory.path().to_str().unwrap();
    let Some(ran) = on_a_disk(at, "48m", "\"$@\" && exec \"$@\"", &format!("{at}/store"), &["work"]) else { return };
    assert_eq!(right(ran).text(), "ok\nok\n");
}

#[test]
fn a_link_on_a_small_disk_to_a_file_on_a_large_one() {
    let [directory, elsewhere] = [run::directory(), run::directory()];
    let [at, link] = [directory.path().to_str().unwrap(), &format!("{}/link", directory.path().display())];
    let file = elsewhere.path().join("store");
    let line = format!("ln -s {} {link} && exec \"$@\"", file.display());
    let runs = || on_a_disk(at, "4m", &line, link, &["work"]).map(right);
    if runs().is_none() {
        return;
    }
    // Beside it goes what finds it in use.
    let _held = FileStore::create(&file, PAGE).unwrap();
    runs();
}
