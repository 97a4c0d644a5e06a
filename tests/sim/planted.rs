//! Mistakes that failpoints plant in production code: the simulator must find each. Each has its
//! failpoint, a part of what a run then says, and the first seed to try, which saves time. Some
//! need one transport.
//!
//! One mistake is missing here: a copy that ignores the lease word. No page of a void lease is
//! overwritten just before its copy. `tests/handoff.rs` and the model `pull` of `tools/model` cover
//! that.

use super::{CALM, FAULTS, quiet};
use baton::cli::flags::SimTransfer;
use baton::cli::{self, HostInfo, Invocation};
use baton::sim::{RunScale, SeedFailure, run, run_each};
use baton::stdx::failpoint::set_failpoint;
use std::panic;

/// A mistake must be found within this many seeds from the first one.
const SEEDS: u64 = 40;

/// No panic of this process is printed until it is dropped.
struct Silence;

impl Silence {
    fn begin() -> Silence {
        panic::set_hook(Box::new(|_| {}));
        Silence
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        let _ = panic::take_hook();
    }
}

/// Plants a mistake, and asserts that a seed over this transport finds it.
fn is_found(mistake: &'static str, saying: &str, first: u64, transfer: SimTransfer) {
    is_found_in([FAULTS, CALM], mistake, saying, first, transfer);
}

/// The same for agents of the library.
fn is_found_in_agents(mistake: &'static str, saying: &str, first: u64, transfer: SimTransfer) {
    let agents = [FAULTS, CALM].map(|scale| RunScale { is_library: true, ..scale });
    is_found_in(agents, mistake, saying, first, transfer);
}

fn is_found_in(
    scales: [RunScale; 2],
    mistake: &'static str,
    saying: &str,
    first: u64,
    transfer: SimTransfer,
) {
    quiet();
    let silence = Silence::begin();
    let mut others = Vec::new();
    for seed in first..first + SEEDS {
        for scale in scales {
            set_failpoint(Some(mistake));
            let run = run(seed, RunScale { transfer, ..scale });
            set_failpoint(None);
            match run {
                Err(why) if why.contains(saying) => return,
                Err(why) => others.push((seed, why)),
                Ok(_) => {}
            }
        }
    }
    drop(silence);
    panic!("{mistake}: not found, and what was said instead: {others:#?}");
}

#[test]
fn a_campaign_stops_at_the_first_seed_that_fails_and_names_its_command() {
    quiet();
    let silence = Silence::begin();
    let scale = RunScale { workers: [Some(2), None], ..FAULTS };
    set_failpoint(Some("lost call keeps its reservation"));
    let failure = run_each(1..=SEEDS, scale).unwrap_err();
    set_failpoint(None);
    drop(silence);
    let SeedFailure { seed, why, command } = failure;
    assert!(why.contains("sequences"), "{why}");
    assert_eq!(command, format!("baton sim --seed {seed} --requests 20 --prefill 2"));
    let words = command.split(' ');
    let Ok(Invocation::Sim(flags)) = cli::parse(words, &HostInfo::of_this_process()) else {
        panic!("{command} is a command");
    };
    assert_eq!((flags.seed, flags.prefill, flags.calm), (seed, Some(2), false));
}

macro_rules! planted {
    ($($test:ident: $mistake:literal, $saying:literal, $first:literal $(, $transfer:ident)?;)*) => {
        planted! { is_found; $($test: $mistake, $saying, $first $(, $transfer)?;)* }
    };
    ($find:ident;
        $($test:ident: $mistake:literal, $saying:literal, $first:literal $(, $transfer:ident)?;)*
    ) => {
        $(
            #[test]
            fn $test() {
                let transfers: &[SimTransfer] = &[$(SimTransfer::$transfer,)? SimTransfer::Auto];
                super::$find($mistake, $saying, $first, transfers[0]);
            }
        )*
    };
}

/// These run in `tools/test`, all in `tools/test --all`.
mod few {
    use baton::cli::flags::SimTransfer;

