//! `GrowVec` against `Vec`.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use selfpage::alloc::{self, GrowVec, OutOfMemory};

use crate::child::in_child;
use crate::own_process;
use crate::random::{Random, seed};

#[test]
fn it_does_what_vec_does() {
    let mut random = Random(seed());
    let (mut ours, mut model) = (GrowVec::new(), Vec::new());
    let has_a_page_to_spare = |ours: &GrowVec<_>| (ours.capacity() - ours.len()) * 8 < 4096 + 8;
    for _ in 0..20_000 {
        let capacity = ours.capacity();
        let item = Rc::new(random.next());
        let at = random.below(model.len() + 1);
        match random.below(10) {
            8 if random.below(50) == 0 => {
                let mut parity = [random.next(), random.next()].into_iter().cycle();
                let keep: Vec<bool> = model.iter().map(|_| parity.next() > Some(1 << 63)).collect();
                let (mut first, mut second) = (keep.iter(), keep.iter());
                ours.retain(|_| *first.next().unwrap());
                model.retain(|_| *second.next().unwrap());
            }
            9 if random.below(50) == 0 => {
                let more: Vec<_> = (0..random.below(2000)).map(|_| item.clone()).collect();
                let (mut other, mut others) = (more.iter().cloned().collect(), more);
                ours.append(&mut other);
                model.append(&mut others);
                assert!(other.is_empty() && *ours == *model);
            }
            0..=3 => (ours.push(item.clone()), model.push(item)).1,
            4 => (ours.insert(at, item.clone()), model.insert(at, item)).1,
            5 if at < model.len() => assert_eq!(ours.remove(at), model.remove(at)),
            6 if at < model.len() => assert_eq!(ours.swap_remove(at), model.swap_remove(at)),
            7 => assert_eq!(ours.pop(), model.pop()),
            _ => (ours.shrink_to_fit(), model.shrink_to_fit()).1,
        }
        assert_eq!(ours.len(), model.len());
        assert!(ours.capacity() <= capacity || has_a_page_to_spare(&ours), "it grew by more than it needs");
    }
    assert_eq!(*ours, *model);
    ours.shrink_to_fit();
    assert!(has_a_page_to_spare(&ours) || ours.is_empty());
    let last = model.last().cloned();
    assert!(ours.clone() == ours && ours.clone().into_iter().eq(model.clone()));
    assert!(ours.clone().into_iter().rev().eq(model.iter().rev().cloned()));
    assert_eq!((ours.as_ref(), ours.cmp(&ours.clone())), (&model[..], Ordering::Equal));
    assert_eq!(ours.partial_cmp(&GrowVec::new()), Some(model.len().cmp(&0)));
    let hash = |vec: &dyn Fn(&mut DefaultHasher)| {
        let mut hasher = DefaultHasher::new();
        vec(&mut hasher);
        hasher.finish()
    };
    assert_eq!(hash(&|hasher| ours.hash(hasher)), hash(&|hasher| model.hash(hasher)));
    let mut half = ours.into_iter();
    half.next();
    half.next_back();
    drop(half);
    drop(model);
    assert!(last.is_none_or(|last| Rc::strong_count(&last) == 1), "an item was leaked");
}

