//! The decode engine: it leases pages, waits for their KV, and compares it with what prefill wrote.

use crate::engine::{self, check, wait_for};
use crate::{REQUESTS, Request};
use baton::agent::DestinationAgent;
use baton::cause::Cause;
use baton::link::handoff::Source;
use baton::net::Reactor;
use baton::transfer::answer::TransferAnswer;
use baton::transfer::status::State;
use std::net::SocketAddr;
use std::time::Instant;

pub fn run(source: SocketAddr, until: Instant) -> Result<(), String> {
    let reactor = Reactor::new().map_err(engine::text)?;
    let config = engine::config(engine::DESTINATION_LAYOUT)?;
    let mut agent = DestinationAgent::destination(config, reactor)?;
    let source = Source::Remote(source);
    let served = REQUESTS.iter().try_for_each(|request| serve(&mut agent, &source, request, until));
    agent.close(until)?;
    served
}

fn serve(
    agent: &mut DestinationAgent,
    source: &Source,
    request: &Request,
    until: Instant,
) -> Result<(), String> {
    let &Request { room, tokens, is_cancelled } = request;
    let slot = agent.enter(room, engine::prompt(tokens), Some(source), until)?;
    let session = wait_for(agent, until, |agent| match agent.poll_answer()? {
        TransferAnswer::SessionReady { session, .. } => Some(Ok(session)),
        TransferAnswer::Abort { cause, .. } => Some(Err(cause)),
        _ => None,
    })?;
    let session = session.map_err(|cause| format!("no session: {cause}"))?;
    let pages = engine::pages_for(&agent.memory.layout, tokens);
    agent.expect(slot, (session, room), 0..tokens, &pages);
    if is_cancelled {
        let is_moving = |agent: &mut DestinationAgent| {
            (agent.status(slot).state == State::Transferring).then_some(())
        };
        wait_for(agent, until, is_moving)?;
        agent.cancel(slot, Cause::ClientGone);
    }
    let (cause, aux) = engine::end(agent, slot, until)?;
    let words = engine::kv_words(agent, room, 0..tokens, &pages);
    let wrong = engine::count_differences(agent, &words);
    println!("decode: {room:?}, {wrong} words differ, {cause:?}");
    let aux = aux.filter(|aux| aux.belongs_to(room, slot.generation));
    let is_whole = wrong == 0 && aux.is_some_and(|aux| aux.payload == engine::AUX_PAYLOAD);
    check(cause == is_cancelled.then_some(Cause::ClientGone), "decode: another end")?;
    check(is_whole != is_cancelled, "decode: the KV or the aux record differs")
}
