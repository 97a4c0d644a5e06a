//! The scheduler with a pseudo-model, movers that copy pages, and a `ctl` that only passes messages
//! on.

#[allow(dead_code)]
mod support;

use baton::cause::Cause;
use baton::ids::{Generation, RequestId, Room, SlotId};
use baton::kv::groups::GroupCounts;
use baton::kv::page_key::Salt;
use baton::limits::{GRAMMAR_STACK, KEPT_KV_LIFE, PASSES_MAX};
use baton::model::grammar::GrammarSource;
use baton::model::logprobs::Sampled;
use baton::model::sampler::SamplingParams;
use baton::sched::engine::{EngineLoop, run};
use baton::sched::first_token::FirstTokenRecord;
use baton::sched::messages::{EngineCommand, EngineEvent, FinishReason, RequestEvent};
use baton::sched::worker::Activity;
use baton::sim::model::{LAYERS, VOCAB};
use baton::stdx::event_count::EventCount;
use baton::stdx::failpoint::set_failpoint;
use baton::transfer::aux::AuxRecord;
use baton::transfer::status::State;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use support::Rng;
use support::rig::{
    DECODE, END, FIRST, Legs, Rig, Setup, Told, Use, Wanted, alone, alone_with_state,
    alone_with_windows, request,
};

const TOO_LONG: Duration = Duration::from_secs(2000);

fn random_setup(rng: &mut Rng) -> Setup {
    let mut setup = Setup::new();
    setup.config.page_size = [1, 2, 4, 16][rng.within(0, 3) as usize];
    setup.config.largest_page = setup.config.page_size.max(4);
    setup.config.max_running = rng.within(1, 6) as usize;
    setup.config.chunked_prefill_size = rng.within(1, 40);
    setup.config.max_prefill_tokens = rng.within(1, 40);
    setup.config.chunk_ms = rng.within(0, 1) * 20;
    let least = 96 / setup.config.page_size;
    setup.prefill_pages = least + rng.within(0, least);
    setup.decode_pages = least + rng.within(0, least);
    setup.config.reserve = [0, 3, 512][rng.within(0, 2) as usize];
    setup.tier_pages = least * [0, 1, 4][rng.within(0, 2) as usize];
    setup
}

fn random_wanted(rng: &mut Rng) -> Wanted {
    let mut wanted = Wanted::new(rng.within(1, 60), rng.within(1, 30));
    wanted.prompt.iter_mut().for_each(|id| *id = rng.within(0, VOCAB - 1));
    // Many begin the same, and part at any place.
    let shared = rng.within(0, wanted.prompt.len() as u32) as usize;
    (0..shared).for_each(|index| wanted.prompt[index] = index as u32 * 5 % VOCAB);
    wanted.salt = (!rng.one_in(5)).then(|| Salt(u128::from(rng.within(0, 1))));
    if rng.one_in(2) {
        wanted.sampling = SamplingParams {
            temperature: 0.9,
            top_p: 0.8,
            top_k: 20,
            presence_penalty: 0.3,
            seed: rng.next(),
            ..SamplingParams::GREEDY
        };
    }
    wanted.stop_tokens = (0..rng.within(0, 2)).map(|_| rng.within(0, VOCAB - 1)).collect();
    if rng.one_in(3) {
        let texts = ["([!-%]{2} ?){1,8}", "[ -']*#", "(!|\"\")*[#-&]{3}"];
        wanted.grammar = regex(texts[rng.within(0, 2) as usize]);
        wanted.stop_tokens.push(END);
    }
    wanted.top_logprobs = rng.within(0, 3) as usize;
    if rng.one_in(4) {
        let last = wanted.prompt.len() as u32;
        wanted.prompt_logprobs = Some((rng.within(1, last), rng.within(0, 3) as usize));
    }
    wanted
}

/// Submits over time, with everything else at random speeds; tokens and outcomes in order of
/// submission.
fn play(rig: &mut Rig, wanted: &[Wanted], rng: &mut Rng) -> Vec<RequestId> {
    play_with_flushes(rig, wanted, rng, false)
}

/// If `flushes`, the cache of a worker is emptied now and then.
fn play_with_flushes(
    rig: &mut Rig,
    wanted: &[Wanted],
    rng: &mut Rng,
    flushes: bool,
) -> Vec<RequestId> {
    rig.watch.token_ns.store(1_000_000, Relaxed);
    let mut ids = Vec::new();
    while ids.len() < wanted.len() {
        if rig.has_slots() && rng.one_in(3) {
            ids.push(rig.submit(&wanted[ids.len()]).decode);
        }
        if let Some(mover) = &mut rig.mover {
            mover.speed = rng.within(0, 3) as usize;
        }
        (rig.hold_grants, rig.hold_sessions) = (rng.one_in(4), rng.one_in(4));
        if flushes && rng.one_in(60) {
            let worker = if rig.mover.is_some() && rng.one_in(2) { DECODE } else { FIRST };
            rig.commands.send(EngineCommand::Flush { worker }).unwrap();
        }
        rig.turn();
    }
    (rig.hold_grants, rig.hold_sessions) = (false, false);
    if let Some(mover) = &mut rig.mover {
        mover.speed = 1;
    }
    rig.finish();
    ids
}

#[test]
fn output_does_not_depend_on_hand_off_chunks_pages_or_neighbours() {
    let (mut cached, mut given_up, mut retracted, mut scored) = (0, 0, 0, 0);
    for seed in 0..40 {
        let rng = &mut Rng::new(seed * 1000);
        let wanted: Vec<_> = (0..rng.within(1, 14)).map(|_| random_wanted(rng)).collect();
        let expected: Vec<_> = wanted.iter().map(alone).collect();
        for split in [true, false] {
            let setup = random_setup(rng);
            let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
            rig.late = split && seed % 3 == 0;
            let ids = play(&mut rig, &wanted, rng);
            for (id, expected) in ids.iter().zip(&expected) {
                assert_eq!(&rig.told[id], expected, "seed {seed}, split {split}, {setup:?}");
                scored += expected.prompt.as_ref().map_or(0, |prompt| prompt.iter().count());
            }
            cached += rig.cached.values().sum::<u32>();
            let free = rig.stats(FIRST).pages().free;
            given_up += u32::from(free == 0);
            let last = if split { DECODE } else { FIRST };
            retracted += rig.stats(last).retracted_total.load(Relaxed);
        }
    }
    assert!(
        cached > 1000 && given_up > 0,
        "{cached} tokens were cached, {given_up} caches were full"
    );
    assert!(scored > 1000, "{scored} tokens of prompts have a logprob");
    assert!(retracted > 20, "{retracted} requests gave up their pages");
}

/// A page that retraction loses changes the output. The simulator finds this mistake too seldom,
/// because most of its lost pages still have the same bytes. The last page can be one of the state.
#[test]
fn a_lost_page_of_retracted_kv_changes_the_output() {
    let is_changed = |seed, has_state: bool| {
        let rng = &mut Rng::new(seed);
        let wanted: Vec<_> = (0..14).map(|_| random_wanted(rng)).collect();
        let alone: fn(&Wanted) -> Told =
            if has_state { |it| alone_with_state([None; 3], it) } else { alone };
        let expected: Vec<_> = wanted.iter().map(alone).collect();
        let mut setup = random_setup(rng);
        if has_state {
            setup = setup.with_state();
            let states = 3 * setup.config.groups.state_pages;
            setup.decode_pages = 96 / setup.config.page_size + states;
        }
        setup.config.reserve = 0;
        setup.tier_pages = 4 * setup.decode_pages;
        set_failpoint(Some("the last page of retracted KV is lost"));
        let mut rig = Rig::mixed(&setup);
        let ids = play(&mut rig, &wanted, rng);
        set_failpoint(None);
        ids.iter().zip(&expected).any(|(id, expected)| &rig.told[id] != expected)
    };
    assert!((0..40).any(|seed| is_changed(seed, false)));
    assert!((0..40).any(|seed| is_changed(seed, true)));
}

