//! KV in transit: a chunk leaves through the NIC of one host, and has landed when it has passed the
//! NIC of the other.
//!
//! Owns: the times at which a flow leaves and lands. With the recorded engine, each KV transfer has
//! its own link.

use super::super::host::MoverStub;
use super::super::transfers::{ChunkTransfer, SlotUse};
use super::{LoadCluster, SimEvent};
use crate::cli::flags::SimEngine;
use crate::ids::{DecodeAllocation, Room};
use crate::model::logprobs::{Sampled, TopLogprobs};
use crate::sched::first_token::FirstTokenRecord;
use std::mem;

impl LoadCluster<'_> {
    /// Sends the queued chunks through the NICs of their hosts.
    pub(super) fn leave(&mut self) {
        let now = self.agenda.now();
        for flow in mem::take(&mut self.flows) {
            self.moved += u64::from(flow.tokens);
            if self.plan.engine == SimEngine::Recorded {
                // All KV leaves at once when the prompt is computed, as if no other transfer used
                // the link.
                if flow.last.is_some() && self.takes_late_as_recorded() {
                    self.agenda
                        .schedule(now, SimEvent::Done { host: flow.from, source: flow.source });
                } else if let Some(last) = &flow.last {
                    let tokens = self.arrivals.list()[last.room as usize].input;
                    let at = now + self.plan.fabric.time_of(tokens);
                    self.agenda.schedule(at, SimEvent::Land(Box::new(flow)));
                }
                continue;
            }
            let takes = self.plan.fabric.time_of(flow.tokens);
            let first = self.hosts[flow.from].nic.send(now, takes);
            self.agenda.schedule(first, SimEvent::Come(Box::new(flow)));
        }
    }

    /// Whether the engine is the recorded one with late allocation. Its decode workers take pages
    /// when a prompt is computed. Its KV leaves then, independent of the prefill worker's next
    /// pass.
    pub(super) fn takes_late_as_recorded(&self) -> bool {
        self.plan.engine == SimEngine::Recorded && self.plan.allocation == DecodeAllocation::Late
    }

    /// Decode has pages: schedules the landing of the KV, one transfer time after its computation.
    /// The prefill worker sends no KV itself when it learns of the pages.
    pub(super) fn come_at_once(&mut self, to: usize, destination: SlotUse, room: Room) {
        let id = room.0 as usize;
        let takes = self.plan.fabric.time_of(self.arrivals.list()[id].input);
        let at = self.agenda.now().max(self.open[&id].computed + takes);
        let token = Sampled { token: 0, logprob: 0.0, top: TopLogprobs::EMPTY };
        let record = FirstTokenRecord::new(&token, self.open[&id].cached).to_aux(room);
        self.agenda
            .schedule(at, SimEvent::LandAlone { host: to, destination, record: Box::new(record) });
    }

    pub(super) fn land(&mut self, flow: ChunkTransfer) {
        let now = self.agenda.now();
        let ChunkTransfer { from, source, to, destination, last, .. } = flow;
        let is_last = last.is_some();
        if let MoverStub::Destination(half) = &mut self.hosts[to].half {
            half.land(destination, last);
        }
        if is_last {
            self.agenda
                .schedule(now + self.plan.fabric.latency, SimEvent::Done { host: from, source });
            self.wake(to, now);
        }
    }
}
