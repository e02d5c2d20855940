//! What users print, and what they name from here alone.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use selfpage::pager::{Kept, PagerError, UserPager};
use selfpage::store::{BackingStore, MemoryStore};
use selfpage::{
    Answer, Contract, Domain, Failure, MemoryFault, PAGE_BYTES, PageBytes, PageNo, Protection, Refusal, Shortage, Trap,
    VirtAddr,
};

#[path = "../../../tests/skip.rs"]
mod skip;

fn built() -> Option<Domain> {
    match Domain::with_frames(16 * PAGE_BYTES).most_frames(32 * PAGE_BYTES).build() {
        Ok(domain) => Some(domain),
        Err(error) => {
            skip::skip("uffd", &error.to_string());
            None
        }
    }
}

#[test]
fn what_a_program_asserts_on_can_be_printed() {
    let config = Domain::with_frames(PAGE_BYTES).policy("clock").trace("/nowhere", Duration::ZERO);
    let text = format!("{config:?}");
    assert!(text.contains("\"clock\"") && text.contains("frames: 1") && text.contains("/nowhere"), "{text}");
    assert!(config.build().unwrap_err().to_string().contains("16 frames"));

    let store = MemoryStore::new(1 << 20).unwrap();
    assert_eq!(format!("{store:?}"), "MemoryStore(0 of 256 bloks taken)");

    let Some(domain) = built() else { return };
    assert_eq!(format!("{domain:?}"), "Domain(16 frames of at most 32)");
    let builder = domain.region(PAGE_BYTES).name("table").trap(Trap::Upcall);
    assert_eq!(format!("{builder:?}"), "RegionBuilder(\"table\", 4096 bytes, Upcall)");

    let handler = |fault: &MemoryFault<'_>| {
        let text = format!("{fault:?}");
        assert!(text.contains("access: Write, kind: Protection, region: \"table\""), "{text}");
        fault.protect_page(Protection::ReadWrite).map_or(Answer::Refuse, |()| Answer::Handled)
    };
    let mut region = builder.trap(Trap::Worker).handler(handler).stored(store).unwrap();
    region.protect(0, PAGE_BYTES, Protection::Read).unwrap();
    region.as_mut_slice::<u8>()[0] = 1;
}

/// All that stands in a signature or a field has a name here.
#[test]
fn what_signatures_name_is_there() {
    let says = |failure: Failure| match failure {
        Failure::Shortage(Shortage::AllHeld) => "held",
        Failure::Machine(Refusal::Denied) => "denied",
        Failure::Pager(PagerError::Full) => "full",
        _ => "else",
    };
    assert_eq!(says(Failure::Shortage(Shortage::AllHeld)), "held");
    let addr: VirtAddr = PageNo(7).addr();
    assert_eq!(addr.0, 7 * PAGE_BYTES);
    // `Pager` says so of a page that it has nothing of.
    assert_eq!(Kept::default().place, 0);
    let Some(domain) = built() else { return };
    let contract: Contract = domain.contract();
    assert_eq!(format!("{contract:?}"), format!("{:?}", domain.contract()));
}

/// Page `n` is full of `n`.
struct Numbers;

impl UserPager for Numbers {
    fn fill(&self, index: u64, bytes: &mut PageBytes) -> io::Result<()> {
        bytes.fill(index as u8);
        Ok(())
    }

    fn save(&self, _: u64, _: &PageBytes) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_handle_to_a_store_or_pager_stands_for_it() {
    let Some(domain) = built() else { return };
    let store = Arc::new(MemoryStore::new(1 << 20).unwrap());
    let handles: [Arc<dyn BackingStore>; 2] = [store.clone(), Arc::new(store.clone())];
    assert!(handles.iter().all(|handle| handle.identity() == store.identity()));
    assert_ne!(MemoryStore::new(1 << 20).unwrap().identity(), store.identity());
    let mut region = domain.region(64 * PAGE_BYTES).stored(store.clone()).unwrap();
    region.as_mut_slice::<u8>().fill(7);
    region.flush(0, region.len_bytes()).unwrap();
    assert_eq!(store.taken_bloks(), 64);

    let pager: Arc<dyn UserPager> = Arc::new(Numbers);
    let region = domain.region(64 * PAGE_BYTES).user(pager).unwrap();
    assert!((0..64).all(|page| region.as_slice::<u8>()[page * PAGE_BYTES + 9] == page as u8));
}