/// With a window, pages go back while a request runs, on both workers. The cache finds a prefix
/// without its first pages.
#[test]
fn output_with_a_window_does_not_depend_on_pages_that_went_back() {
    let (mut cached, mut retracted, mut copied, mut tokens) = (0, 0, 0, 0);
    for seed in 0..60 {
        let rng = &mut Rng::new(seed * 1000 + 7);
        let window = Some([1, 2, 5, 16, 33][rng.within(0, 4) as usize]);
        let kinds = [[window; 3], [window, None, window], [None, window, None]];
        let windows = kinds[rng.within(0, 2) as usize];
        let mut wanted: Vec<_> = (0..rng.within(1, 14)).map(|_| random_wanted(rng)).collect();
        // Some continue the prompt of another one.
        for index in 1..wanted.len() {
            if rng.one_in(3) {
                wanted[index].prompt = wanted[index - 1].prompt.clone();
                wanted[index].prompt.truncate(50);
                wanted[index].prompt.extend([3, 1, 4, 1, 5]);
                wanted[index].prompt_logprobs = None;
            }
        }
        let expected: Vec<_> = wanted.iter().map(|it| alone_with_windows(windows, it)).collect();
        for split in [true, false] {
            let mut setup = random_setup(rng);
            setup = setup.with_windows(windows);
            setup.config.reserve = setup.config.reserve.min(3);
            let groups = setup.config.groups.total() as u32;
            setup.decode_pages = groups * 96 / setup.config.page_size;
            setup.prefill_pages *= groups;
            let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
            rig.late = split && seed % 3 == 0;
            let ids = play(&mut rig, &wanted, rng);
            for (id, expected) in ids.iter().zip(&expected) {
                assert_eq!(&rig.told[id], expected, "seed {seed}, split {split}, {setup:?}");
            }
            cached += rig.cached.values().sum::<u32>();
            let last = if split { DECODE } else { FIRST };
            retracted += rig.stats(last).retracted_total.load(Relaxed);
            if split {
                copied += rig.copied();
                let groups = setup.config.groups.total() as u32;
                tokens += wanted.iter().map(|it| groups * it.prompt.len() as u32).sum::<u32>();
            }
        }
    }
    assert!(cached > 1000, "{cached} tokens were cached");
    assert!(retracted > 5, "{retracted} requests gave up their pages");
    assert!(copied * 5 < tokens * 4, "{copied} tokens were handed over, of {tokens}");
}

/// State goes from chunk to chunk, through retraction and hand-over, and is never that of another
/// request.
#[test]
fn output_with_state_does_not_depend_on_how_the_work_is_cut() {
    let (mut retracted, mut stored, mut recomputed, mut cached) = (0, 0, 0, [0; 2]);
    let mut flushed = 0;
    for seed in 0..90 {
        let rng = &mut Rng::new(seed * 1000 + 11);
        let window = Some([1, 5, 16][rng.within(0, 2) as usize]);
        let kinds = [[None; 3], [None; 3], [window; 3], [window, None, window]];
        let windows = kinds[rng.within(0, 3) as usize];
        let wanted: Vec<_> = (0..rng.within(1, 14)).map(|_| random_wanted(rng)).collect();
        let expected: Vec<_> = wanted.iter().map(|it| alone_with_state(windows, it)).collect();
        for split in [true, false] {
            let mut setup = random_setup(rng).with_windows(windows).with_state();
            setup.config.reserve = setup.config.reserve.min(3);
            let all = setup.config.groups.pages(1, 1);
            setup.decode_pages = all * 96 / setup.config.page_size;
            setup.prefill_pages *= all;
            setup.tier_pages *= all;
            let checkpoints = [0, 1, 6][rng.within(0, 2) as usize];
            setup.config.checkpoint_pages = checkpoints * setup.config.groups.state_pages;
            let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
            rig.late = split && seed % 3 == 0;
            // Without its cache, one of two workers lacks what the other one has.
            let ids = play_with_flushes(&mut rig, &wanted, rng, seed % 2 == 0);
            flushed += rig.flushed;
            for (id, expected) in ids.iter().zip(&expected) {
                assert_eq!(&rig.told[id], expected, "seed {seed}, split {split}, {setup:?}");
            }
            let stats = rig.stats(if split { DECODE } else { FIRST });
            let gave_up = stats.retracted_total.load(Relaxed);
            let again = stats.recomputed_tokens_total.load(Relaxed);
            retracted += gave_up;
            recomputed += again;
            stored += u64::from(gave_up > 0 && again == 0);
            cached[usize::from(checkpoints > 0)] += rig.cached.values().sum::<u32>();
        }
    }
    assert!(retracted > 5, "{retracted} requests gave up their pages");
    assert!(cached[0] == 0 && cached[1] > 500, "{cached:?} tokens were cached");
    assert!(flushed > 20, "{flushed} times a cache was emptied");
    assert!(recomputed > 0 && stored > 0, "{recomputed} tokens, {stored} runs without any");
}

