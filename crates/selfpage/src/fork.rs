//! Fork: parent and child both go on with right contents, each within frames of its own.
//!
//! The parent comes to rest (nobody inside the gate, nothing on its way to a store), lets the child have its regions, and
//! shares its bloks with it. The kernel copies the tables and, page by page as they are written, the resident pages. The
//! child did not get the pool: it maps one of its own, opens userfaultfds of its own, registers its regions and starts
//! threads, all before its first instruction after fork(2). A child that was made behind our back has no region at all.
//!
//! # Source
//! None of the four papers has fork. Stock Linux leaves a child without our registration, and its absent pages silently
//! zero: that is what this prevents.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};

use selfpage_core::addr::{Frame, PageBytes};
use selfpage_core::fault::protect;
use selfpage_core::linux::memory::Advice;
use selfpage_core::linux::signal::{self, SignalSet};
use selfpage_core::policy::Policy;

use crate::domain::{Inner, Regions};
use crate::error::Result;
use crate::region::Bound;
use crate::snapshot::{self, Opened};
use crate::store::BackingStore;
use crate::trap::{thread, upcall};

static DOMAINS: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());
static INSTALL: Once = Once::new();
static HELD: Held = Held(UnsafeCell::new(None));

/// What is held from before the fork until after it, by the thread that forks.
struct Held(UnsafeCell<Option<Pause>>);

// SAFETY: fork-held: only the handlers use it, between `prepare` (which takes the lock on `DOMAINS`) and `parent` or `child`
// (which let go of it), on one thread.
unsafe impl Sync for Held {}

struct Pause {
    mask: SignalSet,
    domains: Vec<PausedDomain>,
    registry: MutexGuard<'static, Vec<Weak<Inner>>>,
    snapshot_files: MutexGuard<'static, Vec<Arc<Opened>>>,
}

/// A domain at rest. The guards borrow from `inner`, which comes last.
struct PausedDomain {
    policy: MutexGuard<'static, Box<dyn Policy>>,
    regions: Regions<'static>,
    stores: Vec<Arc<dyn BackingStore>>,
    /// What is in frames alone, which the child does not get: pages that nobody may access.
    aside: Vec<(Frame, PageBytes)>,
    /// Whether the child can have it, else why not.
    shared: Result<()>,
    inner: Arc<Inner>,
}

/// Has forks attended to from here on, as the first domain does. Handlers of forks (`pthread_atfork`) that are installed later may touch
/// managed memory: they come first before a fork, and last after it. Those that were there before may not.
///
/// # Context
/// Normal.
pub fn attend() {
    // SAFETY: fork-handlers: three functions without arguments, which stay loaded as long as domains can exist.
    INSTALL.call_once(|| unsafe {
        libc::pthread_atfork(Some(prepare), Some(parent), Some(child));
    });
}

/// Has forks take care of the domain.
pub(crate) fn enlist(inner: &Arc<Inner>) {
    attend();
    let _quiet = signal::Quiet::begin();
    let mut domains = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    domains.retain(|domain| domain.strong_count() > 0);
    domains.push(Arc::downgrade(inner));
}

/// Ends that.
pub(crate) fn delist(inner: &Arc<Inner>) {
    let _quiet = signal::Quiet::begin();
    let mut domains = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    domains.retain(|domain| !std::ptr::eq(domain.as_ptr(), Arc::as_ptr(inner)));
}

/// The tracked region that a range has a page in.
pub(crate) fn find_tracked(range: &Range<usize>) -> Option<Arc<Bound>> {
    let _quiet = signal::Quiet::begin();
    let domains = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    domains.iter().filter_map(Weak::upgrade).find_map(|domain| domain.find_tracked(range))
}

extern "C" fn prepare() {
    // A handler of a signal that came now would meet a domain at rest, or fork itself, and wait for its own thread.
    let mask = signal::block_all();
    let registry = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    // Before the gates close, like the registry: whoever has it allocates, and may touch an absent page.
    let snapshot_files = snapshot::files();
    let domains = registry.iter().filter_map(Weak::upgrade).map(PausedDomain::pause).collect();
    // SAFETY: fork-held: the lock on `DOMAINS` is ours.
    unsafe { *HELD.0.get() = Some(Pause { mask, domains, registry, snapshot_files }) };
}

extern "C" fn parent() {
    // SAFETY: fork-held: this is the thread that ran `prepare`.
    let Some(pause) = (unsafe { (*HELD.0.get()).take() }) else { return };
    for domain in pause.domains {
        domain.resume_in_parent();
    }
    drop((pause.registry, pause.snapshot_files));
    signal::restore(pause.mask);
}

extern "C" fn child() {
    // SAFETY: fork-held: this is the thread that ran `prepare`.
    let Some(pause) = (unsafe { (*HELD.0.get()).take() }) else { return };
    thread::forget_all();
    upcall::forget_users();
    let_go_of(&pause.snapshot_files);
    // Every place first: what is mapped from here on, be it by an allocation, may come to lie in one.
    for domain in pause.domains.iter().filter(|domain| domain.shared.is_ok()) {
        if domain.inner.map_in_child().is_err() {
            crate::die("a forked child cannot go on: the place of its pool is taken");
        }
    }
    for domain in pause.domains {
        domain.resume_in_child();
    }
    drop((pause.registry, pause.snapshot_files));
    signal::restore(pause.mask);
}

