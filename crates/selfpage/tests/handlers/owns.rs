//! A handler that owns another region of its domain.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use selfpage::{Answer, Domain, FaultHandler, MemoryFault, Region};

use crate::scenario::{here, in_child, until};
use crate::{PAGE, read, write};

struct Owns {
    cards: Arc<Region>,
    go_on: Mutex<Receiver<()>>,
}

impl FaultHandler for Owns {
    fn handle(&self, fault: &MemoryFault<'_>) -> Answer {
        // The program goes on from here.
        // SAFETY: test: nobody refers to the page.
        unsafe { fault.map(&[7; PAGE]) }.unwrap();
        self.go_on.lock().unwrap().recv().unwrap();
        write(&self.cards, 0, 1);
        Answer::Handled
    }

    fn asks_first(&self) -> bool {
        true
    }
}

/// The library's threads that there are.
fn own_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("selfpage-")).collect()
}

#[test]
fn a_domain_ends_with_the_handler_that_has_its_last_region() {
    in_child(here!(), "", || {
        let (go_on, told) = channel();
        let domain = Domain::with_frames(64 * PAGE).build().unwrap();
        let cards = Arc::new(domain.region(16 * PAGE).zero().unwrap());
        let handler = Owns { cards, go_on: Mutex::new(told) };
        let region = domain.region(16 * PAGE).handler(handler).zero().unwrap();
        assert_eq!(read(&region, 0), 0x0707_0707_0707_0707);
        drop((region, domain));
        go_on.send(()).unwrap();
        until("the domain's threads have ended", || own_threads().is_empty());
    })
    .well();
}
