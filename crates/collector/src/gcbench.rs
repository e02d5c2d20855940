//! GCBench: trees of several sizes, built from the root down and from the leaves up, beside a tree and an array that live long.
//!
//! # Source
//! Ellis, Kovac and Boehm's benchmark, as in Cichlid §4.5 (Figure 6, Table 6); the numbers that it prints are returned here.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use crate::library::Library;
use crate::{Error, Pauses, is_first_thread};

/// Where a node comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lists {
    /// `GC_malloc`: free lists of the thread's own. In manual mode they are filled with one object at a time (`mallocx.c` of 8.2).
    Thread,
    /// `GC_malloc_kind_global`: the lists of all threads.
    Shared,
}

/// The kind of an object that may hold pointers anywhere (`GC_I_NORMAL`).
const NORMAL: c_int = 1;

/// A collector, and how it is asked for nodes.
#[derive(Clone, Copy)]
struct Heap<'a> {
    library: &'a Library,
    lists: Lists,
}

/// How large everything is.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// The depth of the first tree, which stretches the heap. The tree that lives long is two less deep, and so is the deepest
    /// of the others.
    pub stretch_depth: u32,
}

/// The depth of the least tree.
const LEAST_DEPTH: u32 = 4;

/// What a run took.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// All of it.
    pub elapsed: Duration,
    /// Collections that came to their end.
    pub collections: usize,
    /// How long all threads stood still.
    pub pauses: Pauses,
    /// The heap in the end.
    pub heap_bytes: usize,
    /// The objects that live in the end, each checked: nodes of the tree, and the array.
    pub live_objects: u64,
    /// The objects that the collector took for reachable then. It guesses what is a pointer, so these may be more.
    pub reachable_objects: u64,
}

#[repr(C)]
struct Node {
    left: *mut Node,
    right: *mut Node,
    i: c_int,
    j: c_int,
}

impl Size {
    fn long_lived_depth(self) -> u32 {
        self.stretch_depth - 2
    }

    /// 500,000 doubles at the original depth of 18.
    fn array_len(self) -> usize {
        (500_000usize << self.stretch_depth) >> 18
    }

    /// Builds of trees of a depth: each depth allocates as much as two trees that stretch the heap.
    fn builds(self, depth: u32) -> u64 {
        2 * nodes(self.stretch_depth) / nodes(depth)
    }
}

/// The nodes of a tree.
fn nodes(depth: u32) -> u64 {
    (1 << (depth + 1)) - 1
}

/// Runs it once, on the program's first thread.
///
/// # Errors
/// `Thread`. `Objects`: what lived long is not what it was.
pub fn run(library: &Library, size: Size, lists: Lists) -> Result<Outcome, Error> {
    if !is_first_thread() {
        return Err(Error::Thread);
    }
    // SAFETY: collector-call: reads a word.
    let collections = || unsafe { (library.collections)() };
    let (began, began_collections) = (Instant::now(), collections());
    let heap = Heap { library, lists };
    heap.make_tree(size.stretch_depth);
    let tree = heap.make_leaf();
    heap.populate(size.long_lived_depth(), tree);
    let len = size.array_len();
    // SAFETY: collector-call: started on this thread.
    let array: *mut f64 = unsafe { (library.malloc_atomic)(len * size_of::<f64>()) }.cast();
    assert!(!array.is_null(), "the collector has no memory");
    for i in 0..len / 2 {
        // SAFETY: collector-object: of that length, and reachable.
        unsafe { array.add(i).write(1.0 / (i as f64 + 1.0)) };
    }
    for depth in (LEAST_DEPTH..=size.long_lived_depth()).step_by(2) {
        for _ in 0..size.builds(depth) {
            heap.populate(depth, heap.make_leaf());
        }
        for _ in 0..size.builds(depth) {
            heap.make_tree(depth);
        }
    }
    let elapsed = began.elapsed();
    let pauses = Pauses::so_far();
    let collections = collections() - began_collections;

    // SAFETY: collector-object: reachable from this thread's stack until here.
    let found = unsafe { count(tree, size.long_lived_depth()) };
    if found != nodes(size.long_lived_depth()) {
        return Err(Error::Objects(format!("{found} of {} nodes", nodes(size.long_lived_depth()))));
    }
    for i in 0..len / 2 {
        // SAFETY: collector-object: as above.
        let value = unsafe { array.add(i).read() };
        if value != 1.0 / (i as f64 + 1.0) {
            return Err(Error::Objects(format!("element {i} of the array is {value}")));
        }
    }
    let reachable_objects = reachable(library);
    std::hint::black_box((tree, array));
    // SAFETY: collector-call: reads a word.
    let heap_bytes = unsafe { (library.heap_bytes)() };
    Ok(Outcome { elapsed, collections, pauses, heap_bytes, live_objects: found + 1, reachable_objects })
}