    planted! {
        lost_call_keeps_its_reservation: "lost call keeps its reservation", "sequences", 1;
        abort_is_not_passed_on: "abort is not passed on", "a cancelled leg is not released", 37;
        thread_parks_without_a_last_look: "thread parks without a last look",
            "a request waits for", 41;
        pages_change_places: "pages change places", "expected", 2;
        salt_is_not_compared: "salt is not compared", "came from the cache", 3;
        done_is_not_told: "done is not told", "ends that a destination has not confirmed", 1;
        page_is_free_while_leased: "page is free while leased", "the map of free pages disagree", 1;
        one_lane_speaks_for_all: "one lane speaks for all", "was written and is not leased", 3;
        frame_lands_unasked: "frame lands unasked", "was written and is not leased", 24;
        silent_worker_is_waited_for: "silent worker is waited for", "a request waits for", 10;
        no_room_is_made: "no room is made", "no page was made free", 217;
        change_of_role_does_not_wait_for_requests: "change of role does not wait for requests",
            "leaves its role and holds", 5;
    }
}

/// Mistakes in agents of the library.
mod agents {
    use baton::cli::flags::SimTransfer;

    planted! { is_found_in_agents;
        end_comes_before_the_lease_is_back: "end comes before the lease is back",
            "a slot is free after its lease", 1;
        pages_of_another_transfer_are_taken: "pages of another transfer are taken",
            "has landed in pages of another request", 1;
        chunks_share_a_page: "chunks share a page", "is wrong", 1, Tcp;
        released_slot_is_lost: "released slot is lost", "slots of the engine", 1;
        deadline_of_a_request_is_not_watched: "deadline of a request is not watched",
            "is Open after its time", 1;
        call_of_an_earlier_request_is_taken: "call of an earlier request is taken",
            "a call with a slot of an earlier request", 1;
        order_of_a_request_is_taken_twice: "order of a request is taken twice",
            "leases pages twice", 1;
        tokens_without_pages_are_taken: "tokens without pages are taken",
            "tokens without pages are computed", 1;
    }
}

mod others {
    use baton::cli::flags::SimTransfer;

