//! A vector that grows by remapping: from 4 MiB on it does not copy its items, and it never has more than a page to spare that nobody
//! asked for.

use std::borrow::{Borrow, BorrowMut};
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::iter::FusedIterator;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};

use super::{block, fork};

/// No memory for what was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no memory, or more bytes than there are addresses")
    }
}

impl std::error::Error for OutOfMemory {}

/// A growable array, as [`Vec`], in a block of the page allocator. Growing maps more frames behind it or moves frames, so one
/// of more than 4 MiB costs no copy, and no second copy's memory. An empty one has no block; any other has whole pages, so it is for arrays that become
/// long.
///
/// With the first block that one of them takes, forks of the process take care of the allocator ([`fork::register`]): it is not for what
/// stands underneath the program's `malloc`, which that calls.
///
/// # Source
/// Douglas (2011), section 5: vectors that need not over-allocate once growing costs no copy.
///
/// # Examples
/// ```
/// use selfpage::alloc::GrowVec;
/// let mut squares: GrowVec<u64> = (0..100_000).map(|n| n * n).collect();
/// squares.push(7);
/// assert_eq!(squares[300], 90_000);
/// assert_eq!(squares.pop(), Some(7));
/// assert!(squares.capacity() - squares.len() <= 4096 / 8);
/// ```
pub struct GrowVec<T> {
    first: NonNull<T>,
    /// Of the block; 0: there is none.
    block_bytes: usize,
    len: usize,
}

// SAFETY: grow-vec: it owns its items, as `Vec` does.
unsafe impl<T: Send> Send for GrowVec<T> {}
// SAFETY: grow-vec: a shared one only gives out shared items.
unsafe impl<T: Sync> Sync for GrowVec<T> {}

impl<T> GrowVec<T> {
    /// An empty one, without memory.
    pub const fn new() -> GrowVec<T> {
        GrowVec { first: NonNull::dangling(), block_bytes: 0, len: 0 }
    }

    /// An empty one with room for `capacity` items.
    ///
    /// # Panics
    /// No memory.
    pub fn with_capacity(capacity: usize) -> GrowVec<T> {
        let mut vec = GrowVec::new();
        vec.reserve(capacity);
        vec
    }

    /// How many items it has room for.
    pub const fn capacity(&self) -> usize {
        if size_of::<T>() == 0 { usize::MAX } else { self.block_bytes / size_of::<T>() }
    }

    /// Makes room for `more` items, and for no more than whole pages take.
    ///
    /// # Panics
    /// No memory.
    pub fn reserve(&mut self, more: usize) {
        if let Err(error) = self.try_reserve(more) {
            panic!("{more} more items of {} bytes: {error}", size_of::<T>());
        }
    }

    /// As [`GrowVec::reserve`].
    ///
    /// # Errors
    /// No memory; it is as it was.
    pub fn try_reserve(&mut self, more: usize) -> Result<(), OutOfMemory> {
        let wanted = self.len.checked_add(more).ok_or(OutOfMemory)?;
        if wanted <= self.capacity() {
            return Ok(());
        }
        self.set_block(wanted.checked_mul(size_of::<T>()).ok_or(OutOfMemory)?)
    }

    fn set_block(&mut self, len_bytes: usize) -> Result<(), OutOfMemory> {
        let block = if self.block_bytes == 0 {
            // Else a child that is forked while another thread has the allocator would wait for that thread.
            fork::register();
            block::allocate(len_bytes, align_of::<T>())
        } else {
            // SAFETY: grow-vec: the block is ours. Frames move with what they hold, and no item is borrowed now.
            unsafe { block::resize(self.first.cast(), len_bytes) }
        };
        let block = block.ok_or(OutOfMemory)?;
        self.first = block.cast();
        self.block_bytes = block::usable_bytes(block).unwrap_or(len_bytes);
        Ok(())
    }

    /// Gives back pages without items.
    pub fn shrink_to_fit(&mut self) {
        let len_bytes = self.len * size_of::<T>();
        if len_bytes == 0 {
            self.free_block();
        } else {
            // Shorter is always to be had.
            let _ = self.set_block(len_bytes);
        }
    }

