//! Objects from `malloc` of the process, whichever that is.

use std::ptr::NonNull;

use super::PAGE_BYTES;

/// An object; dropped, it is freed.
#[derive(Debug)]
pub struct Object(NonNull<u8>);

// SAFETY: bench-block: an object is its owner's alone, and any thread may free it.
unsafe impl Send for Object {}

impl Object {
    /// An object with its first byte written.
    ///
    /// # Panics
    /// If there is no memory: a bench has no use for the rest then.
    #[inline]
    pub fn new(len_bytes: usize) -> Object {
        // SAFETY: bench-block: a call without pointers.
        let start = NonNull::new(unsafe { libc::malloc(len_bytes) }.cast::<u8>()).expect("memory for an object");
        // SAFETY: bench-block: an object has at least a byte.
        unsafe { start.write_volatile(1) };
        Object(start)
    }

    /// An object with a byte written in each of its pages.
    pub fn touched(len_bytes: usize) -> Object {
        let object = Object::new(len_bytes);
        for at in (PAGE_BYTES..len_bytes).step_by(PAGE_BYTES) {
            // SAFETY: bench-block: within the object.
            unsafe { object.0.add(at).write_volatile(1) };
        }
        object
    }
}

/// An object that is used: all of it is written at first, and read before it is freed.
#[derive(Debug)]
pub struct Used {
    object: Object,
    len_bytes: u32,
}

impl Used {
    /// An object of so many bytes.
    #[inline]
    pub fn new(len_bytes: u32) -> Used {
        let object = Object::new(len_bytes as usize);
        // SAFETY: bench-block: as long as was asked for.
        unsafe { object.0.write_bytes(1, len_bytes as usize) };
        Used { object, len_bytes }
    }
}

impl Drop for Used {
    #[inline]
    fn drop(&mut self) {
        for at in (0..self.len_bytes as usize).step_by(8) {
            // SAFETY: bench-block: within the object, and written.
            unsafe { self.object.0.add(at).read_volatile() };
        }
    }
}

impl Drop for Object {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: bench-block: ours, and gone here.
        unsafe { libc::free(self.0.as_ptr().cast()) };
    }
}