/// In a forked child: the files that the parent writes snapshots to. Their locks are on what was opened, and would be held as long as the
/// child lives. The descriptors stay, and are of an empty file: the child's copies of their owners close them.
fn let_go_of(files: &[Arc<Opened>]) {
    if files.is_empty() {
        return;
    }
    // Without a descriptor to spare the locks are kept.
    let Ok(empty) = rustix::fs::memfd_create(c"selfpage-none", rustix::fs::MemfdFlags::CLOEXEC) else { return };
    for opened in files.iter().filter(|opened| opened.is_ours()) {
        // SAFETY: fd-number: it names our file. The file goes on owning the number, and what is under it now.
        unsafe { libc::dup3(empty.as_raw_fd(), opened.file.as_raw_fd(), libc::O_CLOEXEC) };
    }
}

impl PausedDomain {
    fn pause(inner: Arc<Inner>) -> PausedDomain {
        // SAFETY: fork-held: the guards are dropped before `inner`, which keeps what they borrow alive and in place.
        let still: &'static Inner = unsafe { &*Arc::as_ptr(&inner) };
        let regions = still.regions();
        // Nothing more is evicted from here on.
        let policy = still.policy.lock().unwrap_or_else(PoisonError::into_inner);
        still.close_gate_drained();
        let mut stores: Vec<Arc<dyn BackingStore>> = Vec::new();
        for store in regions.values().filter_map(|bound| bound.store()) {
            if !stores.iter().any(|known| Arc::ptr_eq(known, store)) {
                stores.push(store.clone());
            }
        }
        let table_of = still.table_thread.load(Ordering::Acquire) as i32;
        let mut shared: Result<()> =
            stores.iter().try_for_each(|store| store.before_fork(table_of)).map_err(Into::into);
        if shared.is_ok() {
            shared = regions.values().try_for_each(|bound| bound.give_to_child(Advice::ForChild));
        }
        let mut aside = Vec::new();
        protect::each_aside(still.state(), |frame, contents| aside.push((frame, *contents)));
        PausedDomain { policy, regions, stores, aside, shared, inner }
    }

    fn resume_in_parent(self) {
        for store in &self.stores {
            store.after_fork_in_parent();
        }
        for bound in self.regions.values() {
            if bound.give_to_child(Advice::NotForChild).is_err() {
                crate::die("a region cannot be kept from children");
            }
        }
        let state = self.inner.state();
        state.gate.open(state.mmu);
    }

    fn resume_in_child(self) {
        if let Err(why) = &self.shared {
            // The regions are not here: an access is a SIGSEGV, and never a zero that was not written.
            eprintln!("selfpage: this forked child does not get its parent's regions: {why}");
            self.inner.abandon();
            let state = self.inner.state();
            return state.gate.open(state.mmu);
        }
        for bound in self.regions.values() {
            let _ = bound.give_to_child(Advice::NotForChild);
        }
        for store in &self.stores {
            store.after_fork_in_child();
        }
        if let Err(why) = self.inner.rebuild_in_child(&self.regions, &self.aside) {
            crate::die(&format!("a forked child cannot go on: {why}"));
        }
        drop(self.policy);
        let state = self.inner.state();
        state.gate.open(state.mmu);
        self.inner.set_reserve();
        tracing::info!("a forked child goes on with its parent's regions");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use selfpage_core::addr::PAGE_BYTES;

    use super::*;
    use crate::domain::Domain;

    #[test]
    fn whoever_holds_the_files_may_touch_an_absent_page() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let region = domain.region(4 * PAGE_BYTES).zero().unwrap();
        let (held, is_held) = channel();
        let words = region.as_slice::<u64>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let files = snapshot::files();
                held.send(()).unwrap();
                // Time for the fork to come to the files.
                std::thread::sleep(Duration::from_millis(300));
                assert_eq!(words[512], 0);
                drop(files);
            });
            is_held.recv().unwrap();
            // Without the child, which would have copies of what other tests have locked.
            prepare();
            parent();
        });
    }

    #[test]
    fn a_number_that_names_another_file_stays() {
        let ours = Arc::new(Opened::new(tempfile::tempfile().unwrap()).unwrap());
        let lost = Arc::new(Opened::new(tempfile::tempfile().unwrap()).unwrap());
        let theirs = Opened::new(tempfile::tempfile().unwrap()).unwrap();
        // SAFETY: fd-number: `lost` goes on owning the number.
        let placed = unsafe { libc::dup3(theirs.file.as_raw_fd(), lost.file.as_raw_fd(), libc::O_CLOEXEC) };
        assert_eq!(placed, lost.file.as_raw_fd());
        let inode = |opened: &Opened| std::os::unix::fs::MetadataExt::ino(&opened.file.metadata().unwrap());
        let_go_of(&[ours.clone(), lost.clone()]);
        assert!(!ours.is_ours());
        assert_eq!(inode(&lost), inode(&theirs));
    }
}
