//! The collector's own functions, found at run time.

use std::ffi::{CStr, c_int, c_void};

use crate::Error;

const NAME: &CStr = c"libgc.so.1";

/// Called by the collector, which holds its lock, at the steps of a collection.
pub type OnEvent = extern "C" fn(event: c_int);

/// Called for each object that was reachable.
pub type OnObject = extern "C" fn(object: *mut c_void, len_bytes: usize, client: *mut c_void);

type OnLock = extern "C" fn(client: *mut c_void) -> *mut c_void;

macro_rules! library {
    (
        functions { $($(#[$about:meta])* $field:ident = $name:ident: $kind:ty;)* }
        words { $($(#[$word_about:meta])* $word:ident = $word_name:ident;)* }
    ) => {
        /// The functions in use, as in the collector's `gc.h` and `gc_mark.h`.
        #[derive(Clone, Copy, Debug)]
        pub struct Library {
            $($(#[$about])* pub(crate) $field: $kind,)*
            $($(#[$word_about])* pub(crate) $word: *const usize,)*
        }

        impl Library {
            /// Finds the collector, and loads it where the program has not.
            ///
            /// # Errors
            /// `Missing`.
            pub fn load() -> Result<Library, Error> {
                // SAFETY: collector-library: a library with constructors that make it ready and do no more.
                let handle = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW) };
                if handle.is_null() {
                    return Err(Error::Missing(format!("no {}", NAME.to_string_lossy())));
                }
                Ok(Library {
                    $($field: {
                        let address = find(handle, concat!(stringify!($name), "\0"))?;
                        // SAFETY: collector-library: what has this name has this type.
                        unsafe { std::mem::transmute_copy::<*mut c_void, $kind>(&address) }
                    },)*
                    $($word: {
                        let name = concat!(stringify!($word_name), "\0");
                        // A program that names the word may have a copy of its own, which is then the only one in use, the library's own uses
                        // included: the library, too, asks the program first.
                        find(libc::RTLD_DEFAULT, name).or_else(|_| find(handle, name))?.cast_const().cast()
                    },)*
                })
            }
        }
    };
}

library! {
    functions {
        init = GC_init: unsafe extern "C" fn();
        malloc = GC_malloc: unsafe extern "C" fn(usize) -> *mut c_void;
        /// From the lists that all threads share.
        malloc_shared = GC_malloc_kind_global: unsafe extern "C" fn(usize, c_int) -> *mut c_void;
        /// For objects without pointers.
        malloc_atomic = GC_malloc_atomic: unsafe extern "C" fn(usize) -> *mut c_void;
        collect = GC_gcollect: unsafe extern "C" fn();
        collections = GC_get_gc_no: unsafe extern "C" fn() -> usize;
        enable_incremental = GC_enable_incremental: unsafe extern "C" fn();
        is_incremental = GC_is_incremental_mode: unsafe extern "C" fn() -> c_int;
        allow_manual = GC_set_manual_vdb_allowed: unsafe extern "C" fn(c_int);
        on_event = GC_get_on_collection_event: unsafe extern "C" fn() -> Option<OnEvent>;
        set_on_event = GC_set_on_collection_event: unsafe extern "C" fn(Option<OnEvent>);
        /// Marks the page of an address as dirty.
        mark_dirty = GC_end_stubborn_change: unsafe extern "C" fn(*const c_void);
        /// Without what was given back to the system.
        heap_bytes = GC_get_heap_size: unsafe extern "C" fn() -> usize;
        unmapped_bytes = GC_get_unmapped_bytes: unsafe extern "C" fn() -> usize;
        call_with_lock = GC_call_with_alloc_lock: unsafe extern "C" fn(OnLock, *mut c_void) -> *mut c_void;
        each_reachable = GC_enumerate_reachable_objects_inner: unsafe extern "C" fn(OnObject, *mut c_void);
    }
    words {
        /// No object lies below it.
        heap_least = GC_least_plausible_heap_addr;
        /// None lies at it or above.
        heap_greatest = GC_greatest_plausible_heap_addr;
    }
}

/// What has a name, which ends in zero.
fn find(handle: *mut c_void, name: &str) -> Result<*mut c_void, Error> {
    // SAFETY: collector-library: the name ends in zero, and the library stays loaded.
    let address = unsafe { libc::dlsym(handle, name.as_ptr().cast()) };
    if address.is_null() {
        return Err(Error::Missing(format!("no {} in {}", name.trim_end_matches('\0'), NAME.to_string_lossy())));
    }
    Ok(address)
}

// SAFETY: collector-library: addresses of functions, and of two words that never move.
unsafe impl Send for Library {}
// SAFETY: collector-library: as above.
unsafe impl Sync for Library {}
