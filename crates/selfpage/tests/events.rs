//! Events off the fault path, for whoever listens.

use std::sync::{Arc, Mutex};

use selfpage::store::MemoryStore;
use selfpage::{Domain, Trap};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Keeps the message of each event.
struct Ear(Arc<Mutex<Vec<String>>>);

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
        self.0.lock().unwrap().push(message.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_domain_tells_what_it_does() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    tracing::subscriber::set_global_default(Ear(heard.clone())).unwrap();
    let domain = Domain::with_frames(64 * 4096).build().unwrap();
    let store = MemoryStore::new(8 << 20).unwrap();
    let mut region = domain.region(512 * 4096).trap(Trap::Upcall).stored(store).unwrap();
    region.as_mut_slice::<u64>().iter_mut().step_by(512).for_each(|word| *word = 1);
    let heard = heard.lock().unwrap();
    for what in ["domain built", "region bound", "evicted"] {
        assert!(heard.iter().any(|message| message == what), "no \"{what}\" in {heard:?}");
    }
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
