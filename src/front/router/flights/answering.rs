//! What comes of calls to workers: passed on to the client as far as it is the client's, and told to `cluster::flight`.

use super::flight::{Body, Flight};
use super::{Flights, Load, Way};
use crate::cause::Cause;
use crate::cluster::flight::{News, Next, Terms};
use crate::cluster::router::Role;
use crate::config::resolved::FirstToken;
use crate::front::http::sse;
use crate::front::router::call::{Lost, WorkerAnswer};
use crate::front::router::failure::{self, Failure};
use crate::front::router::fleet::What;
use crate::front::router::relay::Passed;
use crate::limits::ROUTER_ANSWER_MAX;
use crate::net::ConnId;
use crate::obs::log::event;

impl Flights {
    /// News of the call whose answer is the client's.
    pub fn lead(&mut self, client: ConnId, conn: ConnId, what: What, way: &mut Way<'_>) {
        let Some(mut flight) = self.open.remove(&client) else { return };
        if flight.lead != Some(conn) {
            self.open.insert(client, flight);
            return;
        }
        match what {
            What::Ready => self.take(client, flight, News::Connected, way),
            What::Refused => {
                flight.lead = None;
                self.refused(client, flight, Role::Decode, way);
            }
            What::Processing => {
                way.fleet.has_read(conn, way.now);
                flight.release(way);
                self.keep(client, flight);
            }
            What::Arrived => {
                let Some(answer) = way.fleet.answer(conn) else { return self.keep(client, flight) };
                if !answer.is_success() {
                    // Its end says why.
                    way.cancel(flight.prefill.take());
                    return self.keep(client, flight);
                }
                let (media, is_stream) = (answer.media.clone(), answer.is_stream());
                let mut body = std::mem::take(&mut answer.body);
                let news = self.pass(client, &mut flight, &media, is_stream, &mut body, way);
                if let Some(answer) = way.fleet.answer(conn) {
                    answer.body = body;
                }
                self.follow(client, flight, news, way);
            }
            What::Ended(answer) => {
                flight.lead = None;
                self.ended(client, flight, answer, way);
            }
            What::Lost(_) if flight.relay.is_done() => {
                flight.lead = None;
                self.take(client, flight, News::Landed, way);
            }
            // Nobody is to blame but its client, and nobody else would do better.
            What::Lost(Lost::Behind) => {
                flight.lead = None;
                let (cause, why) = failure::of_loss(Lost::Behind);
                flight.last = Some(WorkerAnswer::error(&failure::error(cause, why)));
                self.fail(client, flight, cause, way);
            }
            What::Lost(lost) => {
                flight.lead = None;
                let (cause, why) = failure::of_loss(lost);
                // Where it had little time left, because prefill was lost, that is what the client is told.
                if !(flight.core.has_lost_prefill() && cause == Cause::Deadline) {
                    flight.last = Some(WorkerAnswer::error(&failure::error(cause, why)));
                }
                self.take(client, flight, News::Lost(Role::Decode, cause), way);
            }
        }
    }

    /// News of a prefill leg.
    pub fn prefill(&mut self, client: ConnId, conn: ConnId, what: What, way: &mut Way<'_>) {
        let Some(mut flight) = self.open.remove(&client) else { return };
        if flight.prefill != Some(conn) {
            self.open.insert(client, flight);
            return;
        }
        match what {
            What::Ready => return self.take(client, flight, News::Connected, way),
            What::Refused => {
                flight.prefill = None;
                return self.refused(client, flight, Role::Prefill, way);
            }
            What::Processing => {}
            What::Arrived => {
                let answer = way.fleet.answer(conn).filter(|answer| answer.is_success());
                // What says why it failed is read when it is whole.
                let Some(answer) = answer else { return self.keep(client, flight) };
                let mut body = std::mem::take(&mut answer.body);
                let news = self.pass_ahead(client, &mut flight, &mut body, way);
                if let Some(answer) = way.fleet.answer(conn) {
                    answer.body = body;
                }
                return self.follow(client, flight, news, way);
            }
            What::Ended(mut answer) if answer.is_success() => {
                flight.prefill = None;
                let news = self.pass_ahead(client, &mut flight, &mut answer.body, way);
                return self.follow(client, flight, news, way);
            }
            What::Ended(answer) => {
                flight.prefill = None;
                if !flight.has_begun(way) {
                    let news = Failure::of(&answer).news(Role::Prefill);
                    flight.last = Some(answer);
                    return self.take(client, flight, news, way);
                }
            }
            // The client's time is up, which ends decode's leg, too: that is what the client is told.
            What::Lost(Lost::Deadline) => flight.prefill = None,
            What::Lost(lost) => {
                flight.prefill = None;
                if !flight.has_begun(way) {
                    // What comes of it is told when it is known.
                    event!(
                        Debug,
                        "router",
                        "prefill leg lost",
                        request = flight.request.id,
                        why = lost
                    );
                    let why = "the prefill worker was lost before there was an answer";
                    flight.last =
                        Some(WorkerAnswer::error(&failure::error(Cause::PeerLost, why.into())));
                    return self.take(
                        client,
                        flight,
                        News::Lost(Role::Prefill, Cause::PeerLost),
                        way,
                    );
                }
            }
        }
        self.keep(client, flight);
    }