    fn free_block(&mut self) {
        if self.block_bytes != 0 {
            // SAFETY: grow-vec: the block is ours, and has no items any more.
            unsafe { block::free(self.first.cast()) };
            (self.first, self.block_bytes) = (NonNull::dangling(), 0);
        }
    }

    /// Adds an item at the end.
    ///
    /// # Panics
    /// No memory.
    #[inline]
    pub fn push(&mut self, item: T) {
        if self.len == self.capacity() {
            self.reserve(1);
        }
        // SAFETY: grow-vec: there is room for one more.
        unsafe { self.first.add(self.len).write(item) };
        self.len += 1;
    }

    /// Adds an item at the end.
    ///
    /// # Errors
    /// The item, where there is no memory.
    ///
    /// # Examples
    /// ```
    /// # use selfpage::alloc::GrowVec;
    /// let mut lines = GrowVec::new();
    /// if let Err(line) = lines.try_push(String::from("one")) {
    ///     eprintln!("no memory for {line}");
    /// }
    /// assert_eq!(lines[0], "one");
    /// ```
    pub fn try_push(&mut self, item: T) -> Result<(), T> {
        if self.try_reserve(1).is_err() {
            return Err(item);
        }
        self.push(item);
        Ok(())
    }

    /// Takes the last item.
    pub fn pop(&mut self) -> Option<T> {
        self.len = self.len.checked_sub(1)?;
        // SAFETY: grow-vec: it was an item, and is none any more.
        Some(unsafe { self.first.add(self.len).read() })
    }

    /// Puts an item before the one at `index`, or at the end. The items behind move up, by copying.
    ///
    /// # Panics
    /// `index` is greater than the length; no memory.
    pub fn insert(&mut self, index: usize, item: T) {
        assert!(index <= self.len, "insert at {index} of {} items", self.len);
        self.reserve(1);
        // SAFETY: grow-vec: there is room for one more, and `index` is within.
        unsafe {
            let place = self.first.add(index);
            ptr::copy(place.as_ptr(), place.add(1).as_ptr(), self.len - index);
            place.write(item);
        }
        self.len += 1;
    }

    /// Takes the item at `index`. The items behind move down, by copying.
    ///
    /// # Panics
    /// There is none.
    pub fn remove(&mut self, index: usize) -> T {
        assert!(index < self.len, "remove {index} of {} items", self.len);
        self.len -= 1;
        // SAFETY: grow-vec: it was an item; those behind it close up.
        unsafe {
            let place = self.first.add(index);
            let item = place.read();
            ptr::copy(place.add(1).as_ptr(), place.as_ptr(), self.len - index);
            item
        }
    }

    /// Takes the item at `index`, and puts the last in its place.
    ///
    /// # Panics
    /// There is none.
    pub fn swap_remove(&mut self, index: usize) -> T {
        assert!(index < self.len, "remove {index} of {} items", self.len);
        let last = self.len - 1;
        self.swap(index, last);
        self.pop().expect("an item, as was just asserted")
    }

