//! What a domain may hold.
//!
//! # Source
//! Nemesis §6.2: the tuple {n, g, x}. "As long as g > n, a request for a single physical frame is guaranteed to succeed. If
//! g ≤ n < x and there is available memory, frames will be optimistically allocated."

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
