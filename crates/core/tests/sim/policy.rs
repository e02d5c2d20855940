//! A policy that can be trusted to remember, and sometimes to nothing else.

use std::collections::VecDeque;

use selfpage_core::addr::{Frame, PageNo};
use selfpage_core::policy::{Policy, Use};

use crate::dice;
use crate::scheduler;
use crate::weather::Weather;

/// Which frame goes first.
#[derive(Clone, Copy, Debug)]
enum Order {
    First,
    Last,
    Any,
}

#[derive(Clone)]
pub struct SimPolicy {
    order: Order,
    listed: VecDeque<Frame>,
    frames: u32,
    standby_share: u8,
    weather: &'static Weather,
}

impl SimPolicy {
    pub fn new(frames: u32, weather: &'static Weather) -> SimPolicy {
        let order = [Order::First, Order::Last, Order::Any][dice::below(3) as usize];
        let standby_share = [0, 32, 128][dice::below(3) as usize];
        SimPolicy { order, listed: VecDeque::new(), frames, standby_share, weather }
    }
}

impl Policy for SimPolicy {
    fn admitted(&mut self, frame: Frame, _page: PageNo, _priority: u8, _used: Use) {
        scheduler::step_aside("admitted");
        assert!(frame.0 < self.frames);
        self.listed.retain(|other| *other != frame);
        self.listed.push_back(frame);
    }

    fn victim(&mut self) -> Option<Frame> {
        scheduler::step_aside("victim");
        if dice::once_in(self.weather.lies_once_in.get()) {
            return match dice::below(4) {
                0 => None,
                1 => Some(Frame(dice::next() as u32)),
                // Listed, and still listed afterwards: it will be named twice.
                2 => self.listed.front().copied(),
                _ => Some(Frame(dice::below(self.frames.into()) as u32)),
            };
        }
        match self.order {
            Order::First => self.listed.pop_front(),
            Order::Last => self.listed.pop_back(),
            Order::Any if self.listed.is_empty() => None,
            Order::Any => self.listed.swap_remove_back(dice::below(self.listed.len() as u64) as usize),
        }
    }

    fn standby_share(&self) -> u8 {
        self.standby_share
    }
}