    /// Drops the items that `keep` does not want. The others close up, in their order.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        let mut kept = 0;
        // By exchanges: where `keep` panics all items are still there.
        for at in 0..self.len {
            if keep(&self[at]) {
                self.swap(kept, at);
                kept += 1;
            }
        }
        self.truncate(kept);
    }

    /// Takes all items of `other` over, behind its own, by copying. `other` keeps its memory.
    ///
    /// # Panics
    /// No memory.
    pub fn append(&mut self, other: &mut GrowVec<T>) {
        self.reserve(other.len);
        // SAFETY: grow-vec: there is room for them, in another block; there they are none any more.
        unsafe { ptr::copy_nonoverlapping(other.first.as_ptr(), self.first.add(self.len).as_ptr(), other.len) };
        self.len += std::mem::take(&mut other.len);
    }

    /// Drops the items from `len` on, if there are any.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len {
            let surplus = &raw mut self[len..];
            // First: an item that panics as it is dropped must not be dropped again.
            self.len = len;
            // SAFETY: grow-vec: they were items, and are none any more.
            unsafe { ptr::drop_in_place(surplus) };
        }
    }

    /// Drops all items. The memory stays.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// The room behind the items; see [`GrowVec::set_len`].
    ///
    /// # Examples
    /// ```
    /// # use selfpage::alloc::GrowVec;
    /// let mut squares = GrowVec::with_capacity(1000);
    /// for (n, place) in (0..1000u64).zip(squares.spare_capacity_mut()) {
    ///     place.write(n * n);
    /// }
    /// // SAFETY: there is room for as many, and each was written.
    /// unsafe { squares.set_len(1000) };
    /// assert_eq!(squares[30], 900);
    /// ```
    pub fn spare_capacity_mut(&mut self) -> &mut [MaybeUninit<T>] {
        // SAFETY: grow-vec: room that is ours; what is uninitialised may hold anything.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(self.len).cast().as_ptr(), self.capacity() - self.len) }
    }

    /// Says how many items there are: more, where somebody else has written some, and fewer, where somebody else has taken them. None is
    /// dropped.
    ///
    /// # Safety
    /// *grow-vec*: `len` is within the capacity, and the first `len` items are initialised.
    ///
    /// # Examples
    /// ```
    /// # use selfpage::alloc::GrowVec;
    /// # use std::io::Read;
    /// let mut bytes: GrowVec<u8> = GrowVec::new();
    /// bytes.resize(10, 0);
    /// let read = (&b"seven"[..]).read(&mut bytes)?;
    /// // SAFETY: fewer than there were, and bytes need not be dropped.
    /// unsafe { bytes.set_len(read) };
    /// assert_eq!(bytes, b"seven"[..]);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub unsafe fn set_len(&mut self, len: usize) {
        debug_assert!(len <= self.capacity());
        self.len = len;
    }
}

impl<T: Clone> GrowVec<T> {
    /// Makes it `len` items long: drops some, or adds copies of `item`.
    ///
    /// # Panics
    /// No memory.
    pub fn resize(&mut self, len: usize, item: T) {
        self.truncate(len);
        let more = len - self.len;
        self.reserve(more);
        self.extend(std::iter::repeat_n(item, more));
    }

    /// Adds copies of all of `items`.
    ///
    /// # Panics
    /// No memory.
    pub fn extend_from_slice(&mut self, items: &[T]) {
        self.extend(items.iter().cloned());
    }
}

impl<T> Deref for GrowVec<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: grow-vec: the first `len` items are initialised.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for GrowVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: grow-vec: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.len) }
    }
}

impl<T> Drop for GrowVec<T> {
    fn drop(&mut self) {
        /// Frees the block even where an item panics as it is dropped.
        struct Block<'a, T>(&'a mut GrowVec<T>);
        impl<T> Drop for Block<'_, T> {
            fn drop(&mut self) {
                self.0.free_block();
            }
        }
        Block(self).0.clear();
    }
}

impl<T> Extend<T> for GrowVec<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, items: I) {
        let items = items.into_iter();
        self.reserve(items.size_hint().0);
        items.for_each(|item| self.push(item));
    }
}

impl<'a, T: Copy> Extend<&'a T> for GrowVec<T> {
    fn extend<I: IntoIterator<Item = &'a T>>(&mut self, items: I) {
        Extend::<T>::extend(self, items.into_iter().copied());
    }
}

impl<T> FromIterator<T> for GrowVec<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> GrowVec<T> {
        let mut vec = GrowVec::new();
        vec.extend(items);
        vec
    }
}

/// By copying the items.
impl<T> From<Vec<T>> for GrowVec<T> {
    fn from(items: Vec<T>) -> GrowVec<T> {
        items.into_iter().collect()
    }
}

impl<T, const N: usize> From<[T; N]> for GrowVec<T> {
    fn from(items: [T; N]) -> GrowVec<T> {
        items.into_iter().collect()
    }
}

impl<T> From<GrowVec<T>> for Vec<T> {
    fn from(items: GrowVec<T>) -> Vec<T> {
        items.into_iter().collect()
    }
}

impl<T: Clone> From<&[T]> for GrowVec<T> {
    fn from(items: &[T]) -> GrowVec<T> {
        items.iter().cloned().collect()
    }
}