/// The second prompt with the same beginning shows where prompts part. The third one begins with
/// the checkpoint that the second one left there. A checkpoint is also behind the last full page of
/// each prompt.
#[test]
fn a_prompt_begins_with_the_checkpoint_where_prompts_part() {
    for split in [false, true] {
        let mut setup = Setup::new().with_state();
        setup.config.checkpoint_pages = 6 * setup.config.groups.state_pages;
        let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
        let mut ask = |wanted: &Wanted| {
            let legs = rig.submit(wanted);
            rig.finish();
            assert_eq!(rig.told[&legs.decode], alone_with_state([None; 3], wanted));
            rig.cached[&legs.decode]
        };
        // 22 shared tokens, on pages of 4.
        let prompt = |own: u32| {
            let mut wanted = Wanted::new(40, 5);
            (22..40).for_each(|at| wanted.prompt[at] = (at as u32 * own + own) % VOCAB);
            wanted
        };
        assert_eq!([1, 2, 3, 4].map(|own| ask(&prompt(own))), [0, 0, 20, 20]);
        assert_eq!(ask(&prompt(4)), 36, "the same prompt");
        let mut next = prompt(4);
        next.prompt.extend([1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(ask(&next), 36, "the next prompt of a conversation");
        assert_eq!(ask(&Wanted { salt: Some(Salt(1)), ..prompt(3) }), 0, "another tenant");
        assert_eq!(ask(&Wanted { salt: None, ..prompt(3) }), 0, "without a cache");
    }
}

#[test]
fn a_checkpoint_that_spares_few_tokens_is_not_made() {
    let mut setup = Setup::new().with_state();
    setup.config.checkpoint_pages = 6 * setup.config.groups.state_pages;
    setup.config.checkpoint_tokens = 12;
    let mut rig = Rig::mixed(&setup);
    let mut wanted = Wanted::new(40, 5);
    // 40, 46 and 56 tokens, on pages of 4: the second prompt ends 8 tokens behind a checkpoint.
    for (more, cached) in [(0, 0), (6, 36), (10, 36), (0, 52)] {
        let from = wanted.prompt.len() as u32;
        wanted.prompt.extend((from..from + more).map(|id| id % VOCAB));
        let legs = rig.submit(&wanted);
        rig.finish();
        assert_eq!(rig.cached[&legs.decode], cached, "{} tokens", wanted.prompt.len());
    }
}

/// A pass computes 40 tokens. So the second prompt waits two passes for the checkpoint of the
/// first one, though it could begin in the second pass.
#[test]
fn equal_prompts_wait_for_the_checkpoint_of_the_first_one() {
    let mut setup = Setup::new().with_state();
    setup.config.checkpoint_pages = 6 * setup.config.groups.state_pages;
    setup.config.chunked_prefill_size = 40;
    let mut rig = Rig::mixed(&setup);
    let all = [(); 3].map(|()| rig.submit(&Wanted::new(60, 5)).decode);
    rig.finish();
    assert_eq!(all.map(|id| rig.cached[&id]), [0, 56, 56]);
}

/// A request that has no room beside an idle checkpoint takes the place of the checkpoint.
#[test]
fn a_request_as_large_as_the_pool_begins_without_a_checkpoint() {
    let mut setup = Setup::new().with_state();
    let state = setup.config.groups.state_pages;
    setup.config.checkpoint_pages = state;
    // 45 tokens, on pages of 4.
    setup.decode_pages = 12 + state;
    let mut rig = Rig::mixed(&setup);
    let (long, mut short) = (Wanted::new(40, 5), Wanted::new(40, 5));
    short.prompt.truncate(30);
    for (wanted, cached) in [(&short, 0), (&short, 28), (&long, 0), (&short, 0)] {
        let legs = rig.submit(wanted);
        rig.finish();
        assert_eq!(rig.told[&legs.decode], alone_with_state([None; 3], wanted));
        assert_eq!(rig.cached[&legs.decode], cached);
    }
}

/// A running request has the pages of its window, and no more. Its prompt gets all pages at once.
#[test]
fn pages_behind_the_window_go_back_while_a_request_runs() {
    for split in [true, false] {
        let mut setup = Setup::new();
        setup = setup.with_windows([Some(9); 3]);
        setup.config.prefix_cache = false;
        let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
        let decode = if split { DECODE } else { FIRST };
        let legs = rig.submit(&Wanted::new(60, 60));
        let (mut prompt, mut most, mut prefill) = (0, 0, Vec::new());
        while rig.told.get(&legs.decode).is_none_or(|told| told.outcome.is_none()) {
            rig.turn();
            let in_use = |worker| rig.stats(worker).pages().in_use;
            let tokens = rig.told.get(&legs.decode).map_or(0, |told| told.tokens.len());
            let most_so_far = if tokens < 2 { &mut prompt } else { &mut most };
            *most_so_far = in_use(decode).max(*most_so_far);
            if split {
                prefill.push(in_use(FIRST));
            }
        }
        // The 8 tokens before the next one lie on 2 or 3 pages of 4.
        assert_eq!(most, 3, "split {split}");
        assert_eq!(prompt, if split { 2 } else { 13 }, "split {split}");
        if split {
            prefill.dedup();
            assert_eq!(prefill, [0, 13, 9, 5, 2, 0], "chunks of 16 tokens pass on prefill");
        }
    }
}

/// A destination that knows no windows wants all tokens. It gets them if it asks before their pages
/// go back. Later its request fails.
#[test]
fn a_destination_that_wants_tokens_behind_the_window_gets_them_or_is_refused() {
    for late in [false, true] {
        wants_all_tokens(late);
    }
}

fn wants_all_tokens(late: bool) {
    let mut setup = Setup::new();
    setup = setup.with_windows([Some(9); 3]);
    setup.decode_sees_all = true;
    let mut rig = Rig::split(&setup);
    rig.late = late;
    let legs = rig.submit(&Wanted::new(40, 4));
    rig.finish();
    assert_eq!(rig.copied(), if late { 0 } else { 40 });
    let outcome = match late {
        true => FinishReason::Failed(Cause::Incompatible),
        false => FinishReason::HandedOver,
    };
    assert_eq!(rig.told[&legs.prefill.unwrap()].outcome, Some(outcome), "late {late}");
}

/// Pages that several requests use do not become free when one of them gives them back. Admission
/// leaves room for the pages that replace them.
#[test]
fn requests_that_share_a_window_keep_their_reserve() {
    let mut setup = Setup::new();
    setup = setup.with_windows([Some(33); 3]);
    (setup.config.max_running, setup.decode_pages) = (16, 60);
    let wanted = Wanted::new(80, 40);
    let expected = alone_with_windows([Some(33); 3], &wanted);
    let mut rig = Rig::mixed(&setup);
    let ids: Vec<_> = (0..16).map(|_| rig.submit(&wanted).decode).collect();
    rig.finish();
    ids.iter().for_each(|id| assert_eq!(rig.told[id], expected));
    assert!(rig.cached.values().sum::<u32>() > 15 * 70, "they share a prompt");
    assert_eq!(rig.stats(FIRST).retracted_total.load(Relaxed), 0);
}

/// A token that was generated has the same logprob and the same alternatives as a part of a prompt.
#[test]
fn logprobs_of_a_prompt_are_those_of_generation() {
    for (max_running, page_size, chunk) in [(1, 1, 1), (1, 16, 40), (3, 4, 7), (6, 2, 40)] {
        let mut setup = Setup::new();
        setup.config.max_running = max_running;
        (setup.config.page_size, setup.config.largest_page) = (page_size, 16);
        setup.config.chunked_prefill_size = chunk;
        (setup.prefill_pages, setup.decode_pages) = (96, 96);
        let mut wanted = Wanted { top_logprobs: 2, ..Wanted::new(13, 25) };
        let generated = alone(&wanted).tokens;
        wanted.prompt.extend(generated.iter().map(|sampled| sampled.token));
        for start in [1, 13, 14, 37, 38] {
            wanted.prompt_logprobs = Some((start, 2));
            for split in [true, false] {
                let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
                let decode = rig.submit(&wanted).decode;
                rig.finish();
                let found = rig.told[&decode].prompt.as_ref().expect("the prompt has logprobs");
                assert_eq!(found.iter().count(), 38 - start as usize);
                for (at, scored) in found.iter().filter(|(at, _)| *at >= 13) {
                    let Sampled { token, logprob, top } = generated[at as usize - 13];
                    assert_eq!((scored.logprob, scored.top), (logprob, top), "{at}, {setup:?}");
                    let better = top.as_slice().iter().filter(|entry| entry.0 != token);
                    let better = better.filter(|entry| entry.1 >= logprob).count();
                    assert_eq!(scored.rank as usize, 1 + better, "{at}");
                }
            }
        }
    }
}

/// Late allocation: while a prompt is read, decode has no page for it; what is computed waits at
/// prefill.
#[test]
fn late_pages_are_taken_when_the_prompt_is_computed() {
    for late in [false, true] {
        let mut rig = Rig::split(&Setup::new());
        rig.late = late;
        let wanted = Wanted::new(100, 20);
        let legs = rig.submit(&wanted);
        let mut taken_while_read = 0;
        while rig.told[&legs.prefill.unwrap()].tokens.is_empty() {
            rig.turn();
            taken_while_read = taken_while_read.max(rig.stats(DECODE).pages().in_use);
        }
        assert_eq!(taken_while_read > 0, !late);
        rig.finish();
        assert_eq!(rig.told[&legs.decode], alone(&wanted));
    }
}

/// What is computed leaves when its Destination comes, also between two layers of what others need.
#[test]
fn computed_kv_leaves_while_other_prompts_are_computed() {
    for layer in 1..LAYERS {
        let mut rig = Rig::split(&Setup::new());
        (rig.late, rig.hold_grants) = (true, true);
        let first = rig.submit(&Wanted::new(10, 6));
        let mut granted = Vec::new();
        while granted.is_empty() {
            rig.step_engine();
            rig.step_ctl();
            granted = rig.take_held();
        }
        assert_eq!(rig.state(first.decode), State::WaitingForInput);
        let second = rig.submit(&Wanted::new(100, 6));
        let (commands, watch) = (rig.commands.clone(), rig.watch.clone());
        let at = watch.layers.load(Relaxed) + u64::from(layer);
        *rig.watch.hook.lock().unwrap() = Some(Box::new(move || {
            if watch.layers.load(Relaxed) == at {
                granted.drain(..).for_each(|command| commands.send(command).unwrap());
            }
        }));
        rig.step_engine();
        (0..4).for_each(|_| rig.mover.as_mut().unwrap().step());
        assert_eq!(rig.state(first.decode), State::Success, "layer {layer}");
        rig.hold_grants = false;
        rig.finish();
        assert_eq!(rig.told[&first.decode], alone(&Wanted::new(10, 6)));
        assert_eq!(rig.told[&second.decode], alone(&Wanted::new(100, 6)));
    }
}

/// A client that leaves at any moment of a late hand-off leaves nothing behind.
#[test]
fn a_late_hand_off_can_be_aborted_at_every_turn() {
    for turns in 0..20 {
        for whose in [FIRST, DECODE] {
            let mut rig = Rig::split(&Setup::new());
            rig.late = true;
            let legs = rig.submit(&Wanted::new(100, 20));
            // Its Destination, too, may be on the way for long.
            rig.hold_grants = turns % 2 == 1;
            (0..turns).for_each(|_| _ = rig.turn());
            rig.abort(if whose == FIRST { legs.prefill.unwrap() } else { legs.decode });
            (0..3).for_each(|_| _ = rig.turn());
            rig.hold_grants = false;
            rig.finish();
            let next = rig.submit(&Wanted::new(40, 6));
            rig.finish();
            assert_eq!(rig.told[&next.decode], alone(&Wanted::new(40, 6)));
        }
    }
}

/// Prefill first: the KV is kept for a limited time until decode claims it. The first token is
/// reported before that.
#[test]
fn kept_kv_is_claimed_or_given_up() {
    let wanted = Wanted::new(40, 12);
    for (late, awaited) in [(false, false), (true, false), (true, true)] {
        let mut rig = Rig::split(&Setup::new());
        let (kept, room) = rig.submit_kept(&wanted);
        (0..20).for_each(|_| _ = rig.turn());
        assert_eq!((rig.tokens(kept).len(), rig.outcome(kept)), (1, None));
        assert_eq!(rig.stats(FIRST).pages().in_use, 10);
        rig.wait(KEPT_KV_LIFE - Duration::from_millis(1));
        (0..2).for_each(|_| _ = rig.turn());
        assert_eq!(rig.outcome(kept), None, "it may still be claimed");
        if awaited {
            rig.await_kept(kept);
        }
        if late && awaited {
            // It waits for pages at decode, which has said that it will come.
            rig.turn();
            rig.wait(10 * KEPT_KV_LIFE);
            (0..2).for_each(|_| _ = rig.turn());
            let claimed = rig.claim(room, &wanted);
            rig.finish();
            assert_eq!(rig.told[&claimed], alone(&wanted));
        } else if late {
            rig.wait(Duration::from_millis(2));
            rig.finish();
            assert_eq!(rig.outcome(kept), Some(FinishReason::Failed(Cause::Deadline)));
        } else {
            let claimed = rig.claim(room, &wanted);
            // Claimed at the last moment it has time to arrive.
            rig.mover.as_mut().unwrap().speed = 0;
            (0..2).for_each(|_| _ = rig.turn());
            rig.wait(Duration::from_secs(1));
            rig.mover.as_mut().unwrap().speed = 1;
            rig.finish();
            assert_eq!(rig.told[&claimed], alone(&wanted));
            assert_eq!(rig.outcome(kept), Some(FinishReason::HandedOver));
        }
        assert_eq!(rig.told[&kept].tokens, alone(&wanted).tokens[..1]);
    }
}

/// If no prefill worker is left, decode runs prefill itself, besides the KV that it receives.
#[test]
fn decode_reads_a_request_without_a_prefill_leg_and_generates_the_same_tokens() {
    for seed in 0..20 {
        let rng = &mut Rng::new(seed * 77);
        let wanted: Vec<_> = (0..12).map(|_| random_wanted(rng)).collect();
        let mut rig = Rig::split(&random_setup(rng));
        let mut ids = Vec::new();
        for (index, wanted) in wanted.iter().enumerate() {
            ids.push(if index % 2 == 0 {
                rig.submit_alone(wanted)
            } else {
                rig.submit(wanted).decode
            });
            (0..rng.within(0, 5)).for_each(|_| _ = rig.turn());
        }
        let gone = rig.submit_alone(&wanted[0]);
        (0..rng.within(0, 9)).for_each(|_| _ = rig.turn());
        rig.abort(gone);
        rig.finish();
        for (id, wanted) in ids.iter().zip(&wanted) {
            assert_eq!(rig.told[id], alone(wanted), "seed {seed}");
        }
    }
}

/// What one request has left, the next one with the same beginning neither computes nor gets sent.
#[test]
fn a_shared_prompt_prefix_is_neither_computed_nor_sent_again() {
    let mut longer = Wanted::new(30, 6);
    longer.prompt.extend(alone(&Wanted::new(30, 6)).tokens.iter().map(|sampled| sampled.token));
    longer.prompt.extend([1, 2, 3]);
    for split in [true, false] {
        let setup = Setup::new();
        let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
        let ask = |rig: &mut Rig, wanted: &Wanted| {
            let before = (rig.stats(FIRST).prompt_tokens_total.load(Relaxed), rig.copied());
            let legs = rig.submit(wanted);
            rig.finish();
            assert_eq!(rig.told[&legs.decode], alone(wanted));
            let computed = rig.stats(FIRST).prompt_tokens_total.load(Relaxed) - before.0;
            assert_eq!(computed, wanted.prompt.len() as u64 - u64::from(rig.cached[&legs.decode]));
            (rig.cached[&legs.decode], rig.copied() - before.1)
        };
        let first = Wanted::new(30, 6);
        assert_eq!(ask(&mut rig, &first), (0, if split { 30 } else { 0 }));
        // Whole pages of 4, and never the last token, because its logits are needed.
        assert_eq!(ask(&mut rig, &first), (28, if split { 2 } else { 0 }));
        // 30 and 5 of the answer have KV where it was generated, not its last token: 8 pages, and a
        // prefill worker has read 7.
        assert_eq!(ask(&mut rig, &longer), if split { (28, 39 - 32) } else { (32, 0) });
        let other = Wanted { salt: Some(Salt(1)), ..longer.clone() };
        assert_eq!(ask(&mut rig, &other).0, 0, "another tenant's");
        let nobody = Wanted { salt: None, ..longer.clone() };
        assert_eq!(ask(&mut rig, &nobody).0, 0);
        for worker in [FIRST, DECODE] {
            rig.commands.send(EngineCommand::Flush { worker }).unwrap();
            if !split {
                break;
            }
        }
        rig.check_empty();
        assert_eq!(rig.flushed, 1 + usize::from(split));
        assert_eq!(rig.stats(FIRST).pages().cached, 0);
        assert_eq!(ask(&mut rig, &longer).0, 0, "the cache was emptied");
    }
}

/// KV from before a flush stays with its request: it does not enter the emptied cache.
#[test]
fn a_request_that_began_before_a_flush_fills_no_cache() {
    for window in [None, Some(9)] {
        let mut setup = Setup::new();
        setup = setup.with_windows([window; 3]);
        let mut rig = Rig::mixed(&setup);
        let wanted = Wanted::new(60, 20);
        rig.submit(&wanted);
        for _ in 0..2 {
            rig.turn();
        }
        rig.commands.send(EngineCommand::Flush { worker: FIRST }).unwrap();
        rig.finish();
        assert_eq!(rig.flushed, 1);
        assert_eq!(rig.stats(FIRST).pages().cached, 0, "{window:?}");
        let next = rig.submit(&wanted).decode;
        rig.finish();
        assert_eq!(rig.cached[&next], 0, "{window:?}");
        assert!(rig.stats(FIRST).pages().cached > 0, "the next request fills it");
    }
}

/// What prompts of one pass begin with is computed for one of them; the others begin behind it.
#[test]
fn prompts_that_come_together_have_their_common_prefix_computed_once() {
    let like = |last: u32, salt| {
        let mut wanted = Wanted { salt, ..Wanted::new(40, 4) };
        wanted.prompt[38] = last;
        wanted
    };
    let ours = Some(Salt::default());
    for split in [true, false] {
        for (salts, computed) in [
            ([ours; 4], 40 + 3 * 4),
            ([ours, Some(Salt(1)), ours, Some(Salt(1))], 2 * (40 + 4)),
            ([None; 4], 160),
        ] {
            let mut setup = Setup::new();
            (setup.config.max_running, setup.config.max_prefill_tokens) = (8, 256);
            setup.config.chunked_prefill_size = 256;
            let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
            let wanted: Vec<_> = (0..4).zip(salts).map(|(last, salt)| like(last, salt)).collect();
            let legs: Vec<_> = wanted.iter().map(|wanted| rig.submit(wanted)).collect();
            rig.finish();
            assert_eq!(
                rig.stats(FIRST).prompt_tokens_total.load(Relaxed),
                computed,
                "split {split}"
            );
            for (legs, wanted) in legs.iter().zip(&wanted) {
                assert_eq!(rig.told[&legs.decode], alone(wanted));
            }
        }
    }
}

/// The cache is emptied while requests use it. They continue, and leave nothing behind.
#[test]
fn a_cache_may_be_emptied_at_any_turn() {
    let setup = Setup::new();
    let wanted = [Wanted::new(40, 12), Wanted::new(40, 6), Wanted::new(21, 8)];
    let expected: Vec<_> = wanted.iter().map(alone).collect();
    for split in [true, false] {
        for k in 0..40 {
            let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
            rig.submit(&wanted[0]);
            rig.finish();
            let legs: Vec<_> = wanted.iter().map(|wanted| rig.submit(wanted)).collect();
            (0..k).for_each(|_| _ = rig.turn());
            rig.commands.send(EngineCommand::Flush { worker: FIRST }).unwrap();
            if split {
                rig.commands.send(EngineCommand::Flush { worker: DECODE }).unwrap();
            }
            rig.finish();
            for (legs, expected) in legs.iter().zip(&expected) {
                assert_eq!(&rig.told[&legs.decode], expected, "split {split}, turn {k}");
            }
        }
    }
}

/// Samples of one prompt hold its pages once where they decode.
#[test]
fn samples_of_one_prompt_share_its_pages() {
    let mut setup = Setup::new();
    setup.config.max_running = 8;
    for split in [true, false] {
        let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
        let wanted = Wanted::new(40, 20);
        let legs: Vec<_> = (0..4).map(|_| rig.submit(&wanted)).collect();
        let running = if split { DECODE } else { FIRST };
        while rig.tokens(legs[3].decode).len() < 2 {
            rig.turn();
        }
        let in_use = rig.stats(running).pages().in_use;
        assert!(in_use <= 10 + 4 * 5, "{in_use} pages for four samples of ten pages of prompt");
        rig.finish();
        let expected = alone(&wanted);
        legs.iter().for_each(|legs| assert_eq!(rig.told[&legs.decode], expected));
    }
}

fn regex(text: &str) -> Option<GrammarSource> {
    Some(GrammarSource::Regex(text.into()))
}

/// The text that the tokens of a leg stand for.
fn text(told: &Told) -> String {
    let ids = told.tokens.iter().map(|sampled| sampled.token).filter(|&id| id != END);
    ids.map(|id| char::from(id as u8)).collect()
}

#[test]
fn a_grammar_limits_the_tokens_of_its_request() {
    for split in [false, true] {
        let mut rig = if split { Rig::split(&Setup::new()) } else { Rig::mixed(&Setup::new()) };
        for seed in 0..20 {
            let mut wanted = Wanted::new(10, 30);
            wanted.sampling = SamplingParams { temperature: 2.0, seed, ..SamplingParams::GREEDY };
            (wanted.grammar, wanted.stop_tokens) = (regex("[!-#]{3} [%&]{2}"), vec![END]);
            let legs = rig.submit(&wanted);
            rig.finish();
            let told = &rig.told[&legs.decode];
            assert_eq!(told.outcome, Some(FinishReason::Stop));
            let text = text(told);
            let (first, last) = text.split_once(' ').expect(&text);
            assert!(first.len() == 3 && first.bytes().all(|b| b"!\"#".contains(&b)), "{text}");
            assert!(last.len() == 2 && last.bytes().all(|b| b"%&".contains(&b)), "{text}");
            assert_eq!(told, &alone(&wanted), "split {split}");
        }
    }
}

#[test]
fn a_late_mask_delays_only_its_request() {
    type Alone = fn(&Wanted) -> Told;
    let stateless: (Setup, Alone) = (Setup::new(), alone);
    // The state has seen the token of the late mask when it is computed again.
    let of_state: Alone = |wanted| alone_with_state([None; 3], wanted);
    let stateful = (Setup::new().with_state(), of_state);
    for (split, (setup, alone)) in
        [false, true].into_iter().flat_map(|split| [(split, &stateless), (split, &stateful)])
    {
        let mut rig = if split { Rig::split(setup) } else { Rig::mixed(setup) };
        let free = Wanted::new(20, 40);
        let mut bound = Wanted::new(24, 12);
        (bound.grammar, bound.stop_tokens) = (regex("[!-%]{8}"), vec![END]);
        rig.hold_masks = true;
        let (first, second) = (rig.submit(&free), rig.submit(&bound));
        while rig.told[&first.decode].outcome.is_none() {
            rig.turn();
        }
        let told = &rig.told[&second.decode];
        assert_eq!(told.tokens.len(), 1, "only the first mask comes with the request");
        // Without work, the engine does not spin.
        assert_eq!(rig.turn(), Activity::Waiting);
        rig.hold_masks = false;
        rig.finish();
        assert_eq!(rig.told[&first.decode], alone(&free));
        assert_eq!(rig.told[&second.decode], alone(&bound));
        // An abort while the mask is late leaves nothing.
        rig.hold_masks = true;
        let legs = rig.submit(&bound);
        while rig.told[&legs.decode].tokens.is_empty() {
            rig.turn();
        }
        rig.abort(legs.decode);
        (0..3).for_each(|_| _ = rig.turn());
        rig.hold_masks = false;
        rig.finish();
    }
}

#[test]
fn a_grammar_that_needs_too_much_ends_only_its_request() {
    let run = || {
        let mut rig = Rig::mixed(&Setup::new());
        let free = Wanted::new(20, 20);
        let mut bound = Wanted::new(24, 12);
        // Behind its first character, more rules can begin than a mask may look at.
        let rules = (0..2500).map(|i| format!("a{i}: a{} | \"!\"\n", i + 1)).collect::<String>();
        let text = format!("start: \"#\" a0\n{rules}a2500: \"$\"\n");
        bound.grammar = Some(GrammarSource::Grammar(text));
        let (first, second) = (rig.submit(&free), rig.submit(&bound));
        rig.finish();
        assert_eq!(rig.told[&first.decode], alone(&free));
        let told = &rig.told[&second.decode];
        assert_eq!(told.outcome, Some(FinishReason::Failed(Cause::Grammar)), "{told:?}");
    };
    // The compiler recurses into rules.
    let thread = std::thread::Builder::new().stack_size(GRAMMAR_STACK);
    thread.spawn(run).unwrap().join().unwrap();
}

#[test]
fn the_prefill_leg_tells_the_first_token_only() {
    let mut rig = Rig::split(&Setup::new());
    let wanted = Wanted::new(30, 5);
    let legs = rig.submit(&wanted);
    rig.finish();
    let prefill = legs.prefill.unwrap();
    assert_eq!(rig.outcome(prefill), Some(FinishReason::HandedOver));
    assert_eq!(rig.told[&prefill].tokens, rig.told[&legs.decode].tokens[..1]);
    assert_eq!(rig.outcome(legs.decode), Some(FinishReason::Length));
    assert_eq!(rig.tokens(legs.decode).len(), 5);
    assert_eq!(rig.stats(FIRST).prompt_tokens_total.load(Relaxed), 30);
    assert_eq!(rig.stats(DECODE).generated_tokens_total.load(Relaxed), 5);
}

#[test]
fn a_request_may_end_with_its_first_token() {
    let mut wanted = Wanted::new(20, 9);
    wanted.stop_tokens = vec![alone(&wanted).tokens[0].token];
    for mut rig in [Rig::split(&Setup::new()), Rig::mixed(&Setup::new())] {
        let legs = rig.submit(&wanted);
        rig.finish();
        assert_eq!(rig.outcome(legs.decode), Some(FinishReason::Stop));
        assert_eq!(rig.tokens(legs.decode), wanted.stop_tokens);
    }
}

/// Requests in every stage when one of them is ended at turn `k`; a later one is as good as ever.
fn end_one_at_every_turn(split: bool, end: impl Fn(&mut Rig, &Legs)) {
    let mut setup = Setup::new();
    setup.config.max_running = 2;
    end_one_at_every_turn_of(&setup, split, end);
}

/// The same where requests give up their pages to each other.
fn end_one_of_those_retracted(split: bool, tier_pages: u32) {
    let mut setup = Setup::new();
    (setup.config.reserve, setup.decode_pages, setup.tier_pages) = (0, 13, tier_pages);
    setup.config.max_running = 3;
    end_one_at_every_turn_of(&setup, split, |rig, legs| rig.abort(legs.decode));
    let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
    // None begins as another does.
    (13..17).for_each(|length| _ = rig.submit(&Wanted::new(length, 12)));
    rig.finish();
    let worker = if split { DECODE } else { FIRST };
    let recomputed = rig.stats(worker).recomputed_tokens_total.load(Relaxed);
    assert!(rig.stats(worker).retracted_total.load(Relaxed) > 0);
    assert_eq!(recomputed == 0, tier_pages > 0, "{recomputed} tokens were computed again");
}

#[test]
fn an_abort_of_a_request_that_gave_up_its_pages_leaks_nothing() {
    for split in [true, false] {
        end_one_of_those_retracted(split, 0);
        end_one_of_those_retracted(split, 50);
    }
}

/// No request limits its answer, so each could fill the pool. All run together from the beginning.
#[test]
fn requests_without_an_end_do_not_wait_for_each_other() {
    for split in [true, false] {
        let mut setup = Setup::new();
        (setup.config.reserve, setup.decode_pages, setup.tier_pages) = (8, 32, 64);
        let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
        let wanted: Vec<_> = (10..14).map(|length| Wanted::new(length, 128 - length)).collect();
        let ids: Vec<_> = wanted.iter().map(|wanted| rig.submit(wanted).decode).collect();
        while ids.iter().any(|id| rig.told[id].tokens.is_empty()) {
            assert!(
                ids.iter().all(|id| rig.told[id].outcome.is_none()),
                "one waited for another's end"
            );
            rig.turn();
        }
        rig.finish();
        for (id, wanted) in ids.iter().zip(&wanted) {
            assert_eq!(rig.told[id], alone(wanted));
        }
    }
}

/// The request with the fewest generated tokens is retracted. It resumes before a newcomer that
/// would fit.
#[test]
fn a_retracted_request_resumes_before_newcomers() {
    for tier_pages in [0, 64] {
        let mut setup = Setup::new();
        (setup.config.reserve, setup.decode_pages, setup.tier_pages) = (0, 16, tier_pages);
        setup.config.prefix_cache = false;
        let mut rig = Rig::split(&setup);
        // 4 pages each at first, 8 in the end.
        let wanted = |seed: u32| {
            let mut wanted = Wanted::new(15, 17);
            wanted.prompt.iter_mut().for_each(|id| *id = (*id + seed) % VOCAB);
            wanted
        };
        let all: Vec<_> = (0..3).map(wanted).collect();
        let first = rig.submit(&all[0]).decode;
        while rig.told[&first].tokens.len() < 3 {
            rig.turn();
        }
        let others = [rig.submit(&all[1]).decode, rig.submit(&all[2]).decode];
        let retracted = |rig: &Rig| rig.stats(DECODE).retracted.load(Relaxed);
        while retracted(&rig) == 0 {
            rig.turn();
        }
        let tokens = |rig: &Rig, id| rig.told[&id].tokens.len();
        let stands = others.map(|id| tokens(&rig, id));
        assert!(tokens(&rig, first) > stands[0].max(stands[1]));
        // It would fit at once: 2 pages.
        let newcomer = rig.submit(&Wanted::new(4, 4)).decode;
        let mut waited = 0;
        while retracted(&rig) > 0 {
            assert_eq!(tokens(&rig, newcomer), 0, "it was let in before those that wait for pages");
            rig.turn();
            waited += 1;
        }
        assert!(waited > 3);
        rig.finish();
        for (id, wanted) in [first, others[0], others[1]].iter().zip(&all) {
            assert_eq!(rig.told[id], alone(wanted), "{tier_pages}");
        }
        assert_eq!(rig.told[&newcomer], alone(&Wanted::new(4, 4)));
    }
}

/// The oldest request has the most tokens. Nevertheless it gives up its pages if it is the least
/// urgent one.
#[test]
fn the_least_urgent_request_is_retracted_first() {
    for priorities in [[5, 0, 0], [0, 5, 0], [0, 0, 5]] {
        let mut setup = Setup::new();
        (setup.config.reserve, setup.decode_pages) = (0, 16);
        setup.config.prefix_cache = false;
        let mut rig = Rig::split(&setup);
        let wanted = |priority: i32| Wanted { priority, ..Wanted::new(15, 17) };
        let first = rig.submit(&wanted(priorities[0])).decode;
        while rig.told[&first].tokens.len() < 3 {
            rig.turn();
        }
        let [second, third] = [1, 2].map(|at| rig.submit(&wanted(priorities[at])).decode);
        rig.finish();
        assert!(rig.stats(DECODE).retracted_total.load(Relaxed) > 0, "the pages are too few");
        let least = priorities.iter().position(|&priority| priority == 5).unwrap();
        let last = *rig.ended.last().unwrap();
        assert_eq!(last, [first, second, third][least], "it waits for pages: {priorities:?}");
        for id in [first, second, third] {
            assert_eq!(rig.told[&id], alone(&wanted(0)));
        }
    }
}

fn end_one_at_every_turn_of(setup: &Setup, split: bool, end: impl Fn(&mut Rig, &Legs)) {
    let wanted = [Wanted::new(40, 6), Wanted::new(9, 12), Wanted::new(21, 8), Wanted::new(13, 3)];
    let expected: Vec<_> = wanted.iter().map(alone).collect();
    let mut ended_early = 0;
    for k in 0..40 {
        for victim in 0..wanted.len() {
            let mut rig = if split { Rig::split(setup) } else { Rig::mixed(setup) };
            let legs: Vec<_> = wanted.iter().map(|wanted| rig.submit(wanted)).collect();
            (0..k).for_each(|_| {
                rig.mover.iter_mut().for_each(|mover| mover.speed = 1);
                rig.turn();
            });
            end(&mut rig, &legs[victim]);
            rig.finish();
            for (i, legs) in legs.iter().enumerate() {
                let told = &rig.told[&legs.decode];
                if i == victim {
                    assert_eq!(told.tokens, expected[i].tokens[..told.tokens.len()]);
                    ended_early +=
                        usize::from(matches!(told.outcome, Some(FinishReason::Failed(_))));
                } else {
                    assert_eq!(told, &expected[i], "victim {victim}, turn {k}");
                }
            }
            let next = rig.submit(&wanted[victim]);
            rig.finish();
            assert_eq!(rig.told[&next.decode], expected[victim], "after victim {victim}, turn {k}");
        }
    }
    assert!(ended_early > 30, "only {ended_early} were ended before their time");
}

#[test]
fn an_abort_of_decode_at_any_turn_leaks_nothing() {
    end_one_at_every_turn(true, |rig, legs| rig.abort(legs.decode));
}

#[test]
fn an_abort_of_prefill_at_any_turn_leaks_nothing() {
    end_one_at_every_turn(true, |rig, legs| rig.abort(legs.prefill.unwrap()));
}

#[test]
fn an_abort_of_both_legs_at_any_turn_leaks_nothing() {
    end_one_at_every_turn(true, |rig, legs| {
        rig.abort(legs.prefill.unwrap());
        rig.abort(legs.decode);
    });
}

#[test]
fn an_abort_of_a_mixed_request_at_any_turn_leaks_nothing() {
    end_one_at_every_turn(false, |rig, legs| rig.abort(legs.decode));
}

/// In which stage a deadline finds the request, on the leg named.
#[test]
fn a_deadline_is_kept_in_every_stage() {
    type Arrange = fn(&mut Rig);
    let stages: [(&str, Arrange); 6] = [
        ("no session", |rig| rig.hold_sessions = true),
        ("no grant", |rig| rig.hold_grants = true),
        ("parked", |rig| (rig.late, rig.hold_grants) = (true, true)),
        ("transfer stands still", |rig| rig.mover.as_mut().unwrap().speed = 0),
        ("chunks", |_| ()),
        ("batch full or running", |_| ()),
    ];
    for (stage, arrange) in stages {
        for turns in 0..12 {
            let mut setup = Setup::new();
            setup.config.max_running = 1;
            let mut rig = Rig::split(&setup);
            let mut patient = Wanted::new(5, 40);
            patient.patience = 10 * TOO_LONG;
            let neighbour = (stage == "batch full or running").then(|| {
                let legs = rig.submit(&patient);
                (0..5).for_each(|_| _ = rig.turn());
                legs
            });
            arrange(&mut rig);
            let legs = rig.submit(&Wanted::new(100, 20));
            (0..turns).for_each(|_| _ = rig.turn());
            rig.wait(TOO_LONG);
            (0..2).for_each(|_| _ = rig.turn());
            let failed = Some(FinishReason::Failed(Cause::Deadline));
            let prefill = rig.outcome(legs.prefill.unwrap());
            assert!(
                prefill == failed || prefill == Some(FinishReason::HandedOver),
                "{stage}: {prefill:?}"
            );
            assert_eq!(rig.outcome(legs.decode), failed, "{stage}, turn {turns}");
            if let Some(mover) = &mut rig.mover {
                mover.speed = usize::MAX;
            }
            (rig.hold_sessions, rig.hold_grants) = (false, false);
            rig.finish();
            if let Some(neighbour) = neighbour {
                assert_eq!(rig.told[&neighbour.decode], alone(&patient));
            }
        }
    }
}

#[test]
fn a_deadline_is_kept_by_a_mixed_worker() {
    for turns in 0..12 {
        let mut rig = Rig::mixed(&Setup::new());
        let legs = rig.submit(&Wanted::new(100, 20));
        (0..turns).for_each(|_| _ = rig.turn());
        rig.wait(TOO_LONG);
        rig.finish();
        assert_eq!(rig.outcome(legs.decode), Some(FinishReason::Failed(Cause::Deadline)));
    }
}

#[test]
fn a_request_that_cannot_fit_an_empty_pool_is_refused_at_arrival() {
    let mut setup = Setup::new();
    (setup.prefill_pages, setup.decode_pages) = (10, 10);
    let refused = Some(FinishReason::Failed(Cause::Refused));
    for (prompt, max_new, fits) in
        [(30, 10, true), (30, 11, false), (40, 1, false), (129, 1, false)]
    {
        let mut rig = Rig::split(&setup);
        let legs = rig.submit(&Wanted::new(prompt, max_new));
        rig.finish();
        assert_eq!(rig.outcome(legs.decode) == refused, !fits, "{prompt} + {max_new}");
        let mut rig = Rig::mixed(&setup);
        let legs = rig.submit(&Wanted::new(prompt, max_new));
        rig.finish();
        assert_eq!(rig.outcome(legs.decode) == refused, !fits, "{prompt} + {max_new}");
    }
    setup.prefill_pages = 2;
    let mut rig = Rig::split(&setup);
    let legs = rig.submit(&Wanted::new(30, 2));
    rig.finish();
    assert_eq!(rig.outcome(legs.prefill.unwrap()), refused);
    assert_eq!(rig.outcome(legs.decode), Some(FinishReason::Failed(Cause::OtherLeg)));
}

/// Of requests that arrive together, `max_queued` wait besides those that can begin. The others
/// fail with `overloaded`.
#[test]
fn no_more_wait_than_may_beyond_those_that_can_begin() {
    let overloaded = Some(FinishReason::Failed(Cause::Overloaded));
    // The pool holds one of them, or all.
    for (pages, begin) in [(16, 1), (256, 2)] {
        let mut setup = Setup::new();
        (setup.config.max_running, setup.config.max_queued, setup.decode_pages) = (2, 3, pages);
        setup.config.prefix_cache = false;
        let mut rig = Rig::mixed(&setup);
        let legs: Vec<_> = (0..9).map(|_| rig.submit(&Wanted::new(40, 20)).decode).collect();
        rig.turn();
        let refused: Vec<_> = legs.iter().map(|&leg| rig.outcome(leg) == overloaded).collect();
        assert_eq!(refused, (0..9).map(|at| at >= begin + 3).collect::<Vec<_>>(), "{pages} pages");
        // After one request has ended, another is accepted.
        while rig.told[&legs[0]].outcome.is_none() {
            rig.turn();
        }
        rig.turn();
        let late = rig.submit(&Wanted::new(40, 20)).decode;
        rig.finish();
        assert!(
            legs[..begin + 3]
                .iter()
                .chain([&late])
                .all(|&leg| rig.outcome(leg) == Some(FinishReason::Length))
        );
    }
}

/// A request that waits for KV has a place of its own on decode. Without a free place it waits with
/// the others.
#[test]
fn a_request_that_waits_for_kv_does_not_count_as_queued() {
    for (pages, max_new, taken) in [(16, 52, 1 + 3), (256, 100, 2 + 4 + 3)] {
        let mut setup = Setup::new();
        (setup.config.max_running, setup.config.max_queued, setup.decode_pages) = (2, 3, pages);
        let mut rig = Rig::split(&setup);
        let mut wanted = Wanted::new(12, max_new);
        let legs: Vec<_> = (0..taken as u32 + 2)
            .map(|salt| {
                wanted.prompt[0] = salt;
                let legs = rig.submit(&wanted);
                // Time for prefill, not for an end.
                (0..6).for_each(|_| _ = rig.turn());
                legs.decode
            })
            .collect();
        let refused = legs
            .iter()
            .filter(|&&leg| rig.outcome(leg) == Some(FinishReason::Failed(Cause::Overloaded)));
        assert_eq!(refused.count(), 2, "{pages} pages");
        rig.finish();
        assert_eq!(rig.outcome(legs[taken - 1]), Some(FinishReason::Length));
    }
}

/// Small requests keep coming; the large one, which needs the whole pool, still gets its turn.
#[test]
fn a_large_request_is_not_starved_by_small_ones() {
    for split in [true, false] {
        let mut setup = Setup::new();
        (setup.prefill_pages, setup.decode_pages) = (32, 16);
        let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
        let small = Wanted::new(8, 6);
        (0..3).for_each(|_| _ = rig.submit(&small));
        (0..3).for_each(|_| _ = rig.turn());
        let large = rig.submit(&Wanted::new(40, 24)).decode;
        let mut behind = Vec::new();
        for _ in 0..10_000 {
            if rig.told[&large].released {
                break;
            }
            if rig.has_slots() {
                behind.push(rig.submit(&small).decode);
            }
            rig.turn();
        }
        let passed = behind.iter().filter(|id| rig.told[*id].released).count();
        assert_eq!(rig.outcome(large), Some(FinishReason::Length));
        assert!(passed >= PASSES_MAX as usize, "too few requests passed it: {passed}");
        assert!(passed <= PASSES_MAX as usize + setup.slots, "{passed} passed it");
        rig.finish();
    }
}

#[test]
fn a_full_event_ring_makes_the_engine_wait_and_loses_nothing() {
    for split in [true, false] {
        let setup = Setup::new();
        let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
        let wanted = [Wanted::new(20, 100), Wanted::new(7, 100)];
        let legs = wanted.each_ref().map(|wanted| rig.submit(wanted));
        for round in 0..200 {
            rig.step_engine();
            rig.mover.iter_mut().for_each(|mover| mover.step());
            if round % 20 == 19 {
                rig.step_ctl();
            }
        }
        let steps = rig.watch.layers.load(Relaxed) / u64::from(LAYERS);
        assert!(steps < 40, "{steps} steps ran while the events were not read");
        rig.finish();
        for (legs, wanted) in legs.iter().zip(&wanted) {
            assert_eq!(rig.told[&legs.decode], alone(wanted));
        }
    }
}

#[test]
fn a_hand_off_that_fails_ends_both_legs_with_its_cause() {
    let mut rig = Rig::split(&Setup::new());
    let doomed = rig.submit(&Wanted::new(40, 6));
    rig.mover.as_mut().unwrap().corrupt = true;
    rig.finish();
    assert_eq!(rig.outcome(doomed.prefill.unwrap()), Some(FinishReason::Failed(Cause::Corrupt)));
    assert_eq!(rig.outcome(doomed.decode), Some(FinishReason::Failed(Cause::OtherLeg)));
    assert!(rig.tokens(doomed.decode).is_empty());
    let next = rig.submit(&Wanted::new(40, 6));
    rig.finish();
    assert_eq!(rig.told[&next.decode], alone(&Wanted::new(40, 6)));
}

#[test]
fn a_record_that_is_not_the_request_s_fails_it() {
    let spoils: [fn(&mut AuxRecord); 3] = [
        |aux| aux.room += 1,
        |aux| aux.generation += 1,
        |aux| {
            let mut first = FirstTokenRecord::of_aux(aux);
            first.token = VOCAB;
            let generation = aux.generation;
            *aux = AuxRecord { generation, ..first.to_aux(Room(aux.room)) };
        },
    ];
    for spoil in spoils {
        let mut rig = Rig::split(&Setup::new());
        rig.mover.as_mut().unwrap().spoil = spoil;
        let legs = rig.submit(&Wanted::new(10, 6));
        rig.finish();
        assert_eq!(rig.outcome(legs.decode), Some(FinishReason::Failed(Cause::Corrupt)));
        assert!(rig.tokens(legs.decode).is_empty());
    }
}

/// A mover that stands still and requests that come and go: its ring keeps room for every Cancel.
#[test]
fn cancels_never_outgrow_the_mover_s_ring() {
    for worker in [FIRST, DECODE] {
        let mut rig = Rig::split(&Setup::new());
        for _ in 0..100 {
            while rig.free_slots(worker) > 0 {
                let id = rig.submit_leg(worker, Room(7), &Wanted::new(3, 2));
                rig.abort(id);
                rig.step_engine();
                rig.step_ctl();
            }
            rig.step_engine();
            rig.step_ctl();
        }
        rig.finish();
    }
}

/// The pages of an ended transfer stay leased while its mover still may read or write them.
#[test]
fn pages_of_an_ended_transfer_wait_for_its_lease() {
    let mut rig = Rig::split(&Setup::new());
    let legs = rig.submit(&Wanted::new(40, 6));
    (0..2).for_each(|_| _ = rig.turn());
    rig.mover.as_mut().unwrap().speed = 0;
    rig.turn();
    rig.abort(legs.prefill.unwrap());
    (0..5).for_each(|_| _ = rig.turn());
    assert_eq!(rig.outcome(legs.prefill.unwrap()), Some(FinishReason::Failed(Cause::ClientGone)));
    assert_eq!(rig.stats(FIRST).pages().leased, 10);
    assert!(!rig.told[&legs.prefill.unwrap()].released);
    rig.mover.as_mut().unwrap().speed = 1;
    rig.finish();
}

fn record(rig: &Rig) {
    *rig.watch.steps.lock().unwrap() = Some(Vec::new());
}

fn recorded(rig: &Rig) -> Vec<Vec<std::ops::Range<u32>>> {
    rig.watch.steps.lock().unwrap().take().unwrap()
}

#[test]
#[allow(clippy::single_range_in_vec_init)]
fn chunks_end_on_pages_and_the_begun_prompt_continues_first() {
    let mut setup = Setup::new();
    setup.config.page_size = 4;
    setup.config.chunked_prefill_size = 18;
    let mut rig = Rig::mixed(&setup);
    record(&rig);
    for tokens in [20, 50, 3, 5] {
        rig.submit(&Wanted::new(tokens, 1));
    }
    rig.finish();
    let steps = recorded(&rig);
    assert_eq!(steps[0], [0..16]);
    assert_eq!(steps[1], [16..20, 0..12]);
    assert_eq!(steps[2], [12..28]);
    assert_eq!(steps[3], [28..44]);
    assert_eq!(steps[4], [44..50, 0..3, 0..5]);
    assert_eq!(steps.len(), 5);
}

#[test]
#[allow(clippy::single_range_in_vec_init)]
fn chunks_are_bounded_in_time() {
    let mut setup = Setup::new();
    setup.config.chunked_prefill_size = 128;
    setup.config.max_prefill_tokens = 128;
    setup.config.chunk_ms = 20;
    let mut rig = Rig::mixed(&setup);
    rig.watch.token_ns.store(1_000_000, Relaxed);
    record(&rig);
    rig.submit(&Wanted::new(120, 1));
    rig.finish();
    let steps = recorded(&rig);
    assert_eq!(steps[..3], [vec![0..64], vec![64..84], vec![84..104]]);
}

/// While a long prompt is read, each turn that computes a chunk of it also computes a decode step.
#[test]
fn streams_do_not_stall_behind_a_prompt() {
    for split in [true, false] {
        let setup = Setup::new();
        let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
        let stream = rig.submit(&Wanted::new(4, 60)).decode;
        while rig.tokens(stream).len() < 3 {
            rig.turn();
        }
        let long = rig.submit(&Wanted::new(100, 2)).decode;
        while rig.tokens(long).is_empty() {
            let before = rig.tokens(stream).len();
            rig.turn();
            assert_eq!(rig.tokens(stream).len(), before + 1, "split {split}");
        }
        rig.finish();
    }
}

/// An abort of all that a step computes ends the step at the next layer.
#[test]
fn a_step_with_only_aborted_requests_stops_between_layers() {
    for split in [true, false] {
        for at in 1..=u64::from(LAYERS) {
            let mut rig = if split { Rig::split(&Setup::new()) } else { Rig::mixed(&Setup::new()) };
            let legs = rig.submit(&Wanted::new(40, 6));
            let id = legs.prefill.unwrap_or(legs.decode);
            let (commands, watch) = (rig.commands.clone(), rig.watch.clone());
            let mut command = rig.abort_command(id);
            *rig.watch.hook.lock().unwrap() = Some(Box::new(move || {
                if watch.layers.load(Relaxed) == at
                    && let Some(command) = command.take()
                {
                    commands.send(command).unwrap();
                }
            }));
            rig.finish();
            assert_eq!(rig.watch.layers.load(Relaxed), at);
            assert_eq!(rig.outcome(id), Some(FinishReason::Failed(Cause::ClientGone)));
        }
    }
}

/// With one token per second, a prompt behind 100 others' tokens would come too late.
#[test]
fn prefill_refuses_a_request_that_would_wait_past_its_deadline() {
    let mut setup = Setup::new();
    setup.config.chunked_prefill_size = 4;
    let mut rig = Rig::split(&setup);
    rig.watch.token_ns.store(1_000_000_000, Relaxed);
    rig.submit(&Wanted::new(100, 1));
    (0..4).for_each(|_| _ = rig.turn());
    let mut hurried = Wanted::new(20, 1);
    hurried.patience = Duration::from_secs(60);
    let legs = rig.submit(&hurried);
    (0..4).for_each(|_| _ = rig.turn());
    assert_eq!(rig.outcome(legs.prefill.unwrap()), Some(FinishReason::Failed(Cause::Overloaded)));
    rig.finish();
}

/// The same of a worker that generates, too, and of decode where it reads a prompt itself.
#[test]
fn mixed_and_decode_workers_refuse_a_request_that_would_wait_past_its_deadline() {
    for split in [false, true] {
        let mut setup = Setup::new();
        setup.config.chunked_prefill_size = 4;
        let mut rig = if split { Rig::split(&setup) } else { Rig::mixed(&setup) };
        let submit = |rig: &mut Rig, wanted: &Wanted| match split {
            true => rig.submit_alone(wanted),
            false => rig.submit(wanted).decode,
        };
        rig.watch.token_ns.store(1_000_000_000, Relaxed);
        submit(&mut rig, &Wanted::new(100, 1));
        (0..4).for_each(|_| _ = rig.turn());
        let mut hurried = Wanted::new(20, 1);
        hurried.patience = Duration::from_secs(60);
        let hurried = submit(&mut rig, &hurried);
        rig.turn();
        assert_eq!(
            rig.outcome(hurried),
            Some(FinishReason::Failed(Cause::Overloaded)),
            "split: {split}"
        );
        let mut late = Wanted::new(20, 1);
        late.patience = Duration::ZERO;
        let late = submit(&mut rig, &late);
        rig.finish();
        assert_eq!(
            rig.outcome(late),
            Some(FinishReason::Failed(Cause::Deadline)),
            "split: {split}"
        );
    }
}

/// The thread function: rung by commands, parked in between, gone when told to stop.
#[test]
fn the_thread_serves_and_stops() {
    let Rig { mut engine, commands, events, .. } = Rig::mixed(&Setup::new());
    let wanted = Wanted::new(30, 20);
    let expected = alone(&wanted);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let stop = &stop;
        let thread = scope.spawn(move || {
            let this = std::thread::current();
            let bell = Arc::new(EventCount::new(move || this.unpark()));
            tell.send(bell.clone()).unwrap();
            run(&mut engine, &bell, stop, EngineLoop::new(0));
        });
        let bell = told.recv().unwrap();
        for round in 1..4 {
            let place = Use {
                worker: FIRST,
                slot: SlotId(0),
                generation: Generation(round),
                room: Room(0),
            };
            let request = request(&wanted, RequestId(0), place, Instant::now(), GroupCounts::FULL);
            commands.send(EngineCommand::Submit(request)).unwrap();
            bell.notify();
            let mut tokens = Vec::new();
            loop {
                match events.recv_timeout(Duration::from_secs(60)).expect("the engine is awake") {
                    EngineEvent::Request(RequestEvent::Token { sampled, .. }) => {
                        tokens.push(sampled)
                    }
                    EngineEvent::Request(RequestEvent::Released(_)) => break,
                    _ => {}
                }
            }
            assert_eq!(tokens, expected.tokens);
        }
        stop.store(true, Relaxed);
        bell.notify();
        thread.join().unwrap();
    });
}
