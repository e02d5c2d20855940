//! Lists of frames, threaded through a table that somebody else supplied: what most policies keep their order in.

use crate::addr::Frame;
use crate::frame::Table;
use crate::sync::{AtomicU32, Ordering};

/// The place of one frame in a policy's order. Zeroed memory is a frame that no list has.
///
/// The fields are atomics only because a table is shared; a policy runs on one thread.
#[derive(Default)]
pub struct Link {
    /// The next older frame of the list, plus one.
    pub(super) older: AtomicU32,
    /// The next newer frame of the list, plus one.
    pub(super) newer: AtomicU32,
    /// The list that has the frame, plus one, and [`MARK`].
    list: AtomicU32,
}

const MARK: u32 = 1 << 31;

/// Both ends of a list, plus one, and its length.
#[derive(Clone, Copy)]
struct Ends {
    oldest: u32,
    newest: u32,
    len: u32,
}

/// Some lists of frames over one table. A frame is on one of them at most, and may carry a mark while it is.
pub struct Links<const LISTS: usize> {
    table: Table<Link>,
    lists: [Ends; LISTS],
}

impl<const LISTS: usize> Links<LISTS> {
    /// Empty lists over a zeroed table, one link a frame.
    pub const fn new(table: Table<Link>) -> Links<LISTS> {
        Links { table, lists: [Ends { oldest: 0, newest: 0, len: 0 }; LISTS] }
    }

    /// How many frames `list` has.
    pub fn len(&self, list: usize) -> u32 {
        self.lists.get(list).map_or(0, |ends| ends.len)
    }

    /// Whether `list` has none.
    pub fn is_empty(&self, list: usize) -> bool {
        self.len(list) == 0
    }

    /// The list that `frame` is on.
    pub fn list_of(&self, frame: Frame) -> Option<usize> {
        let list = get(&self.table.get(frame.0 as usize)?.list) & !MARK;
        list.checked_sub(1).map(|list| list as usize)
    }

    /// Makes `frame` the newest of `list`, unmarked, wherever it was before. A frame or list that does not exist is ignored.
    pub fn push_newest(&mut self, list: usize, frame: Frame) {
        self.unlink(frame);
        let (Some(link), Some(ends)) = (self.table.get(frame.0 as usize), self.lists.get_mut(list)) else { return };
        set(&link.list, list as u32 + 1);
        set(&link.older, ends.newest);
        set(&link.newer, 0);
        match entry(&self.table, ends.newest) {
            Some(before) => set(&before.newer, frame.0 + 1),
            None => ends.oldest = frame.0 + 1,
        }
        ends.newest = frame.0 + 1;
        ends.len += 1;
    }

    /// Takes `frame` off its list, if it is on one.
    pub fn unlink(&mut self, frame: Frame) {
        let Some(list) = self.list_of(frame) else { return };
        let (Some(link), Some(ends)) = (self.table.get(frame.0 as usize), self.lists.get_mut(list)) else { return };
        let (older, newer) = (get(&link.older), get(&link.newer));
        match entry(&self.table, older) {
            Some(older) => set(&older.newer, newer),
            None => ends.oldest = newer,
        }
        match entry(&self.table, newer) {
            Some(newer) => set(&newer.older, older),
            None => ends.newest = older,
        }
        set(&link.list, 0);
        ends.len -= 1;
    }

    /// The oldest frame of `list`.
    pub fn oldest(&self, list: usize) -> Option<Frame> {
        self.lists.get(list)?.oldest.checked_sub(1).map(Frame)
    }

    /// Takes the oldest frame of `list`.
    pub fn pop_oldest(&mut self, list: usize) -> Option<Frame> {
        let frame = self.oldest(list)?;
        self.unlink(frame);
        Some(frame)
    }

    /// Takes the newest frame of `list`.
    pub fn pop_newest(&mut self, list: usize) -> Option<Frame> {
        let frame = self.lists.get(list)?.newest.checked_sub(1).map(Frame)?;
        self.unlink(frame);
        Some(frame)
    }

