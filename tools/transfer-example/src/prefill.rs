//! The prefill engine: it computes a prompt in chunks and hands over each chunk.

use crate::engine::{self, check, wait_for};
use crate::{REQUESTS, Request};
use baton::agent::SourceAgent;
use baton::cause::Cause;
use baton::net::Reactor;
use baton::transfer::answer::TransferAnswer;
use baton::transfer::aux::AuxRecord;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Tokens that are computed at a time.
const CHUNK: u32 = 32;

/// Serves the requests. `spawn_decode` starts the other engine.
pub fn run<W: FnOnce() -> Result<(), String>>(
    spawn_decode: impl FnOnce(SocketAddr, Instant) -> Result<W, String>,
    until: Instant,
) -> Result<(), String> {
    let reactor = Reactor::new().map_err(engine::text)?;
    let mut agent = SourceAgent::source(engine::config(engine::SOURCE_LAYOUT)?, reactor)?;
    let wait_for_decode = spawn_decode(agent.address().ok_or("no address")?, until)?;
    let served = REQUESTS.iter().try_for_each(|request| serve(&mut agent, request, until));
    // If a request has failed here, decode learns it from the end of the link.
    agent.close(until)?;
    served.and(wait_for_decode())
}

fn serve(agent: &mut SourceAgent, request: &Request, until: Instant) -> Result<(), String> {
    let &Request { room, tokens, is_cancelled } = request;
    let slot = agent.enter(room, engine::prompt(tokens), None, until)?;
    let target = wait_for(agent, until, |agent| match agent.poll_answer()? {
        TransferAnswer::Granted { target, .. } => Some(target),
        _ => None,
    })?;
    let pages = engine::pages_for(&agent.memory.layout, tokens);
    agent.begin(slot, target, &pages);
    let mut computed = target.prefix;
    // The client of a cancelled request leaves before the last chunk.
    while computed < tokens && !(is_cancelled && computed + CHUNK >= tokens) {
        let chunk = computed..tokens.min(computed + CHUNK);
        computed = chunk.end;
        for (at, value) in engine::kv_words(agent, room, chunk.clone(), &pages) {
            agent.memory.region.word(at).store(value, Ordering::Relaxed);
        }
        let aux = (computed == tokens).then(|| AuxRecord::new(room, engine::AUX_PAYLOAD));
        agent.chunk(slot, chunk, aux);
    }
    let (cause, _) = engine::end(agent, slot, until)?;
    println!("prefill: {room:?}, {computed} of {tokens} tokens computed, {cause:?}");
    check(cause == is_cancelled.then_some(Cause::ClientGone), "prefill: another end")
}
