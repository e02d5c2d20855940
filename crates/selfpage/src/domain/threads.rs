//! The threads of a domain: how they start, and how they end.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use selfpage_core::linux::descriptor::Descriptor;
use selfpage_core::linux::held::Held;
use selfpage_core::linux::thread as own_thread;

use super::Inner;
use crate::config::DescriptorTable;
use crate::error::{Error, Result};
use crate::pthread::{self, PROGRAM_STACK_BYTES, Pthread};
use crate::region::Bound;
use crate::store::{borrow_number, copied_descriptor, move_descriptor};
use crate::trap::{pager, table, thread, upcall, worker};
use crate::{descriptors, evictor, trace};

/// What pager threads have of regions from their beginning: in a forked child.
#[derive(Default)]
pub(super) struct Kept {
    pub(super) all: Vec<RawFd>,
    /// Those of them that stay the program's.
    pub(super) lent: Vec<RawFd>,
    /// What moves there from the one number to the other.
    pub(super) astray: Vec<(RawFd, RawFd)>,
    /// What only reserves these numbers they do not have.
    pub(super) reserved: Vec<RawFd>,
}

impl Inner {
    /// Starts the threads of the domain. The first takes a descriptor table of its own, with what is kept and the domain's own
    /// descriptors in it, and starts the others, who share it.
    pub(super) fn start_threads(self: &Arc<Self>, kept: Kept) -> Result<()> {
        let Kept { all: mut keep, lent, astray, reserved } = kept;
        let mut of_regions: Vec<RawFd> = astray.iter().map(|way| way.1).collect();
        if self.config.descriptor_table == DescriptorTable::Private {
            // No stream of theirs is the program's.
            of_regions.extend(&keep);
        }
        keep.extend(astray.iter().map(|way| way.0));
        let descriptors = *self.descriptors.lock().unwrap_or_else(PoisonError::into_inner);
        keep.extend(descriptors::numbers(&descriptors));
        // What a parent held a forked child does not have, and must not let go of.
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Held::hold(&descriptors.userfaultfds()).ok();
        let ours: Vec<RawFd> = keep.iter().copied().filter(|number| !lent.contains(number)).collect();
        let own = self.clone();
        // One of the library's says itself what could not be done.
        let failed = |cause: io::Error| {
            cause.downcast::<Error>().unwrap_or_else(|cause| Error::system("start", "pager threads", cause))
        };
        let first = thread::start_and_hear(c"selfpage-pager", move |send| {
            let begun = table::leave_programs(&keep, own.config.descriptor_table, &reserved).and_then(|nowhere| {
                own.nowhere.begin(nowhere.number(), of_regions);
                let moved = astray.into_iter().try_for_each(move_descriptor);
                moved.map_err(|why| Error::no_threads("fcntl", why))?;
                own.table_thread.store(own_thread::id(), Ordering::Release);
                let queue = worker::Queue::over([descriptors.worker, descriptors.tracked_worker])?;
                Ok((nowhere, Arc::new(queue)))
            });
            let (begun, started) = match begun {
                Ok((nowhere, queue)) => (Some((nowhere, queue.clone())), start_others(&own, queue)),
                Err(cause) => (None, Err(cause.into())),
            };
            let _ = send.send(started);
            drop(send);
            pager::serve(&own);
            // The workers sleep in the kernel, and only a thread that shares their descriptors can tell them.
            begun.iter().for_each(|(_nowhere, queue)| queue.end());
        });
        let started = first.and_then(|(first, started)| {
            self.keep(first);
            started
        });
        if let Err(cause) = started {
            self.end();
            return Err(failed(cause));
        }
        self.hide_descriptors(&ours);
        Ok(())
    }

    /// Keeps a thread until the domain ends.
    fn keep(&self, thread: Pthread) {
        self.threads().push(thread);
    }