#[test]
fn what_panics_is_dropped_once_and_the_rest_too() {
    struct Bomb(#[expect(dead_code, reason = "counts those that were not dropped")] Rc<()>, bool);
    impl Drop for Bomb {
        fn drop(&mut self) {
            assert!(!self.1, "a bomb");
        }
    }
    let count = Rc::new(());
    let make = || (0..10).map(|at| Bomb(count.clone(), at == 4)).collect::<GrowVec<Bomb>>();
    assert!(catch_unwind(AssertUnwindSafe(|| make().truncate(2))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| drop(make()))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| drop(make().into_iter().nth(1)))).is_err());
    assert_eq!(Rc::strong_count(&count), 1);
    let quiet = || (0..10).map(|_| Bomb(count.clone(), false)).collect::<GrowVec<Bomb>>();
    let mut at = 0;
    let asked = |_: &Bomb| {
        at += 1;
        assert!(at < 6, "asked");
        at % 2 == 0
    };
    let mut kept = quiet();
    assert!(catch_unwind(AssertUnwindSafe(|| kept.retain(asked))).is_err());
    assert_eq!((kept.len(), Rc::strong_count(&count)), (10, 11));
    drop(kept);
    assert_eq!(Rc::strong_count(&count), 1);
    let made = catch_unwind(AssertUnwindSafe(|| {
        (0..10).map(|at| if at == 5 { panic!("an item") } else { count.clone() }).collect::<GrowVec<_>>()
    }));
    assert!(made.is_err());
    assert_eq!(Rc::strong_count(&count), 1);
}

#[test]
fn items_without_size_and_with_alignment() {
    #[repr(align(1048576))]
    #[derive(Clone, Debug, PartialEq)]
    struct Wide(u8);
    let mut none: GrowVec<()> = GrowVec::new();
    none.resize(1_000_000, ());
    assert_eq!((none.len(), none.capacity(), none.pop()), (1_000_000, usize::MAX, Some(())));
    let mut wide = GrowVec::new();
    (0..20).for_each(|at| wide.push(Wide(at)));
    assert!(wide.iter().enumerate().all(|(at, item)| item.0 == at as u8 && (item as *const Wide).is_aligned()));
    let mut words: GrowVec<u64> = GrowVec::with_capacity(10);
    assert_eq!(words.try_reserve(usize::MAX), Err(OutOfMemory));
    words.extend_from_slice(&[1, 2, 3]);
    words[1] = 5;
    assert_eq!(format!("{words:?}"), "[1, 5, 3]");
}

/// Faults of this thread so far.
fn faults() -> i64 {
    // SAFETY: the structure is numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: it outlives the call.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_minflt
}

/// A copy would touch the place that it goes to: 64 huge pages at least.
#[test]
fn a_long_one_grows_by_frames_and_copies_nothing() {
    own_process::run("vector::a_long_one_grows_by_frames_and_copies_nothing", || {
        const MIB: usize = (1 << 20) / size_of::<u64>();
        let mut vec: GrowVec<u64> = (0..128 * MIB as u64).collect();
        let begin = vec.as_ptr();
        let grown_to = |vec: &mut GrowVec<u64>, mib: usize| {
            let (before, faults_before) = (alloc::stats().counts, faults());
            vec.reserve(mib * MIB - vec.len());
            assert!(faults() - faults_before < 32, "{} faults for {mib} MiB", faults() - faults_before);
            assert_eq!(vec.capacity(), mib * MIB, "it has room that nobody asked for");
            let after = alloc::stats().counts;
            (after.in_place - before.in_place, after.moved - before.moved)
        };
        // There is room behind it, up to four times the length that it began with.
        assert_eq!((grown_to(&mut vec, 300), vec.as_ptr()), ((1, 0), begin));
        assert_eq!(grown_to(&mut vec, 1024), (0, 1));
        assert_ne!(vec.as_ptr(), begin);
        assert_eq!(grown_to(&mut vec, 1300), (1, 0));
        assert!(vec.iter().enumerate().all(|(at, item)| *item == at as u64));
    });
}

#[test]
fn it_takes_the_place_of_a_vec() {
    let items = vec![3u64, 1, 2];
    let ours = GrowVec::from(items.clone());
    assert_eq!(ours, items);
    assert_eq!(ours, items[..]);
    assert_eq!(ours, &items[..]);
    assert_eq!(ours, [3, 1, 2]);
    assert!(ours != [3, 1]);
    assert_eq!(GrowVec::from(&items[1..]), [1, 2]);
    // By what it borrows as: the same hash.
    assert!(HashSet::from([ours]).contains(&items[..]));
}

