//! What a domain is made of.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use selfpage_core::addr::PAGE_BYTES;
use selfpage_core::fault::Failure;
use selfpage_core::frame::Table;
use selfpage_core::policy::{self, Link, Policy};

use crate::domain::Domain;
use crate::error::{Error, Kind, Result};
use crate::trace::Destination;

/// A domain needs some frames to turn around in.
pub(crate) const LEAST_FRAMES: u32 = 16;

/// How many its lists can number.
const MOST_FRAMES: u32 = u32::MAX / 2 - 1;

/// More would only wait for one another.
const MOST_WORKERS: u32 = 64;

/// Whose descriptor table holds the domain's descriptors. Pager threads have a table of their own in either case. Of the program's files it has
/// what a pager of the program's names ([`UserPager::descriptors`](crate::pager::UserPager::descriptors)), and the standard streams
/// where it is said below.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DescriptorTable {
    /// The program's table and the pager threads', which has the standard streams that there were when the domain was built. The program's
    /// threads can act on their own.
    Shared,
    /// The pager threads' alone, without standard streams: the program never sees them, and every call on the domain is made by a pager thread for it.
    /// Upcall regions need [`DescriptorTable::Shared`]. A store in a file is one domain's, and ends with the last region that uses it
    /// ([`crate::RegionBuilder::stored_in`]).
    Private,
}

/// Whether a domain's frames are locked in memory, so that the kernel never swaps them out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Locking {
    /// Pool and regions are locked as long as this process may lock so much: `RLIMIT_MEMLOCK` covers them all, with what else the
    /// process has locked, or it has `CAP_IPC_LOCK`. [`crate::FramePool::residence`] says whether they are.
    WherePermitted,
    /// Nothing is locked: for a program that needs its limit for memory of its own, or that uses those calls of madvise(2) on regions
    /// which locked pages refuse.
    Never,
}

/// The policy to be, once the domain has memory for its lists.
pub(crate) enum Choice {
    Named(String),
    Own(Box<dyn Policy>),
}

impl Choice {
    /// The policy, whose name was checked, over a zeroed table of one link for each frame that there can be.
    pub(crate) fn over(self, links: Table<Link>) -> Box<dyn Policy> {
        match self {
            Choice::Own(policy) => policy,
            Choice::Named(name) => Box::new(policy::by_name(&name, links).expect("one of core's")),
        }
    }

    /// The part of the frames that it wants on standby, in 1/256: half at most. A policy may say anything, and a domain needs frames in use.
    pub(crate) fn standby_share(&self) -> u8 {
        let share = match self {
            Choice::Own(policy) => policy.standby_share(),
            Choice::Named(name) => policy::by_name(name, Table::empty()).expect("one of core's").standby_share(),
        };
        share.min(128)
    }
}

/// What stays settled while a domain lives.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) frames: u32,
    pub(crate) most_frames: u32,
    pub(crate) pagers: u32,
    pub(crate) workers: u32,
    pub(crate) needs_system_calls: bool,
    pub(crate) descriptor_table: DescriptorTable,
    pub(crate) locking: Locking,
    pub(crate) populated: bool,
    pub(crate) on_failure: Option<fn(usize, Failure)>,
    pub(crate) trace: Option<Destination>,
}

/// A domain to be.
#[must_use = "it is no domain until `build`"]
pub struct Config {
    settings: Settings,
    policy: Choice,
    frames_bytes: usize,
    room_bytes: usize,
}