    /// Ends the domain's threads, as many as there are, and gives its descriptors back.
    pub(super) fn end(&self) {
        upcall::delist(&raw const *self);
        self.handlers.end(self);
        let was_here = !self.stop.swap(true, Ordering::SeqCst);
        let state = &self.state;
        for event in [&state.requested, &state.to_save, &state.stack.demand.wanted, &state.stack.demand.available] {
            event.signal(state.mmu);
        }
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            thread.join();
        }
        self.close_descriptors();
        if let Some(held) = self.held.lock().unwrap_or_else(PoisonError::into_inner).take() {
            held.release();
        }
        if was_here {
            // In a forked child the pool itself stays: its parent's threads, which are not here, have each a count of the domain.
            // SAFETY: pool-owned: no region is left, and no thread. A child that did not get the domain has no pool.
            unsafe { self.pool.empty() };
        }
    }

    /// The same, for a thread that would wait for itself there, or for another domain's that waits for it: a handler, pager or store of the
    /// program's may own regions, and is dropped by whoever was the last to ask it; or a handler waits for a lock of the thread's. On a pager
    /// thread the program's copies of the descriptors stay open, where it has them.
    pub(super) fn end_elsewhere(self: &Arc<Self>) {
        let own = self.clone();
        if let Some(why) = end_on_another(move || own.end()) {
            tracing::error!(%why, "no thread to end a domain with: it stays, with its threads and its memory");
        }
    }

    /// Closes the domain's descriptors, where the program has them and has not closed them itself.
    pub(super) fn close_descriptors(&self) {
        descriptors::close_ours(&self.descriptors.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Where the program is not to see the domain's descriptors, closes its copies of these.
    fn hide_descriptors(&self, numbers: &[RawFd]) {
        if self.config.descriptor_table == DescriptorTable::Private {
            for number in numbers {
                let _ = Descriptor::from_raw(*number).close();
            }
        }
    }

    /// The same, of these of a region's that pager threads have taken. The program may have closed one since, and have a file of its own there.
    pub(crate) fn hide_descriptors_of(&self, bound: &Bound, numbers: &[RawFd]) {
        let lent = bound.lent_descriptors();
        let is_ours = |number: &&RawFd| {
            !lent.contains(number) && bound.check_descriptor(**number, borrow_number(**number)).is_ok()
        };
        numbers.iter().filter(is_ours).for_each(|number| self.hide_descriptors(&[*number]));
    }

    /// That what pager threads have at these numbers is what a region was made with.
    pub(crate) fn has_descriptors(&self, bound: &Bound, numbers: &[RawFd]) -> Result<()> {
        if numbers.is_empty() {
            return Ok(());
        }
        let check = |number: &RawFd| bound.check_descriptor(*number, borrow_number(*number));
        self.on_pager_thread(move || numbers.iter().try_for_each(check))
    }

    /// Gives the pager threads these descriptors of the calling thread's, at the same numbers, for a region: all of them, where they still are
    /// what it was made with, or none.
    pub(crate) fn share_descriptors(&self, bound: &Bound, numbers: &[RawFd]) -> Result<()> {
        if numbers.is_empty() {
            return Ok(());
        }
        let (thread, nowhere) = (own_thread::id(), &self.nowhere);
        let share = move |number: RawFd| {
            let failed = |cause| Error::system("share", format!("descriptor {number}"), cause);
            let copy = copied_descriptor(thread, number).map_err(failed)?;
            bound.check_descriptor(number, copy.as_fd())?;
            nowhere.place_over(copy, number).map_err(failed)
        };
        let shared = self.on_pager_thread(move || {
            for (done, number) in numbers.iter().enumerate() {
                if let Err(why) = share(*number) {
                    // What is at the others is a thread's of the domain's.
                    for number in numbers.iter().take(done) {
                        nowhere.vacate(*number);
                    }
                    return Err(why);
                }
            }
            Ok(())
        });
        // What is not there any more only the region has a name for.
        shared.map_err(|why| {
            let lost = numbers.iter().try_for_each(|number| bound.check_descriptor(*number, borrow_number(*number)));
            lost.err().unwrap_or(why)
        })
    }

    /// Takes the descriptors of a region that is gone from the pager threads.
    pub(crate) fn release_descriptors(&self, numbers: &[RawFd]) {
        if !numbers.is_empty() {
            let nowhere = &self.nowhere;
            self.on_pager_thread(move || numbers.iter().for_each(|number| nowhere.vacate(*number)));
        }
    }
}

/// Ends something on a thread of its own. Why not, where that can be said: in a forked child whoever listens may wait for a thread of the
/// parent's.
pub(crate) fn end_on_another(end: impl FnOnce() + Send + 'static) -> Option<io::Error> {
    let started = pthread::start(c"selfpage-end", PROGRAM_STACK_BYTES, end);
    started.err().filter(|_| !crate::fork::is_child())
}

fn start_others(inner: &Arc<Inner>, queue: Arc<worker::Queue>) -> io::Result<()> {
    for _ in 1..inner.config.pagers {
        inner.keep(start(inner, c"selfpage-pager", pager::serve)?);
    }
    for _ in 0..inner.config.workers {
        let queue = queue.clone();
        inner.keep(start(inner, c"selfpage-worker", move |inner| worker::serve(inner, &queue))?);
    }
    if let Some(to) = &inner.config.trace {
        match trace::Writer::begin(to) {
            Ok(writer) => inner.keep(start(inner, c"selfpage-trace", move |inner| writer.run(inner))?),
            // The program goes on, as where its own trace cannot be written any more.
            Err(why) if inner.writing.is_inherited() => {
                inner.writing.end(&format!("there is no trace of this process: {why}"))
            }
            Err(why) => return Err(why.into()),
        }
    }
    inner.keep(start(inner, c"selfpage-evict", |inner| evictor::run(inner))?);
    inner.keep(start(inner, c"selfpage-save", |inner| evictor::save(inner))?);
    Ok(())
}

/// Starts a thread of the domain's, in the caller's descriptor table.
pub(crate) fn start(
    inner: &Arc<Inner>,
    name: &'static CStr,
    work: impl FnOnce(&Arc<Inner>) + Send + 'static,
) -> io::Result<Pthread> {
    let own = inner.clone();
    thread::start(name, move || work(&own))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel};
    use std::time::{Duration, Instant};

    use selfpage_core::addr::PAGE_BYTES;

    use crate::domain::Domain;
    use crate::handler::{Answer, FaultHandler, MemoryFault};
    use crate::trap::errand;

    /// It lets the access go on, and then has a pager thread do something.
    struct GoesOn(Sender<()>);

    impl FaultHandler for GoesOn {
        fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
            // SAFETY: region-contents: nobody refers to the page.
            unsafe { fault.map(&[7; PAGE_BYTES]) }.unwrap();
            // Time for the program to drop the domain.
            std::thread::sleep(Duration::from_millis(300));
            errand::send(fault.inner.state(), &fault.inner.errands, || ());
            self.0.send(()).unwrap();
            Answer::Handled
        }

        fn asks_first(&self) -> bool {
            true
        }
    }

    #[test]
    fn a_domain_ends_whose_last_hold_a_thread_of_its_own_drops() {
        let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
        let inner = domain.life().inner.clone();
        let left = Arc::downgrade(&inner);
        inner.on_pager_thread(move || drop(domain));
        drop(inner);
        let began = Instant::now();
        while left.strong_count() > 0 {
            assert!(began.elapsed() < Duration::from_secs(10), "its threads have not ended");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_domain_ends_after_the_handlers_that_need_its_threads() {
        let (tell, told) = channel();
        std::thread::spawn(|| {
            let domain = Domain::with_frames(16 * PAGE_BYTES).build().unwrap();
            let region = domain.region(PAGE_BYTES).handler(GoesOn(tell)).zero().unwrap();
            assert_eq!(region.as_slice::<u8>()[0], 7);
        });
        told.recv_timeout(Duration::from_secs(10)).expect("a pager thread for the handler");
    }
}