#[test]
fn bytes_are_written_behind_those_that_are_there() {
    let mut bytes = GrowVec::from(&b"one"[..]);
    write!(bytes, ", {}", 2).unwrap();
    assert_eq!(bytes, *b"one, 2");
}

#[test]
fn an_item_that_there_is_no_memory_for_comes_back() {
    own_process::run("vector::an_item_that_there_is_no_memory_for_comes_back", || {
        let count = Rc::new(());
        let mut vec = GrowVec::new();
        assert_eq!(vec.try_push((1, count.clone())), Ok(()));
        // More than this process has already: it is given no more.
        let none = libc::rlimit { rlim_cur: 1 << 20, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: it outlives the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const none) }, 0);
        let refused = (2..).find_map(|at| vec.try_push((at, count.clone())).err()).unwrap();
        assert_eq!((refused.0, vec.len(), vec.capacity()), (vec.len() + 1, vec.len(), vec.len()));
        assert_eq!(Rc::strong_count(&count), 2 + vec.len());
        assert!(vec.iter().map(|(at, _)| *at).eq(1..=vec.len()));
        // There is room for what is taken out.
        assert!(vec.pop().is_some() && vec.try_push(refused).is_ok());
    });
}

#[test]
fn items_are_written_to_the_room_behind_and_counted() {
    let count = Rc::new(());
    let mut vec = GrowVec::from(vec![count.clone()]);
    assert_eq!(GrowVec::<u64>::new().spare_capacity_mut().len(), 0);
    vec.reserve(1000);
    let capacity = vec.capacity();
    let room = vec.spare_capacity_mut();
    assert_eq!(room.len(), capacity - 1);
    for place in room {
        place.write(count.clone());
    }
    // SAFETY: all of its room was written.
    unsafe { vec.set_len(capacity) };
    assert!(vec.spare_capacity_mut().is_empty() && vec.iter().all(|item| Rc::ptr_eq(item, &count)));
    // SAFETY: an item of its own, which is none of the vector's any more.
    let last = unsafe {
        vec.set_len(capacity - 1);
        vec.spare_capacity_mut()[0].assume_init_read()
    };
    assert_eq!((vec.len(), Rc::strong_count(&count)), (capacity - 1, 1 + capacity));
    drop((vec, last));
    assert_eq!(Rc::strong_count(&count), 1);
    let mut none = GrowVec::new();
    assert_eq!(none.spare_capacity_mut().len(), usize::MAX);
    // SAFETY: items without a size.
    unsafe { none.set_len(3) };
    assert_eq!(none, [(); 3]);
}

#[test]
fn it_comes_of_arrays_and_references_and_becomes_a_vec() {
    let mut ours = GrowVec::from([1, 2, 3]);
    ours.extend(&[4, 5]);
    ours.extend([6]);
    assert_eq!(Vec::from(ours), [1, 2, 3, 4, 5, 6]);
    assert_eq!(GrowVec::from([Rc::new(7)]), [Rc::new(7)]);
}

#[test]
fn forks_beside_a_vector_that_grows_leave_the_child_one_of_its_own() {
    own_process::run("vector::forks_beside_a_vector_that_grows_leave_the_child_one_of_its_own", || {
        const BYTES: usize = 3 << 20;
        let (begun, ends) = (Barrier::new(2), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drop(GrowVec::<u8>::with_capacity(BYTES));
                begun.wait();
                while !ends.load(Relaxed) {
                    drop(GrowVec::<u8>::with_capacity(BYTES));
                }
            });
            begun.wait();
            let ended = |_| {
                in_child(|| {
                    // A lock that nobody gives back would hold it for ever.
                    // SAFETY: test: a call without pointers.
                    unsafe { libc::alarm(60) };
                    GrowVec::<u8>::with_capacity(BYTES).capacity() >= BYTES
                })
            };
            let failed = (0..200).map(ended).find(|ended| *ended != 0);
            ends.store(true, Relaxed);
            assert_eq!(failed, None, "how the child ended");
        });
    });
}
