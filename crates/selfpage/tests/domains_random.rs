//! Protection domains at random, beside a model of what each may do: by keys where the machine has them, with two threads then, and by
//! page tables where it has none.

use std::io::{Read, Write};
use std::sync::Barrier;

use selfpage::Kind;
use selfpage::protection::{Entered, Mechanism, Memory, ProtectionDomain, Rights, mechanism};

#[path = "alloc/random.rs"]
mod random;

use random::{Random, seed};

const PAGE: usize = 4096;
const MEMORIES: usize = 24;
const DOMAINS: usize = 12;
const STEPS: usize = 4000;
/// How deep domains nest.
const DEEPEST: usize = 10;

fn memory(number: usize) -> Memory {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping, never unmapped.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        Memory::plain(&format!("page {number}"), start as usize..start as usize + PAGE).unwrap()
    }
}

fn any_rights(random: &mut Random) -> Rights {
    [Rights::NONE, Rights::READ, Rights::READ | Rights::WRITE][random.below(3)]
}

/// What one thread does and may do: the domains are its own, the memory is everybody's.
struct Thread<'a> {
    seed: u64,
    random: Random,
    memories: &'a [Memory],
    domains: &'a [ProtectionDomain],
    rights: Vec<Vec<Rights>>,
    entered: Vec<(usize, Entered<'a>)>,
    refused: usize,
}

impl<'a> Thread<'a> {
    fn new(seed: u64, memories: &'a [Memory], domains: &'a [ProtectionDomain]) -> Thread<'a> {
        let rights = vec![vec![Rights::NONE; memories.len()]; domains.len()];
        Thread { seed, random: Random(seed), memories, domains, rights, entered: Vec::new(), refused: 0 }
    }

    fn step(&mut self) {
        match self.random.below(64) {
            // Rights are given outside of all domains.
            0 => {
                self.leave_all();
                (0..MEMORIES).for_each(|_| self.set());
            }
            1..=40 if self.entered.len() < DEEPEST => self.enter(),
            _ => drop(self.entered.pop()),
        }
        for _ in 0..4 {
            let at = self.random.below(self.memories.len());
            self.check(at);
        }
    }

    /// The innermost first.
    fn leave_all(&mut self) {
        while self.entered.pop().is_some() {}
    }

    fn set(&mut self) {
        let (domain, at, rights) =
            (self.random.below(DOMAINS), self.random.below(MEMORIES), any_rights(&mut self.random));
        match self.domains[domain].set(&self.memories[at], rights) {
            Ok(()) => self.rights[domain][at] = rights,
            Err(why) => self.refuse(why.kind()),
        }
    }

    fn enter(&mut self) {
        let domain = self.random.below(DOMAINS);
        let domains = self.domains;
        match domains[domain].enter() {
            Ok(entered) => self.entered.push((domain, entered)),
            Err(why) => self.refuse(why.kind()),
        }
    }

    fn refuse(&mut self, kind: Kind) {
        assert_eq!(kind, Kind::Held, "seed {}", self.seed);
        self.refused += 1;
    }

    /// What is allowed works; the kernel refuses in this thread's name what is not.
    fn check(&mut self, at: usize) {
        let allowed = self.entered.last().map_or(Rights::READ | Rights::WRITE, |(domain, _)| self.rights[*domain][at]);
        let byte = self.memories[at].range().start as *mut u8;
        // SAFETY: mapped, a number whatever it is, and nobody has a reference to it while the kernel reads or writes it.
        let slice = unsafe { std::slice::from_raw_parts_mut(byte, 1) };
        let inside = self.entered.iter().map(|(domain, _)| *domain).collect::<Vec<_>>();
        if allowed.contains(Rights::READ) {
            // SAFETY: as above.
            unsafe { byte.read_volatile() };
        } else {
            let (_from, mut into) = std::io::pipe().unwrap();
            assert!(into.write(slice).is_err(), "seed {}: page {at} can be read in {inside:?}", self.seed);
        }
        if allowed.contains(Rights::WRITE) {
            // SAFETY: as above.
            unsafe { byte.write_volatile(1) };
        } else {
            let mut zeros = std::fs::File::open("/dev/zero").unwrap();
            assert!(zeros.read(slice).is_err(), "seed {}: page {at} can be written in {inside:?}", self.seed);
        }
    }
}

impl Drop for Thread<'_> {
    /// Guards would go in the order in which they came.
    fn drop(&mut self) {
        self.leave_all();
    }
}

#[test]
fn nobody_has_more_or_fewer_rights_than_the_domain() {
    let seed = seed();
    println!("seed {seed}");
    let memories: Vec<Memory> = (0..MEMORIES).map(memory).collect();
    // By page tables the domains of one thread would keep the other waiting.
    let threads = if mechanism() == Mechanism::Keys { 2 } else { 1 };
    let domains: Vec<Vec<ProtectionDomain>> = (0..threads)
        .map(|_| (0..DOMAINS).map(|number| ProtectionDomain::new(&format!("{number}"))).collect())
        .collect();
    let together = Barrier::new(threads);
    let refused: usize = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|number| {
                let (memories, domains, together) = (&memories, &domains[number], &together);
                scope.spawn(move || {
                    let mut thread = Thread::new(seed + number as u64, memories, domains);
                    together.wait();
                    for _ in 0..STEPS {
                        thread.step();
                    }
                    thread.refused
                })
            })
            .collect();
        running.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    println!("{refused} times there were too few keys");
    assert!(refused > 0 || mechanism() == Mechanism::PageTables, "seed {seed}: keys were always enough");
}
