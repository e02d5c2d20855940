//! Who tells the collector of writes, and when.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use selfpage::dirty::{DirtyTracker, Mechanism};

use crate::heap::Heap;
use crate::library::{Library, OnEvent};
use crate::{Error, is_first_thread, pauses};

/// How the collector learns which pages were written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writes {
    /// It does not, and marks from everything at every collection.
    Unknown,
    /// By itself: `mprotect` and `SIGSEGV` (or the kernel's soft-dirty bits, where they are built in).
    Own,
    /// From a [`DirtyTracker`].
    Tracked,
}

/// The steps of a collection that matter here (`GC_EventType`).
const MARK_START: c_int = 1;
const PRE_STOP_WORLD: c_int = 6;
const POST_START_WORLD: c_int = 9;

/// What the events change. They come one at a time, under the collector's lock, and nobody else locks it once they come: a
/// thread that did could be stopped with the lock in its hands.
struct State {
    heap: Option<Heap>,
    /// Whether the heap was followed in this collection: a collector that knows of no threads has no world to stop, and says nothing of it.
    has_followed: bool,
    /// Who was told of events before.
    next: Option<OnEvent>,
}

static STATE: Mutex<State> = Mutex::new(State { heap: None, has_followed: false, next: None });
static STARTED: AtomicBool = AtomicBool::new(false);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the collector, which learns of writes as `writes` says.
///
/// The thread must be the program's first. From then on nobody else may ask for collection events.
///
/// # Errors
/// `Thread`, `Started`, `Refused`, `Tracker`.
pub fn start(library: &Library, writes: Writes) -> Result<(), Error> {
    if !is_first_thread() {
        return Err(Error::Thread);
    }
    // SAFETY: collector-call: the program's first thread, as was just seen.
    unsafe { (library.init)() };
    prepare(library, writes)?;
    if writes == Writes::Unknown {
        return Ok(());
    }
    // SAFETY: collector-call: the collector is initialised.
    let incremental = unsafe {
        (library.enable_incremental)();
        (library.is_incremental)()
    };
    if incremental == 0 { Err(Error::Refused) } else { Ok(()) }
}

/// Everything but the start itself: when the program calls `GC_enable_incremental`, writes are tracked.
pub fn prepare(library: &Library, writes: Writes) -> Result<(), Error> {
    // SAFETY: collector-call: both read a word.
    let (next, incremental) = unsafe { ((library.on_event)(), (library.is_incremental)()) };
    let heap = match writes {
        // Other mechanisms refuse system calls on what is armed, which is not the collector's alone.
        Writes::Tracked => {
            let tracker = DirtyTracker::with(Mechanism::WriteProtection).map_err(Error::Tracker)?;
            Some(Heap::new(*library, tracker))
        }
        Writes::Unknown | Writes::Own => None,
    };
    // Without the lock: events may come already.
    if incremental != 0 || STARTED.swap(true, Ordering::SeqCst) {
        return Err(Error::Started);
    }
    *state() = State { heap, has_followed: false, next };
    // SAFETY: collector-call: both set a word; `on_event` stays loaded.
    unsafe {
        (library.allow_manual)(c_int::from(writes == Writes::Tracked));
        (library.set_on_event)(Some(on_event));
    }
    Ok(())
}

/// The collector reads its dirty bits just after `MARK_START` and nowhere else, with the world stopped.
extern "C" fn on_event(event: c_int) {
    let mut state = state();
    match event {
        PRE_STOP_WORLD => {
            pauses::begin();
            state.has_followed = true;
            if let Some(heap) = &mut state.heap {
                heap.follow();
            }
        }
        MARK_START => {
            let has_followed = std::mem::take(&mut state.has_followed);
            if let Some(heap) = &mut state.heap {
                if !has_followed {
                    heap.follow();
                }
                heap.tell();
            }
        }
        POST_START_WORLD => pauses::end(),
        _ => {}
    }
    let next = state.next;
    drop(state);
    if let Some(next) = next {
        next(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gcbench::{self, Lists, Size};
    use crate::skip::skip;

    #[test]
    fn another_thread_than_the_first_is_refused() {
        let library = match Library::load() {
            Ok(library) => library,
            Err(why) => return skip("libgc", &why.to_string()),
        };
        let refused = std::thread::spawn(move || {
            let size = Size { stretch_depth: 6 };
            let runs = gcbench::run(&library, size, Lists::Shared).map(drop);
            [start(&library, Writes::Unknown), runs]
        });
        for refused in refused.join().unwrap() {
            assert!(matches!(refused, Err(Error::Thread)), "{refused:?}");
        }
    }
}