impl<T> Default for GrowVec<T> {
    fn default() -> GrowVec<T> {
        GrowVec::new()
    }
}

impl<T: Clone> Clone for GrowVec<T> {
    fn clone(&self) -> GrowVec<T> {
        self.iter().cloned().collect()
    }
}

impl<T: fmt::Debug> fmt::Debug for GrowVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<T: PartialEq> PartialEq for GrowVec<T> {
    fn eq(&self, other: &GrowVec<T>) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for GrowVec<T> {}

impl<T: PartialEq> PartialEq<[T]> for GrowVec<T> {
    fn eq(&self, other: &[T]) -> bool {
        **self == *other
    }
}

impl<T: PartialEq> PartialEq<&[T]> for GrowVec<T> {
    fn eq(&self, other: &&[T]) -> bool {
        **self == **other
    }
}

impl<T: PartialEq, const N: usize> PartialEq<[T; N]> for GrowVec<T> {
    fn eq(&self, other: &[T; N]) -> bool {
        **self == *other
    }
}

impl<T: PartialEq> PartialEq<Vec<T>> for GrowVec<T> {
    fn eq(&self, other: &Vec<T>) -> bool {
        **self == **other
    }
}

impl<T: PartialOrd> PartialOrd for GrowVec<T> {
    fn partial_cmp(&self, other: &GrowVec<T>) -> Option<Ordering> {
        (**self).partial_cmp(&**other)
    }
}

impl<T: Ord> Ord for GrowVec<T> {
    fn cmp(&self, other: &GrowVec<T>) -> Ordering {
        (**self).cmp(&**other)
    }
}

impl<T: Hash> Hash for GrowVec<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl<T> AsRef<[T]> for GrowVec<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T> AsMut<[T]> for GrowVec<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T> Borrow<[T]> for GrowVec<T> {
    fn borrow(&self) -> &[T] {
        self
    }
}

impl<T> BorrowMut<[T]> for GrowVec<T> {
    fn borrow_mut(&mut self) -> &mut [T] {
        self
    }
}

/// Adds all bytes at the end. [`io::ErrorKind::OutOfMemory`]: none were added.
impl io::Write for GrowVec<u8> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.try_reserve(bytes.len()).map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
        self.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a, T> IntoIterator for &'a GrowVec<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a, T> IntoIterator for &'a mut GrowVec<T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl<T> IntoIterator for GrowVec<T> {
    type Item = T;
    type IntoIter = IntoIter<T>;
    fn into_iter(mut self) -> IntoIter<T> {
        let end = std::mem::take(&mut self.len);
        IntoIter { vec: self, next: 0, end }
    }
}

/// The items of a [`GrowVec`], one by one.
#[derive(Debug)]
pub struct IntoIter<T> {
    /// Has the memory, and no items: those are ours.
    vec: GrowVec<T>,
    next: usize,
    end: usize,
}

impl<T> Iterator for IntoIter<T> {
    type Item = T;
    fn next(&mut self) -> Option<T> {
        if self.next == self.end {
            return None;
        }
        self.next += 1;
        // SAFETY: grow-vec: an item that was not taken before.
        Some(unsafe { self.vec.first.add(self.next - 1).read() })
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.end - self.next, Some(self.end - self.next))
    }
}

impl<T> DoubleEndedIterator for IntoIter<T> {
    fn next_back(&mut self) -> Option<T> {
        if self.next == self.end {
            return None;
        }
        self.end -= 1;
        // SAFETY: grow-vec: an item that was not taken before.
        Some(unsafe { self.vec.first.add(self.end).read() })
    }
}

impl<T> ExactSizeIterator for IntoIter<T> {}

impl<T> FusedIterator for IntoIter<T> {}

impl<T> Drop for IntoIter<T> {
    fn drop(&mut self) {
        let rest = ptr::slice_from_raw_parts_mut(self.vec.first.as_ptr().wrapping_add(self.next), self.end - self.next);
        // SAFETY: grow-vec: items that were not taken. The memory goes with the vector, even where this panics.
        unsafe { ptr::drop_in_place(rest) };
    }
}
