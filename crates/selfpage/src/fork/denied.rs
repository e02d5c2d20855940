//! What a child would have to open, tried before the fork: a process that has limited itself (Landlock), or given up its rights, may not.

use std::io;
use std::sync::atomic::Ordering;

use super::turn::TURN;
use crate::cancel::Uncancelled;
use crate::doctor::limits::undumpable;
use crate::domain::Inner;
use crate::error::{Error, Kind, Result};
use crate::{descriptors, undisturbed};

const REMEDY: &str = "a forked child must open it anew: keep the right to that, and have what limits this thread (Landlock) \
                      allow it to read below /proc, and to read and write the store's file or directory";

/// Tries on the calling thread, whose limits a child will have. Anything but a refusal, and a store that as many processes share as can, is
/// for the fork to meet.
pub(crate) fn check(inner: &Inner) -> Result<()> {
    // fork(2) is no point of cancellation, and files are.
    let _uncancelled = Uncancelled::begin();
    let stores: Vec<_> = inner.regions().values().filter_map(|bound| bound.store().cloned()).collect();
    let mut known = Vec::new();
    // No other thread forks meanwhile: its child would have what is opened here.
    let _turn = undisturbed::lock(&TURN);
    // What is refused for want of rights has one of these kinds.
    if let Err(error) = descriptors::memory_can_be_opened()
        && matches!(error.kind(), Kind::Denied | Kind::Unsupported)
    {
        return Err(if undumpable().is_some() { error } else { error.with(REMEDY) });
    }
    let table_of = inner.table_thread.load(Ordering::Acquire) as i32;
    for store in stores {
        if known.contains(&store.identity()) {
            continue;
        }
        known.push(store.identity());
        match store.check_fork(table_of) {
            Err(why) if is_refusal(&why.cause) => {
                let object = format!("store {}", why.object);
                return Err(Error::new(Kind::Denied, "open", object, format!("{}; {REMEDY}", why.cause)));
            }
            Err(why) if why.cause.kind() == io::ErrorKind::QuotaExceeded => return Err(why.into()),
            _ => {}
        }
    }
    if let Err(error) = descriptors::faults_can_be_told(&inner.config)
        && matches!(error.kind(), Kind::Denied | Kind::Unsupported)
    {
        return Err(error.with("a forked child must open one anew: keep the right to that"));
    }
    Ok(())
}

fn is_refusal(why: &io::Error) -> bool {
    matches!(why.raw_os_error(), Some(libc::EACCES | libc::EPERM))
}
