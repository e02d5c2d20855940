//! What a domain may hold.
//!
//! # Source
//! Nemesis §6.2: the tuple {n, g, x}. "As long as g > n, a request for a single physical frame is guaranteed to succeed. If
//! g ≤ n < x and there is available memory, frames will be optimistically allocated."

use crate::sync::{AtomicU64, Ordering};

/// Frames guaranteed and frames at best. `guaranteed <= optimistic`.
///
/// # Units
/// Frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Contract {
    guaranteed: u32,
    optimistic: u32,
}

/// What a request for frames may be given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// Frames under the guarantee: they cannot be refused.
    pub guaranteed: u32,
    /// Frames beyond it, to be given only while memory is available.
    pub optimistic: u32,
}

impl Contract {
    /// `None` where `optimistic < guaranteed`.
    pub const fn new(guaranteed: u32, optimistic: u32) -> Option<Contract> {
        if optimistic < guaranteed { None } else { Some(Contract { guaranteed, optimistic }) }
    }
    /// Frames that cannot be refused or taken back at short notice (g).
    pub const fn guaranteed(self) -> u32 {
        self.guaranteed
    }
    /// Frames at best (x).
    pub const fn optimistic(self) -> u32 {
        self.optimistic
    }

    /// What a request for `want` frames is given when `allocated` (n) are held.
    pub const fn grant(self, allocated: u32, want: u32) -> Grant {
        let sure = self.guaranteed.saturating_sub(allocated);
        let guaranteed = if want < sure { want } else { sure };
        let rest = want - guaranteed;
        let room = self.optimistic.saturating_sub(allocated.saturating_add(guaranteed));
        Grant { guaranteed, optimistic: if rest < room { rest } else { room } }
    }

    /// How many of `allocated` frames may be taken back.
    pub const fn revocable(self, allocated: u32) -> u32 {
        allocated.saturating_sub(self.guaranteed)
    }

    /// Whether a memory of `total` frames, of which `promised` are guaranteed to others, can admit this contract: all
    /// guarantees must be met at once.
    pub const fn admissible(self, promised: u32, total: u32) -> bool {
        match promised.checked_add(self.guaranteed) {
            Some(sum) => sum <= total,
            None => false,
        }
    }
}

/// Frames that a domain has, and those that it may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// They have memory.
    pub claimed: u32,
    /// They may have.
    pub budget: u32,
}

/// What a domain holds, in one word: a claim and a cut at the same moment must not both count on the same frame.
pub struct Holding(AtomicU64);

impl Holding {
    /// None claimed of `budget`.
    pub fn new(budget: u32) -> Holding {
        Holding(AtomicU64::new(budget.into()))
    }

    /// As it is now.
    pub fn held(&self) -> Held {
        decode(self.0.load(Ordering::SeqCst))
    }

    /// Claims up to `most` frames of those that the budget still allows. How many, and how many there are then; `None`: it allows
    /// none.
    pub fn claim(&self, most: u32) -> Option<Claim> {
        let count = |held: Held| most.min(held.budget.saturating_sub(held.claimed));
        let before = self.update(|held| {
            let more = count(held);
            (more > 0).then_some(Held { claimed: held.claimed + more, ..held })
        })?;
        Some(Claim { count: count(before), claimed: before.claimed + count(before) })
    }

    /// Takes back a claim of `count`.
    pub fn unclaim(&self, count: u32) {
        self.update(|held| Some(Held { claimed: held.claimed.saturating_sub(count), ..held }));
    }

    /// Allows `count` frames more.
    pub fn extend(&self, count: u32) {
        self.update(|held| Some(Held { budget: held.budget.saturating_add(count), ..held }));
    }

    /// Allows up to `count` frames fewer, of those that are not claimed. How many were cut.
    pub fn cut(&self, count: u32) -> u32 {
        let fewer = |held: Held| count.min(held.budget.saturating_sub(held.claimed));
        self.update(|held| Some(Held { budget: held.budget - fewer(held), ..held })).map_or(0, fewer)
    }

    /// `count` claimed frames are gone, and as many fewer are allowed.
    pub fn retire(&self, count: u32) {
        self.update(|held| {
            let (claimed, budget) = (held.claimed.saturating_sub(count), held.budget.saturating_sub(count));
            Some(Held { claimed, budget })
        });
    }

    /// What there was before, unless `change` wants none.
    fn update(&self, change: impl Fn(Held) -> Option<Held>) -> Option<Held> {
        let change = |word| change(decode(word)).map(encode);
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).ok().map(decode)
    }
}

/// Frames that were claimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// How many; never zero.
    pub count: u32,
    /// How many the domain has with them.
    pub claimed: u32,
}

const fn decode(word: u64) -> Held {
    Held { claimed: (word >> 32) as u32, budget: word as u32 }
}

const fn encode(held: Held) -> u64 {
    (held.claimed as u64) << 32 | held.budget as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_never_exceeds_the_contract_and_never_refuses_the_guarantee() {
        for g in 0..6 {
            for x in g..8 {
                let contract = Contract::new(g, x).unwrap();
                for n in 0..10 {
                    for want in 0..10 {
                        let grant = contract.grant(n, want);
                        let given = grant.guaranteed + grant.optimistic;
                        assert!(given <= want);
                        assert!(given == 0 || n + given <= x);
                        assert_eq!(grant.guaranteed, want.min(g.saturating_sub(n)));
                        assert!(given == want || n + given >= x);
                    }
                    assert_eq!(contract.revocable(n), n.saturating_sub(g));
                }
            }
        }
        assert!(Contract::new(3, 2).is_none());
    }

    #[test]
    fn admission_adds_up_guarantees() {
        let contract = Contract::new(4, 9).unwrap();
        assert!(contract.admissible(6, 10));
        assert!(!contract.admissible(7, 10));
        assert!(!contract.admissible(u32::MAX, u32::MAX));
    }
}