    /// Marks `frame`, if it is on a list.
    pub fn mark(&mut self, frame: Frame) {
        if let Some(link) = self.table.get(frame.0 as usize)
            && get(&link.list) != 0
        {
            set(&link.list, get(&link.list) | MARK);
        }
    }

    /// Whether `frame` is marked.
    pub fn marked(&self, frame: Frame) -> bool {
        self.table.get(frame.0 as usize).is_some_and(|link| get(&link.list) & MARK != 0)
    }
}

fn entry(table: &Table<Link>, index_plus_one: u32) -> Option<&Link> {
    table.get(index_plus_one.checked_sub(1)? as usize)
}

pub(super) fn get(cell: &AtomicU32) -> u32 {
    cell.load(Ordering::Relaxed)
}

pub(super) fn set(cell: &AtomicU32, value: u32) {
    cell.store(value, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::super::traces::links;
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const FRAMES: u32 = 12;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Push(usize, u32),
        Unlink(u32),
        PopOldest(usize),
        PopNewest(usize),
        Mark(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        // One list and two frames that do not exist are among them.
        prop_oneof![
            4 => (0..4usize, 0..FRAMES + 2).prop_map(|(list, frame)| Step::Push(list, frame)),
            2 => (0..FRAMES + 2).prop_map(Step::Unlink),
            1 => (0..4usize).prop_map(Step::PopOldest),
            1 => (0..4usize).prop_map(Step::PopNewest),
            1 => (0..FRAMES + 2).prop_map(Step::Mark),
        ]
    }

    #[derive(Default)]
    struct Model {
        lists: [VecDeque<(u32, bool)>; 3],
    }

    impl Model {
        fn drop(&mut self, frame: u32) {
            self.lists.iter_mut().for_each(|list| list.retain(|entry| entry.0 != frame));
        }

        fn find(&self, frame: u32) -> Option<(usize, bool)> {
            self.lists
                .iter()
                .enumerate()
                .find_map(|(list, entries)| entries.iter().find(|entry| entry.0 == frame).map(|entry| (list, entry.1)))
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 1 } else { 256 },
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn links_do_what_queues_do(steps in prop::collection::vec(step(), 0..if cfg!(miri) { 40 } else { 200 })) {
            let mut real = Links::<3>::new(links(FRAMES));
            let mut model = Model::default();
            for step in steps {
                match step {
                    Step::Push(list, frame) => {
                        real.push_newest(list, Frame(frame));
                        model.drop(frame);
                        if frame < FRAMES && let Some(list) = model.lists.get_mut(list) {
                            list.push_back((frame, false));
                        }
                    }
                    Step::Unlink(frame) => {
                        real.unlink(Frame(frame));
                        model.drop(frame);
                    }
                    Step::PopOldest(list) => prop_assert_eq!(
                        real.pop_oldest(list).map(|frame| frame.0),
                        model.lists.get_mut(list).and_then(|list| list.pop_front()).map(|entry| entry.0)
                    ),
                    Step::PopNewest(list) => prop_assert_eq!(
                        real.pop_newest(list).map(|frame| frame.0),
                        model.lists.get_mut(list).and_then(|list| list.pop_back()).map(|entry| entry.0)
                    ),
                    Step::Mark(frame) => {
                        real.mark(Frame(frame));
                        for entry in model.lists.iter_mut().flatten().filter(|entry| entry.0 == frame) {
                            entry.1 = true;
                        }
                    }
                }
                for frame in 0..FRAMES + 2 {
                    let expected = model.find(frame);
                    prop_assert_eq!(real.list_of(Frame(frame)), expected.map(|found| found.0));
                    prop_assert_eq!(real.marked(Frame(frame)), expected.is_some_and(|found| found.1));
                }
                for (list, entries) in model.lists.iter().enumerate() {
                    prop_assert_eq!(real.len(list) as usize, entries.len());
                    prop_assert_eq!(real.oldest(list).map(|frame| frame.0), entries.front().map(|entry| entry.0));
                }
            }
        }
    }
}