impl Heap<'_> {
    fn make_node(self, left: *mut Node, right: *mut Node) -> *mut Node {
        // SAFETY: collector-call: started on this thread.
        let node = unsafe {
            match self.lists {
                Lists::Thread => (self.library.malloc)(size_of::<Node>()),
                Lists::Shared => (self.library.malloc_shared)(size_of::<Node>(), NORMAL),
            }
        };
        let node: *mut Node = node.cast();
        assert!(!node.is_null(), "the collector has no memory");
        // SAFETY: collector-object: new, and as large as a node.
        unsafe { node.write(Node { left, right, i: 0, j: 0 }) };
        node
    }

    fn make_leaf(self) -> *mut Node {
        self.make_node(ptr::null_mut(), ptr::null_mut())
    }

    /// From the leaves up: new nodes point to older ones.
    fn make_tree(self, depth: u32) -> *mut Node {
        if depth == 0 {
            return self.make_leaf();
        }
        let left = self.make_tree(depth - 1);
        let right = self.make_tree(depth - 1);
        self.make_node(left, right)
    }

    /// From the root down: older nodes are written, and point to new ones.
    fn populate(self, depth: u32, node: *mut Node) {
        if depth == 0 {
            return;
        }
        // SAFETY: collector-object: `node` is reachable from the stack, and these become so through it.
        unsafe {
            (*node).left = self.make_leaf();
            (*node).right = self.make_leaf();
            self.populate(depth - 1, (*node).left);
            self.populate(depth - 1, (*node).right);
        }
    }
}

/// The nodes that are whole: what was freed and used anew has other words in it.
///
/// # Safety
/// collector-object: `node` is null, or a node of a tree.
unsafe fn count(node: *const Node, depth: u32) -> u64 {
    if node.is_null() {
        return 0;
    }
    // SAFETY: collector-object: reachable.
    let found = unsafe { &*node };
    let is_leaf = found.left.is_null() && found.right.is_null();
    if found.i != 0 || found.j != 0 || is_leaf != (depth == 0) {
        return 0;
    }
    if is_leaf {
        return 1;
    }
    // SAFETY: collector-object: reachable through this one.
    unsafe { 1 + count(found.left, depth - 1) + count(found.right, depth - 1) }
}

/// Collects everything, and counts what is left.
fn reachable(library: &Library) -> u64 {
    extern "C" fn add(_: *mut c_void, _: usize, count: *mut c_void) {
        // SAFETY: out-pointer: `count` is the word below.
        unsafe { *count.cast::<u64>() += 1 };
    }
    extern "C" fn each(work: *mut c_void) -> *mut c_void {
        // SAFETY: out-pointer: the pair below.
        let (library, count) = unsafe { &mut *work.cast::<(Library, u64)>() };
        // SAFETY: collector-call: the lock is held, and a collection has just ended.
        unsafe { (library.each_reachable)(add, ptr::from_mut(count).cast()) };
        ptr::null_mut()
    }
    let mut work = (*library, 0u64);
    // SAFETY: collector-call: `each` calls nothing that takes the lock.
    unsafe {
        (library.collect)();
        (library.call_with_lock)(each, ptr::from_mut(&mut work).cast());
    }
    work.1
}