    /// Passes on what can be passed on, and says what that means for the flight.
    pub(super) fn pass(
        &mut self,
        client: ConnId,
        flight: &mut Flight,
        media: &str,
        is_stream: bool,
        body: &mut Vec<u8>,
        way: &mut Way<'_>,
    ) -> Option<News> {
        if flight.body.is_none() && !is_stream && body.len() <= ROUTER_ANSWER_MAX {
            return None;
        }
        let passed = match (flight.body, is_stream) {
            (Some(Body::Stream), false) => Passed::Broken,
            (_, true) => flight.relay.take(body),
            (_, false) => Passed::Bytes(std::mem::take(body)),
        };
        let (bytes, news) = match passed {
            Passed::Bytes(bytes) => (bytes, None),
            Passed::Failed { bytes, cause, error } => {
                (bytes, Some(flight.told(Role::Decode, cause, error)))
            }
            Passed::Broken => {
                let why = "the worker's answer is no stream of events".to_owned();
                flight.last = Some(WorkerAnswer::error(&failure::error(Cause::Internal, why)));
                (Vec::new(), Some(News::Lost(Role::Decode, Cause::Internal)))
            }
        };
        if bytes.is_empty() {
            return news;
        }
        if flight.body.is_none() || flight.core.is_retry() {
            // Who reads alone generates now.
            flight.lead.into_iter().for_each(|lead| way.fleet.has_read(lead, way.now));
            // And whom decode has asked has done its part.
            flight.release(way);
        }
        if flight.body.is_none() {
            self.open_body(client, flight, media, is_stream, way);
            flight.acquit(way);
        } else if flight.core.is_retry() {
            self.metrics.resumed.inc();
            flight.acquit(way);
        }
        self.passed += 1;
        way.connections.stream(way.reactor, client, &bytes);
        let passes = News::Passes { resumable: is_stream && flight.relay.is_resumable() };
        // Nothing is drawn or looked up for what goes well, piece by piece.
        let terms =
            &mut Terms { now: way.now, chance: 0, deadline: None, retries: &mut self.retries };
        let next = flight.core.take(passes, terms);
        if let (Next::Calm, Some(lead)) = (next, flight.lead) {
            way.fleet.set_deadline(lead, flight.until());
        }
        news
    }

    /// Passes on what prefill tells before decode does, where it is asked for that, and says what that means for the
    /// flight. Whatever else it answers is of no use, but for a failure.
    pub(super) fn pass_ahead(
        &mut self,
        client: ConnId,
        flight: &mut Flight,
        body: &mut Vec<u8>,
        way: &mut Way<'_>,
    ) -> Option<News> {
        if !self.is_ahead(flight) || !(flight.body.is_none() || flight.body == Some(Body::Stream)) {
            body.clear();
            return None;
        }
        let (bytes, failed) = match flight.relay.take_ahead(body) {
            Passed::Bytes(bytes) => (bytes, None),
            Passed::Failed { bytes, cause, error } => (bytes, Some((cause, error))),
            Passed::Broken => (Vec::new(), None),
        };
        if !bytes.is_empty() {
            if flight.body.is_none() {
                self.open_body(client, flight, sse::CONTENT_TYPE, true, way);
            }
            way.connections.stream(way.reactor, client, &bytes);
            let terms =
                &mut Terms { now: way.now, chance: 0, deadline: None, retries: &mut self.retries };
            let _ = flight.core.take(News::Told, terms);
        }
        let (cause, error) = failed.filter(|_| !flight.has_begun(way))?;
        Some(flight.told(Role::Prefill, cause, error))
    }

    /// Whether prefill is asked to tell what it samples at once.
    pub(super) fn is_ahead(&self, flight: &Flight) -> bool {
        let is_stream = matches!(&flight.request.load, Load::Routed(body) if body.is_stream());
        self.first_token == FirstToken::Prefill && is_stream
    }

    pub(super) fn open_body(
        &self,
        client: ConnId,
        flight: &mut Flight,
        media: &str,
        is_stream: bool,
        way: &mut Way<'_>,
    ) {
        flight.body = Some(if is_stream { Body::Stream } else { Body::Long });
        // Only a stream's first byte is its first token.
        if is_stream && flight.is_counted() {
            self.metrics.first_byte(way.now.duration_since(flight.begun));
        }
        way.connections.open_body(way.reactor, client, 200, media);
    }

    /// Decode's answer has ended.
    pub(super) fn ended(
        &mut self,
        client: ConnId,
        mut flight: Flight,
        mut answer: WorkerAnswer,
        way: &mut Way<'_>,
    ) {
        if !answer.is_success() {
            let news = Failure::of(&answer).news(Role::Decode);
            flight.last = Some(answer);
            return self.take(client, flight, news, way);
        }
        let (media, is_stream) = (answer.media.clone(), answer.is_stream());
        let mut body = std::mem::take(&mut answer.body);
        let news = self.pass(client, &mut flight, &media, is_stream, &mut body, way);
        let news = news.unwrap_or_else(|| match flight.body {
            // It knew how to end it, and did not.
            Some(Body::Stream) if flight.relay.is_resumable() && !flight.relay.is_done() => {
                let (cause, why) = failure::of_loss(Lost::Closed);
                flight.last = Some(WorkerAnswer::error(&failure::error(cause, why)));
                News::Lost(Role::Decode, cause)
            }
            _ => News::Landed,
        });
        if news == News::Landed && flight.body.is_none() {
            flight.last = Some(WorkerAnswer { body, ..answer });
        }
        self.take(client, flight, news, way);
    }
}
