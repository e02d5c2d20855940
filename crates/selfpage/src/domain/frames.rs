//! The frames of a domain: how many it may hold, and whether they have memory.

use selfpage_core::fault::{Failure, range};
use selfpage_core::shortage::Shortage;
use selfpage_core::stack;

use super::{Domain, Inner};
use crate::error::{Error, Kind, Result};

impl Domain {
    /// Lets the domain hold `frames` more, up to the pool's size.
    ///
    /// # Units
    /// Frames of [`PAGE_BYTES`](crate::PAGE_BYTES) bytes, where [`Domain::with_frames`] and [`Config::most_frames`](crate::Config::most_frames) are told bytes.
    ///
    /// # Errors
    /// The process is a forked child that did not get the domain. The pool has no slots for them: make it larger with [`Config::most_frames`](crate::Config::most_frames).
    pub fn add_frames(&self, frames: u32) -> Result<()> {
        self.life.inner.is_here("add", || format!("{frames} frames"))?;
        let _regions = self.life.inner.regions();
        let stack = &self.life.inner.state.stack;
        if stack.budget().saturating_add(frames) > self.life.inner.pool.frames() {
            let (now, most) = (stack.budget(), self.life.inner.pool.frames());
            let cause = format!(
                "the domain has {now} frames, and its pool has room for {most}: add {} at most, or build it with more room \
                 (Config::most_frames, in bytes)",
                most.saturating_sub(now)
            );
            return Err(Error::new(Kind::OutOfSpace, "add", format!("{frames} frames"), cause));
        }
        stack.extend(self.life.inner.state.mmu, frames);
        self.life.inner.set_reserve();
        Ok(())
    }

    /// Takes `frames` frames away from the domain and gives their memory back to the system; waits for them to be freed.
    ///
    /// # Units
    /// Frames of [`PAGE_BYTES`](crate::PAGE_BYTES) bytes, where [`Domain::with_frames`] is told bytes.
    ///
    /// # Errors
    /// The process is a forked child that did not get the domain. Too few would be left, or too many pages are held in core. Those that could be taken are taken: see
    /// [`Domain::contract`].
    pub fn remove_frames(&self, frames: u32) -> Result<()> {
        let object = || format!("{frames} frames");
        self.life.inner.is_here("remove", object)?;
        let _regions = self.life.inner.regions();
        let state = &self.life.inner.state;
        if state.stack.budget().saturating_sub(frames) < crate::config::LEAST_FRAMES {
            let (now, least) = (state.stack.budget(), crate::config::LEAST_FRAMES);
            let most = now.saturating_sub(least);
            let cause = format!("the domain has {now} frames, and needs {least} at least: remove {most} at most");
            return Err(Error::new(Kind::Invalid, "remove", object(), cause));
        }
        let taken = self.life.inner.on_table(move |_| range::give_up(state, frames));
        self.life.inner.set_reserve();
        match taken {
            Ok(()) => Ok(()),
            Err(Failure::Shortage(Shortage::AllHeld)) => {
                let cause = format!(
                    "the pages in the others are pinned, by the program, the kernel or a device, or their pager has nowhere to save \
                     them, or the policy names none that can go: unpin or discard some, and remove the rest again; the domain has {} frames now",
                    state.stack.budget()
                );
                Err(Error::new(Kind::Held, "remove", object(), cause))
            }
            Err(failure) => Err(Error::failure("remove", object(), failure)),
        }
    }
}

impl Inner {
    /// Gives all frames memory.
    pub(super) fn populate(&self) -> Result<()> {
        if self.on_table(|_| stack::claim_all(&self.state)) {
            return Ok(());
        }
        let (has, frames) = (self.state.stack.claimed(), self.config.frames);
        let cause = format!(
            "the system has memory for {has} of them: take fewer, or let them come as they are needed (no `populated`)"
        );
        Err(Error::new(Kind::OutOfSpace, "populate", format!("a domain of {frames} frames"), cause))
    }
}
