//! A contract that shrinks while frames are claimed.

use loom::sync::Arc;
use loom::thread;
use selfpage_core::contract::{Held, Holding};

#[test]
fn no_frame_is_claimed_beyond_a_contract_that_shrinks() {
    super::explore(3, || {
        let holding = Arc::new(Holding::new(4));
        let claimer = {
            let holding = holding.clone();
            thread::spawn(move || {
                let claimed = holding.claim(3).map_or(0, |claim| claim.count);
                let Held { claimed: all, budget } = holding.held();
                assert!(all <= budget, "{all} of {budget}");
                claimed
            })
        };
        let cut = holding.cut(3);
        let claimed = claimer.join().unwrap();
        assert_eq!(holding.held(), Held { claimed, budget: 4 - cut });
        assert!(claimed + cut == 4, "{claimed} claimed, {cut} cut: all four are one or the other");
    });
}
