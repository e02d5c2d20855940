//! Events off the fault path, for whoever listens.

use std::sync::{Mutex, Once};

use selfpage::store::MemoryStore;
use selfpage::{Domain, Region, Trap};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

mod child;

static HEARD: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps the message of each event.
struct Ear;

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Ear {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("selfpage")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        HEARD.lock().unwrap().push(message.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

fn listen() {
    static LISTENS: Once = Once::new();
    LISTENS.call_once(|| tracing::subscriber::set_global_default(Ear).unwrap());
}

/// A region of more pages than there are frames.
fn region(domain: &Domain) -> Region {
    let store = MemoryStore::new(8 << 20).unwrap();
    domain.region(512 * 4096).trap(Trap::Upcall).stored(store).unwrap()
}

fn write_all(region: &mut Region) {
    region.as_mut_slice::<u64>().iter_mut().step_by(512).for_each(|word| *word = 1);
}

#[test]
fn a_domain_tells_what_it_does() {
    listen();
    let domain = Domain::with_frames(64 * 4096).build().unwrap();
    write_all(&mut region(&domain));
    let heard = HEARD.lock().unwrap();
    for what in ["domain built", "region bound", "evicted"] {
        assert!(heard.iter().any(|message| message == what), "no \"{what}\" in {heard:?}");
    }
}

/// The child has the listener's lock as it was, taken for good. It is a listener's own matter, as long as the child does not listen.
#[test]
fn a_child_waits_for_no_listener() {
    listen();
    let domain = Domain::with_frames(64 * 4096).build().unwrap();
    let mut region = region(&domain);
    write_all(&mut region);
    let listening = HEARD.lock().unwrap();
    let status = child::in_child(|| {
        write_all(&mut region);
        domain.stats().counts.evictions_total > 0
    });
    drop(listening);
    assert_eq!(status, 0);
}

#[test]
fn an_upcall_counts_for_the_domain_whose_page_it_is() {
    let [one, other] = [(); 2].map(|()| Domain::with_frames(64 * 4096).build().unwrap());
    let region = |domain: &Domain| domain.region(4096).trap(Trap::Upcall).zero().unwrap();
    // Signals come by the first of them first.
    let (_neighbour, mut touched) = (region(&one), region(&other));
    touched.as_mut_slice::<u64>()[0] = 1;
    assert_eq!([&one, &other].map(|domain| domain.stats().counts.faults_total), [0, 1]);
}