    planted! {
        waiting_choice_keeps_its_slot: "choice that waits for prefill keeps its slot",
            "slots", 3;
        full_socket_is_not_written_again: "full socket is not written again",
            "the router does not list its workers", 1;
        body_of_a_client_that_left_stays_counted: "body of a client that left stays counted",
            "each held byte of a body", 1;
        slot_is_not_given_back: "slot is not given back", "slots", 1;
        call_outlives_its_request: "call outlives its request",
            "each call of a leg has its request", 2;
        retry_is_not_listed: "retry is not listed", "a request that waits for a retry is listed", 4;
        idle_connection_stays_listed: "idle connection stays listed",
            "each idle connection is listed once", 1;
        connection_outlives_its_request: "connection outlives its request",
            "a connection leads to one request", 1;
        parked_reader_is_not_woken: "parked reader is not woken", "not ended in time", 2;
        sources_are_not_told_of_a_park: "sources are not told of a park", "not ended in time", 1;
        prefills_end_is_its_failure: "prefill's end is its failure", "peer_lost", 1;
        prefix_is_sent_again: "prefix is sent again", "the destination holds these tokens", 1;
        completions_wake_no_mover: "completions wake no mover", "not ended in time", 1;
        cancel_ends_a_lease_that_is_written_to: "cancel ends a lease that is written to",
            "was written and is not leased", 25;
        queue_pairs_outlive_their_session: "queue pairs outlive their session",
            "not ended in time", 42;
        first_lane_ends_for_all: "first lane ends for all", "expected", 11;
        revoked_frame_goes_on_landing: "revoked frame goes on landing",
            "was written and is not leased", 28;
        progress_outlives_its_room: "progress outlives its room", "came from the cache", 11;
        resumed_tokens_count_as_prompt: "resumed tokens count as prompt", "Wrong(", 199;
        cancel_keeps_the_lease: "cancel keeps the lease", "a cancelled leg is not released", 6;
        early_destination_is_lost: "early destination is lost", "not ended in time", 4;
        ready_is_not_told: "ready is not told", "not ended in time", 1;
        state_page_goes_back_early: "state page goes back early", "has no user to release it", 1;
        state_advances_for_a_late_token: "state advances for a late token", "Wrong(", 22;
        state_crosses_with_any_chunk: "state crosses with any chunk",
            "was written with other KV", 33;
        last_chunk_leaves_the_state_out: "last chunk leaves the state out",
            "transferred data failed its check", 1;
        arrived_state_counts_as_new: "arrived state counts as new", "state after 0 tokens", 1;
        checkpoint_is_one_page_late: "checkpoint is one page late",
            "a checkpoint is behind a page with a key", 54;
        checkpoint_of_the_prefix_is_not_looked_up: "checkpoint of the prefix is not looked up",
            "what was found is there", 1;
        checkpoint_is_not_read: "checkpoint is not read", "Wrong(", 54;
        checkpoint_is_written_again: "checkpoint is written again",
            "was written with other KV", 20;
        window_page_goes_back_early: "window page goes back early", "expected", 1;
        window_of_the_prefix_is_not_looked_up: "window of the prefix is not looked up",
            "what was found is there", 1;
        window_is_copied_from_a_page_too_late: "window is copied from a page too late",
            "Wrong(", 1;
        key_lacks_the_ids_before: "key lacks the ids before", "Wrong(", 20;
        page_is_kept_before_it_is_full: "page is kept before it is full", "Wrong(", 6;
        waiting_chunk_is_dropped: "waiting chunk is dropped", "expected", 9;
        early_bytes_are_dropped: "early bytes are dropped", "not ended in time", 13;
        room_stays_after_its_request: "room stays after its request", "rooms", 1;
        connection_is_not_counted: "connection is not counted", "a request waits for", 4;
        busy_engine_looks_hung: "busy engine looks hung", "is not used at the end", 1;
        kv_is_kept_for_an_hour: "KV is kept for an hour", "not ended in time", 121;
        turns_outlive_their_try: "turns outlive their try", "has a call or waits for a retry", 27;
        no_worker_reads_alone: "no worker reads alone", "without a fault", 91;
        kv_taken_back_stays_in_the_tier: "KV taken back stays in the tier",
            "KV of retracted requests", 745;
        drain_does_not_wait_for_requests: "drain does not wait for requests",
            "the worker has drained and holds requests", 17;
        drain_does_not_wait_for_done: "drain does not wait for Done",
            "that a destination has not confirmed", 55;
        change_of_role_is_never_given_up: "change of role is never given up",
            "does not give its role change up", 53;
        a_workers_role_is_not_compared: "a worker's role is not compared",
            "does not use a worker in its new role", 4;
        turned_worker_keeps_its_number: "turned worker keeps its number",
            "does not use a worker in its new role", 4;
        turned_worker_is_not_followed_back: "turned worker is not followed back",
            "is not used at the end", 39;
        keys_that_differ_are_final: "keys that differ are final",
            "fits no other because of its keys", 19;
        held_reservation_is_not_released: "held reservation is not released", "sequences", 1;
        call_of_an_aborted_request_stays: "call of an aborted request stays",
            "each call of a leg has its request", 3;
        tokens_of_an_unread_prompt_stay_booked: "tokens of an unread prompt stay booked",
            "a worker's load comes from its reservations", 1;
        prompts_of_a_dead_worker_stay_known: "prompts of a dead worker stay known",
            "a row has the blocks that its worker holds", 2;
        leg_of_a_request_that_is_over_stays: "leg of a request that is over stays",
            "a cancelled leg is not released", 1;
        call_to_prefill_outlives_its_request: "call to prefill outlives its request",
            "not ended in time", 32;
        worker_that_drains_ends_its_requests: "worker that drains ends its requests", "draining", 2;
        leg_of_a_client_that_left_stays: "leg of a client that left stays in its hand-off",
            "a cancelled leg is not released", 1;
        first_piece_of_an_event_is_dropped: "first piece of an event is dropped",
            "a request waits for", 1;
        worker_that_is_down_is_not_probed: "worker that is down is not probed",
            "is not used at the end", 2;
        lost_call_of_a_fan_out_is_awaited: "lost call of a fan-out is awaited",
            "requests to all workers", 6;
        expired_entry_leaves_its_worker: "expired entry leaves its worker",
            "a worker is listed twice", 6;
        worker_stays_in_its_former_role: "worker stays in its former role",
            "an address is known by a name or an entry", 4;
        failed_renewal_is_not_tried_again: "failed renewal is not tried again",
            "is not used at the end", 7;
        broken_connection_stays_known: "broken connection stays known", "not ended in time", 9;
        role_change_that_was_given_up_goes_on: "role change that was given up goes on",
            "does not give its role change up", 8;
        api_key_is_accepted_for_orders: "API key is accepted for orders",
            "an order with an API key gets 200", 7;
        renewal_does_not_prolong_its_entry: "renewal does not prolong its entry", "no_worker", 1;
        lost_request_to_the_registry_stays_open: "lost request to the registry stays open",
            "is not used at the end", 6;
        body_of_a_last_request_stays_counted: "body of a last request stays counted",
            "each held byte of a body", 1;
        late_request_is_waited_for: "late request is waited for", "not ended in time", 8;
        any_key_is_accepted: "any key is accepted", "a request with a wrong key is answered", 5;
        hung_engine_looks_well: "hung engine looks well", "a request waits for", 71;
        held_off_for_an_hour: "held off for an hour", "peer_lost", 72;
        change_of_role_does_not_wait_for_done: "change of role does not wait for Done",
            "that a destination has not confirmed", 32, Tcp;
        worker_in_a_role_change_takes_new_requests: "worker in a role change takes new requests",
            "the worker changes its role and takes a request", 53;
        kept_kv_waits_for_a_decode_worker_that_goes: "kept KV waits for a decode worker that goes",
            "has a call or waits for a retry", 76;
        commands_are_taken_after_the_step: "commands are taken after the step",
            "a cancelled leg is not released", 1;
        older_link_of_a_peer_stays: "older link of a peer stays",
            "a peer has one link that it dialled", 355;
        token_outlives_its_session: "token outlives its session",
            "a token opens lanes of a session that is open", 10;
        address_of_a_lost_source_stays_known: "address of a lost source stays known",
            "peer_lost", 22;
        queued_request_of_a_client_that_left_stays: "queued request of a client that left stays",
            "each request has its client", 66;
        router_sends_its_former_key: "router sends its former key", "is not used at the end", 16;
        removed_key_is_still_accepted: "removed key is still accepted",
            "a request with a wrong key is answered", 16;
        change_after_a_read_is_missed: "change after a read is missed", "no_worker", 4;
        quiet_is_said_before_it_is: "quiet is said before it is", "is not leased", 392;
        resumed_stream_is_one_token_behind: "resumed stream is one token behind",
            "not a stream of events", 174;
        worker_that_goes_keeps_its_reservation: "worker that goes keeps its reservation",
            "a reservation is released before the next one", 90;
        context_of_an_unread_prompt_stays_booked: "context of an unread prompt stays booked",
            "a worker's load comes from its reservations", 27;
        leaving_worker_keeps_its_blocks: "leaving worker keeps its blocks",
            "a row has the blocks that its worker holds", 115;
        stream_that_has_begun_is_not_resumed: "stream that has begun is not resumed",
            "the worker sent no complete answer", 277;
        broken_call_to_prefill_is_awaited: "broken call to prefill is awaited",
            "a request waits for", 758, Rdma;
        entry_of_a_former_role_stays: "entry of a former role stays",
            "a process has one entry", 6;
        link_outlives_its_queue_pairs: "link outlives its queue pairs",
            "was written and is not leased", 139, Rdma;
        time_of_the_hand_off_is_not_counted: "time of the hand-off is not counted",
            "which is not the sum of", 1;
        arrival_has_the_time_of_the_placement: "arrival has the time of the placement",
            "which is not the sum of", 1;
        late_mask_is_used: "late mask is used", "tokens of", 1;
        events_do_not_wait_for_logprobs: "events do not wait for logprobs",
            "logprobs: expected", 1;
        logprobs_of_the_prompt_are_not_sent: "logprobs of the prompt are not sent",
            "a request waits for", 1;
        resumed_tokens_are_scored: "resumed tokens are scored",
            "disagree about the request", 68;
        grammar_of_a_resumed_stream_begins_anew: "grammar of a resumed stream begins anew",
            "tokens of", 587;
    }
}
