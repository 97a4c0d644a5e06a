//! KV on its way: chunks leave by the NIC of one host and are in place when that of the other has had them.
//!
//! Owns: when a flow leaves and when it has landed, also as the recorded engine has it, where KV is as if alone on its link.

use super::super::host::Half;
use super::super::transfers::{Flow, Use};
use super::{Cluster, Happening};
use crate::config::flags::Engine;
use crate::config::resolved::DecodeAllocation;
use crate::ids::Room;
use crate::model::logprobs::{Sampled, TopLogprobs};
use crate::transfer::aux::AuxRecord;
use std::mem;

impl Cluster<'_> {
    /// Chunks leave by the NICs of their hosts.
    pub(super) fn leave(&mut self) {
        let now = self.agenda.now();
        for flow in mem::take(&mut self.flows) {
            self.moved += u64::from(flow.tokens);
            if self.plan.engine == Engine::Recorded {
                // All of it, when all is computed, and as if nobody else used the link.
                if flow.last.is_some() && self.takes_late_as_recorded() {
                    self.agenda.put(now, Happening::Done { host: flow.from, source: flow.source });
                } else if let Some(last) = &flow.last {
                    let tokens = self.arrivals.list()[last.room as usize].input;
                    let at = now + self.plan.fabric.time_of(tokens);
                    self.agenda.put(at, Happening::Land(Box::new(flow)));
                }
                continue;
            }
            let takes = self.plan.fabric.time_of(flow.tokens);
            let first = self.hosts[flow.from].nic.send(now, takes);
            self.agenda.put(first, Happening::Come(Box::new(flow)));
        }
    }

    /// The recorded engine's decode workers take pages when a prompt is computed, and its KV leaves then, whatever the
    /// prefill worker does meanwhile.
    pub(super) fn takes_late_as_recorded(&self) -> bool {
        self.plan.engine == Engine::Recorded && self.plan.allocation == DecodeAllocation::Late
    }

    /// Decode has pages: the KV is there when it has had its time since it was computed. Its prefill worker, which hears
    /// of the pages between two passes, has nothing more to send.
    pub(super) fn come_at_once(&mut self, to: usize, destination: Use, room: Room) {
        let id = room.0 as usize;
        let takes = self.plan.fabric.time_of(self.arrivals.list()[id].input);
        let at = self.agenda.now().max(self.open[&id].computed + takes);
        let token = Sampled { token: 0, logprob: 0.0, top: TopLogprobs::EMPTY };
        let record = AuxRecord::new(room, &token, self.open[&id].cached);
        self.agenda
            .put(at, Happening::LandAlone { host: to, destination, record: Box::new(record) });
    }

    pub(super) fn land(&mut self, flow: Flow) {
        let now = self.agenda.now();
        let Flow { from, source, to, destination, last, .. } = flow;
        let is_last = last.is_some();
        if let Half::Destination(half) = &mut self.hosts[to].half {
            half.land(destination, last);
        }
        if is_last {
            self.agenda.put(now + self.plan.fabric.latency, Happening::Done { host: from, source });
            self.wake(to, now);
        }
    }
}