impl Config {
    pub(crate) fn new(frames_bytes: usize) -> Config {
        let frames = frames_of(frames_bytes);
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32);
        let settings = Settings {
            frames,
            most_frames: frames,
            pagers: 3,
            workers: cpus.clamp(1, 4),
            needs_system_calls: false,
            descriptor_table: DescriptorTable::Shared,
            locking: Locking::WherePermitted,
            populated: false,
            on_failure: None,
            trace: None,
        };
        Config { settings, policy: Choice::Named("lru".into()), frames_bytes, room_bytes: frames_bytes }
    }

    /// The policy, by one of [`POLICIES`](crate::POLICIES). `lru` unless stated otherwise.
    pub fn policy(mut self, name: &str) -> Config {
        self.policy = Choice::Named(name.into());
        self
    }

    /// A policy of the program's own.
    pub fn own_policy(mut self, policy: Box<dyn Policy>) -> Config {
        self.policy = Choice::Own(policy);
        self
    }

    /// Room for frames added later ([`Domain::add_frames`]): slots for `bytes` of frames in all. In bytes, as
    /// [`Domain::with_frames`] takes them; fewer than it begins with are refused.
    pub fn most_frames(mut self, bytes: usize) -> Config {
        self.settings.most_frames = frames_of(bytes);
        self.room_bytes = bytes;
        self
    }

    /// How many threads read faults of worker regions; by default one a CPU, up to 4; 1 to 64. Where they run code of the program's
    /// own one more only looks on.
    pub fn workers(mut self, count: u32) -> Config {
        self.settings.workers = count;
        self
    }

    /// Fail to build where faults inside system calls cannot be served, in place of doing without.
    pub fn needs_system_calls(mut self) -> Config {
        self.settings.needs_system_calls = true;
        self
    }

    /// Whose descriptor table holds the domain's descriptors.
    pub fn descriptor_table(mut self, table: DescriptorTable) -> Config {
        self.settings.descriptor_table = table;
        self
    }

    /// Whether frames are locked in memory: [`Locking::WherePermitted`] unless stated otherwise.
    pub fn locking(mut self, locking: Locking) -> Config {
        self.settings.locking = locking;
        self
    }

    /// Gives all frames that the domain begins with their memory in [`Config::build`], in place of when they are first needed: they are held
    /// then, whatever others take, and no fault waits for them. Those of a forked child, and what [`Domain::add_frames`] adds, come as needed.
    pub fn populated(mut self) -> Config {
        self.settings.populated = true;
        self
    }

    /// What to call, with the address and the cause, before an access that cannot be satisfied gets its `SIGBUS` (`SIGSEGV`
    /// in a worker region for a write whose page a clone cannot have first, and for a page whose frame the machine would not map); in place of a line on standard error.
    ///
    /// # Context
    /// The function runs in a trap: it must not allocate, lock, or touch managed memory.
    pub fn on_failure(mut self, callback: fn(usize, Failure)) -> Config {
        self.settings.on_failure = Some(callback);
        self
    }

    /// Writes what happens to each page to a file: see [`crate::trace`]. Where the file is there already, it stays, and the trace
    /// goes to one beside it, with the number of the process at its end; so does that of a forked child. A directory is refused.
    ///
    /// The working set is estimated once in `working_set_every`, by a sample of 256 pages; zero: not at all.
    pub fn trace(mut self, path: impl Into<PathBuf>, working_set_every: Duration) -> Config {
        let path = path.into();
        // A forked child may be somewhere else.
        let path = std::path::absolute(&path).unwrap_or(path);
        self.settings.trace = Some(Destination { path, working_set_every });
        self
    }

    /// Builds the domain and starts its threads. Frames get memory when they are first needed.
    ///
    /// # Errors
    /// Too few or too many frames or workers, an unknown policy, or a kernel that lacks what is needed or refuses it: the error names the remedy.
    /// [`Kind::OutOfSpace`]: the system has no memory for frames that are to be [populated](Config::populated), or the process may have no more
    /// mappings or addresses. A pager, policy or store of the program's own asks for it.
    pub fn build(self) -> Result<Domain> {
        self.check()?;
        Domain::build(self.settings, self.policy)
    }

    fn check(&self) -> Result<()> {
        let Config { frames_bytes, room_bytes, ref settings, .. } = *self;
        let Settings { frames, most_frames, workers, .. } = *settings;
        let refused = |object, cause| Err(Error::new(Kind::Invalid, "build", object, cause));
        let with_frames = || format!("a domain with {frames_bytes} bytes of frames");
        let with_room = || format!("a domain with most_frames of {room_bytes} bytes");
        let too_many = || format!("a domain has at most {MOST_FRAMES} frames of {PAGE_BYTES} bytes");
        if frames < LEAST_FRAMES {
            let cause = format!("a domain needs {LEAST_FRAMES} frames of {PAGE_BYTES} bytes at least");
            return refused(with_frames(), cause);
        }
        if frames > MOST_FRAMES {
            return refused(with_frames(), too_many());
        }
        if most_frames > MOST_FRAMES {
            return refused(with_room(), too_many());
        }
        if most_frames < frames {
            return refused(with_room(), format!("it begins with {frames_bytes} bytes: give it room for those"));
        }
        if !(1..=MOST_WORKERS).contains(&workers) {
            return refused(format!("a domain with {workers} workers"), format!("a domain has 1 to {MOST_WORKERS}"));
        }
        if let Choice::Named(name) = &self.policy
            && !policy::NAMES.contains(&name.as_str())
        {
            let cause = format!("there is no such policy; there are {}", policy::NAMES.join(", "));
            return Err(Error::new(Kind::Invalid, "use", format!("policy {name:?}"), cause));
        }
        Ok(())
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let policy = match &self.policy {
            Choice::Named(name) => name,
            Choice::Own(_) => "of the program's own",
        };
        f.debug_struct("Config").field("policy", &policy).field("settings", &self.settings).finish_non_exhaustive()
    }
}

fn frames_of(bytes: usize) -> u32 {
    u32::try_from(bytes / PAGE_BYTES).unwrap_or(u32::MAX)
}
