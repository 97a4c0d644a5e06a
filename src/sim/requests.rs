//! The requests of a seed: when each client sends its request, and whether it leaves or aborts.

use super::faults::{AIMED_SILENCE, CHANGED, Fault, START, WINDOW, Weather};
use super::fleet::SimFleet;
use super::key_exchange::KeyExchange;
use super::keys::{ClientKey, ExchangedKeys};
use super::scale::RunScale;
use super::workload::{SimRequest, Workload};
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;

/// The longest time between two requests of a run that needs few pages of decode workers at once.
const CROWDED_GAP: Nanos = 2 * MILLI;
/// The client of one in so many requests aborts it.
const ABORTS: u64 = 12;
/// The client of one in so many requests sends only a part of it.
const CUT_SHORT: u64 = 60;
/// The client of one in so many requests has a wrong key, and if API keys are exchanged.
const WRONG: u64 = 20;
const WRONG_IN_EXCHANGE: u64 = 4;
/// The longest time between the first and the last request, without the calm ones.
const SPAN_MAX: Nanos = 300 * SECOND;
/// No fault happens in this time before the last requests, so that they must succeed.
const CALM: Nanos = AIMED_SILENCE + CHANGED + 20 * SECOND;
/// Requests that are sent after the last fault.
const CALM_REQUESTS: usize = 5;

/// A request of a client.
#[derive(Clone, Debug)]
pub struct PlannedRequest {
    /// When it is sent.
    pub at: Nanos,
    /// The key that its client sends.
    pub key: Option<ClientKey>,
    /// Whether its answer is a stream.
    pub stream: bool,
    /// Whether its client may leave.
    pub may_leave: bool,
    /// When its client leaves, if it has no answer by then.
    pub leaves: Option<Nanos>,
    /// The name by which it can be aborted.
    pub rid: String,
    /// When its client aborts it, if it has no answer by then.
    pub aborts: Option<Nanos>,
    /// Whether its client has aborted it.
    pub is_aborted: bool,
    /// Whether its client does not send the last byte.
    pub is_cut_short: bool,
    /// What it asks for.
    pub order: SimRequest,
}

impl PlannedRequest {
    fn move_to(&mut self, at: Nanos) {
        let moved = |time: Nanos| time - self.at + at;
        (self.leaves, self.aborts) = (self.leaves.map(moved), self.aborts.map(moved));
        self.at = at;
    }
}

/// Draws the requests of a seed, in order of time.
pub fn draw_requests(
    dice: &Rng,
    scale: RunScale,
    weather: Weather,
    fleet: &SimFleet,
) -> Vec<PlannedRequest> {
    let mut workload = Workload::new(dice.fork("workload"), fleet.layers);
    let (mut arrivals, mut at) = (dice.fork("arrivals"), START);
    let gap = arrivals.pick(&[2, 20, 500]) * MILLI;
    let gap = if fleet.is_crowded { CROWDED_GAP } else { gap };
    let gap = match weather {
        Weather::Gentle if scale.faults => 10 * SECOND,
        Weather::Flaky if scale.faults => 4 * SECOND,
        _ => gap,
    };
    let gap = gap.min(SPAN_MAX / scale.requests as u64);
    let (leavers, stay) = (arrivals.pick(&[4, 16]), arrivals.pick(&[10, 30, 60, 200]) * MILLI);
    let draw = |number| {
        at += arrivals.range_u64(0, gap);
        let leaves = arrivals.range_u64(0, stay) + at;
        PlannedRequest {
            at,
            stream: arrivals.one_in(2),
            key: None,
            rid: format!("rid-{number}-"),
            aborts: None,
            is_aborted: false,
            is_cut_short: false,
            may_leave: scale.faults,
            leaves: (scale.faults && arrivals.one_in(leavers)).then_some(leaves),
            order: workload.draw(),
        }
    };
    let mut requests: Vec<PlannedRequest> = (0..scale.requests).map(draw).collect();
    if fleet.keys.has_api_keys {
        let is_exchanged = fleet.keys.exchanged == Some(ExchangedKeys::Bearer);
        let wrong = if is_exchanged { WRONG_IN_EXCHANGE } else { WRONG };
        give_keys(&mut requests, wrong, dice.fork("key of client"));
    }
    if scale.faults {
        give_whims(&mut requests, dice.fork("whims"));
    }
    requests
}

/// Moves half of the requests to times near the faults, so that faults meet requests that run.
pub fn aim(requests: &mut [PlannedRequest], faults: &[(Nanos, Fault)], mut dice: Rng) {
    let windows = faults.iter().flat_map(|&(at, fault)| match fault {
        Fault::Role { pause, .. } => vec![at, at + pause],
        _ => vec![at],
    });
    let windows: Vec<Nanos> = windows.collect();
    if windows.is_empty() {
        return;
    }
    for request in &mut *requests {
        if dice.one_in(2) {
            request.move_to(dice.pick(&windows) - WINDOW + dice.range_u64(0, 2 * WINDOW));
        }
    }
    requests.sort_by_key(|request| request.at);
}

/// Moves all requests to a time that is later by this.
pub fn delay_all(requests: &mut [PlannedRequest], by: Nanos) {
    requests.iter_mut().for_each(|request| request.move_to(request.at + by));
}

/// Moves half of the requests into the time of the exchange.
pub fn aim_at_exchange(requests: &mut [PlannedRequest], exchange: &KeyExchange, mut dice: Rng) {
    for request in &mut *requests {
        if dice.one_in(2) {
            request.move_to(exchange.begin + dice.range_u64(0, exchange.time()));
        }
    }
    requests.sort_by_key(|request| request.at);
}

/// Lets the last requests come after the faults and the exchange, which are over at this time.
pub fn delay_last(requests: &mut [PlannedRequest], over: Nanos) {
    let last = requests.len().saturating_sub(CALM_REQUESTS);
    for (number, request) in requests[last..].iter_mut().enumerate() {
        request.at = over + CALM + number as u64 * MILLI;
        (request.leaves, request.aborts, request.may_leave) = (None, None, false);
    }
    requests.sort_by_key(|request| request.at);
}

/// Gives clients their keys; one in so many has a wrong one.
fn give_keys(requests: &mut [PlannedRequest], wrong: u64, mut dice: Rng) {
    for request in requests {
        let is_wrong = dice.one_in(wrong);
        request.key = Some(if is_wrong { ClientKey::Wrong } else { ClientKey::Right });
    }
}

/// Lets some clients abort their request, or send only a part of it.
fn give_whims(requests: &mut [PlannedRequest], mut dice: Rng) {
    let stay = dice.pick(&[10, 60, 200]) * MILLI;
    for request in requests {
        let wait = dice.range_u64(0, stay);
        request.aborts = dice.one_in(ABORTS).then_some(request.at + wait);
        request.is_cut_short = dice.one_in(CUT_SHORT);
    }
}
