/* The hand-off over rdma, in which the source's NIC writes into the destination's pages:
 * src/transfer/manager/{source,destination,rooms}.rs, src/transfer/mover, src/transfer/transport/rdma.
 *
 * Two rooms, A and B, go one after the other through the same slot and pages on either side. A can be
 * cancelled on both sides at any time, or on one side if there is a fault. A fault (FAULTS) is a cut
 * link, failed queue pairs on either side, or an overdue answer; a new session follows. Each thread's
 * steps are options of its process; others can come between any two of them. A room's number is also
 * its slots' generation, and a link's number its session's.
 *
 * Each of the two lanes is on its own NIC. Its poster acts in its own steps, possibly long after the
 * mover's command, and before or after the other poster. If the mover posts itself, they follow at
 * once, which is one of the orders.
 *
 * It checks, for every order of steps:
 *   bytes land only in pages leased to their room        every landing asserts it
 *   bytes leave only pages leased to their room          every departure asserts it
 *   Success only with all bytes                          when decode takes the room over
 *   every lease and every room ends, on both sides       when nothing more can happen
 *   an Abort is answered as long as its link stands      the same
 *   B, which is never cancelled, succeeds without fault  the same
 *
 * Each of these rules is needed. A check removes one of them:
 *   NO_MARK_FIRST         marked Failed, then Cancel                                  manager::*::fail
 *   NO_LEASE_TO_QUIET     a lease that a peer writes to does not end on Cancel        Landing::Written
 *   NO_QUIET_OF_ITS_OWN   if Destination was not sent, ctl sends Quiet itself         DestinationManager::leave
 *   NO_OVERDUE_RESET      an overdue answer resets the session                        DestinationManager::expire
 *   NO_DEAD_LINK_RESET    a dead link resets the session                              DestinationManager::down
 *   NO_PAIRS_FIRST        queue pairs are destroyed, then the leases end              DestinationMover::close
 *   NO_FRESH_PAIRS        the next session has new queue pairs                        PendingQueuePairs::new
 *   NO_WITHDRAWN_TO_ASK   quiet is sent once the mover has withdrawn the slot         Rooms::abort
 *   NO_DRAINING           ... also for a request that ends before that                Rooms::leave
 *   NO_QUEUE_DROPPED      queued writes are dropped once Cancel is taken              Posting::withdraw
 *   NO_POSTER_COUNTED     a slot is not over while its poster can still post for it   InFlight::leave
 *   NO_JOBS_IN_ORDER      a Cancel comes to the poster before the slot's next post    NicSessionHandle::tell
 *   NO_POSTER_EMPTIED     a session's end takes the queue from its poster             NicSessionHandle::drop
 *   NO_COMPLETIONS_FIRST  withdrawn is reported after the last completion             InFlight::reap
 *   NO_HELD_TO_COMPLETION the source's lease ends after it too                        SourceMover::complete
 *   NO_CLOSE_ENDS         ... or with the session                                     SourceMover::close
 *   NO_BEGIN_COMPARED     Begin for a slot marked Failed ends its lease               SourceMover::begin
 *   NO_HANG_UP            a source that loses its queue pairs hangs up                SourceManager::report
 *   NO_ROOMS_FAIL         the rooms of a void session fail                            SourceManager::fail_rooms
 *   NO_KEPT_FORGOTTEN     ... and Destinations kept for it are forgotten              Rooms::unlink
 *   NO_UNLINKED_BURIED    ... and none waits for what its mover never reports         Rooms::unlink
 *   NO_TURNED_DOWN_QUIET  nor for a room that had failed when the legs met            SourceManager::meet
 *   NO_SLOT_GENERATION    the mover's report is for one use of a slot                 Rooms::withdrawn
 *   NO_ALL_LANES          Success takes the notice of every lane                      StatusTable, EndLane
 *   NO_NOTICE_COMPARED    a notice names the slot's generation                        rdma::immediate
 *   NO_ACK_COMPARED       AbortAck names it, too                                      DestinationManager::abort_ack
 *   NO_STATUS_COMPARED    Status names it, too                                        DestinationManager::status
 *   NO_JUDGE_LATER        a notice is judged one step later                           RdmaDestination::step
 */
#ifndef FAULTS
#define FAULTS 1
#endif
#define A 1
#define B 2
#define LINKS 3
/* As in src/transfer/status.rs. */
#define FAILED 0
#define BOOTSTRAPPING 1
#define WAITING 2
#define TRANSFERRING 3
#define SUCCESS 4
#define open(s) (s == BOOTSTRAPPING || s == WAITING || s == TRANSFERRING)

mtype = { ANNOUNCE, WELCOME, DESTINATION, ABORT, ACK, STATUS, OPEN, CLOSE, EXPECT, BEGIN, CHUNK, CANCEL, QUIET,
    WITHDRAWN, LOST };

/* ---- links: from 1, a new one for each session ---- */
chan to_source[LINKS] = [4] of { mtype, byte };
chan to_destination[LINKS] = [6] of { mtype, byte };
bit cut[LINKS];
byte faults = FAULTS;
bit faulty;
/* Cancels of A: on both sides, or on one side if there is a fault. */
byte cancels = 2 - FAULTS;
/* Local to a step. */
hidden byte r, n, lane;
hidden mtype kind;

/* ---- source ---- */
byte s_link = 1;                            /* link of its session; 0: none */
byte s_state = FAILED, s_room, s_next = A;  /* slot */
bit s_granted, s_begun, s_told, s_lease, s_finished, s_cancelled;
/* Rooms. */
#define NONE 0
#define EARLY 1
#define ENTERED 2
#define MET 3
#define DRAINING 4
#define OVER 5
byte entry[3], asked_on[3]; bit ack_wanted[3], withdrawn[3];
#ifdef NO_SLOT_GENERATION
byte by_slot;
#define finds(r) (by_slot == r)
#else
#define finds(r) true
#endif
chan s_ring = [6] of { mtype, byte };
chan s_reports = [6] of { mtype, byte };
/* Mover. */
byte sm_session = 1, sm_room; bit sm_cancelled, sm_complete;
byte sp_cancel[2];                          /* a Cancel of this room in the ring of each lane's poster */
/* By room and lane. A write is queued in the mover, posted, on its way, landed, or gone; then it
 * is completed. */
#define QUEUED 1
#define POSTED 2
#define FLIES 3
#define LANDED 4
#define GONE 5
#define at(r, l) (2 * r + l)
byte write[6], pairs[3];                    /* by room: the session with the queue pairs for it */

/* ---- destination ---- */
byte d_link = 1; bit d_ready = 1, d_welcome;
byte d_state = FAILED, d_room, d_next = A, d_result[3];
bit d_session_ready, d_expected, d_event, d_sent, d_lease, d_left, d_cancelled;
byte d_aborting, d_lanes;
chan d_ring = [8] of { mtype, byte };
chan d_reports = [2] of { mtype, byte };
byte d_page[2];
/* Mover. */
byte dm_session = 1, dm_room; bit dm_moved;
byte d_pairs = 2;                           /* bit per session: connected by ctl, destroyed by the mover */
chan notices = [4] of { byte, byte, byte }; /* room, lane, session */

/* ================ destination: ctl and engine ================ */

inline d_fail() {
    if
    :: d_room && open(d_state) -> d_state = FAILED; d_ring!CANCEL,d_room
    :: else
    fi
}

/* The session becomes void. */
inline d_down() {
    if
    :: d_link ->
        if
#ifdef NO_DEAD_LINK_RESET
        :: d_ready -> d_ring!QUIET,d_room
#else
        :: d_ready -> d_ring!CLOSE,0
#endif
        :: else
        fi;
        cut[d_link] = 1; d_link = 0; d_ready = 0; d_aborting = 0; d_sent = 0;
        d_fail()
    :: else
    fi
}

#ifdef NO_ACK_COMPARED
#define acked(r) (d_aborting)
#define held_by_slot(r) (d_room && !d_left)
#else
#define acked(r) (d_aborting == r)
#define held_by_slot(r) (d_room == r && !d_left)
#endif

active proctype DestinationWorker() {
    byte dialled = 1;
end:
    do
    /* A request enters; the session is announced if there is none. */
    :: d_step { !d_room && d_next == A && d_cancelled -> d_next++ }
    :: d_step { !d_room && d_next <= B && !(d_next == A && d_cancelled) ->
        d_room = d_next; d_next++; d_state = BOOTSTRAPPING;
        if
        :: !d_link && dialled < LINKS - 1 -> dialled++; d_link = dialled; to_source[d_link]!ANNOUNCE,0
        :: !d_link && dialled == LINKS - 1 -> d_fail()
        :: else
        fi }
    :: d_step { d_room && d_ready && !d_session_ready -> d_session_ready = 1 }
    /* Pages are leased, WaitingForInput is set, the mover gets Expect, ctl an event. */
    :: d_step { d_session_ready && !d_expected && !d_left -> d_expected = 1; d_lease = 1; d_lanes = 0;
        if :: d_state == BOOTSTRAPPING -> d_state = WAITING; d_event = 1 :: else fi;
        d_ring!EXPECT,d_room }
    :: d_step { d_event -> d_event = 0;
        if
        :: d_state != FAILED && d_link -> d_sent = 1; to_source[d_link]!DESTINATION,d_room
        :: d_state != FAILED && !d_link -> d_fail()
        :: else
        fi }
    :: d_step { cancels && !d_cancelled && !d_result[A] -> cancels--; d_cancelled = 1;
        if :: d_room == A -> d_fail() :: d_room != A -> d_result[A] = 2 fi }
    /* Decode takes it over, or it leaves: with Abort if the source has its Destination, else with Quiet. */
    :: d_step { d_room && !d_left && !d_event && !open(d_state) -> d_left = 1;
        if
        :: d_state == SUCCESS -> d_result[d_room] = 1; assert(d_page[0] == d_room && d_page[1] == d_room)
        :: else -> d_result[d_room] = 2
        fi;
        if
        :: d_result[d_room] == 2 && d_sent && d_link ->
            to_source[d_link]!ABORT,d_room; if :: d_ready -> d_aborting = d_room :: else fi
#ifndef NO_QUIET_OF_ITS_OWN
        :: d_result[d_room] == 2 && !(d_sent && d_link) && d_ready -> d_ring!QUIET,d_room
#endif
        :: else
        fi }
    /* The slot is used again, and so are its pages. */
    :: d_step { d_left && !d_lease -> d_room = 0; d_left = 0; d_sent = 0; d_expected = 0; d_session_ready = 0;
        d_lanes = 0; d_page[0] = 0; d_page[1] = 0 }
    /* An answer is late. The end checks the case that it never comes. */
    :: d_step { d_aborting && faults -> faults = 0; faulty = 1;
#ifdef NO_OVERDUE_RESET
        d_ring!QUIET,d_aborting; d_aborting = 0
#else
        d_down()
#endif
        }
    :: d_step { nempty(d_reports) -> d_reports?kind,r; if :: r == d_link && d_ready -> d_down() :: else fi }
    :: d_step { d_link && nempty(to_destination[d_link]) -> to_destination[d_link]?kind,r;
        if
        :: kind == WELCOME -> d_pairs = d_pairs | (1 << d_link); d_ring!OPEN,d_link; d_ready = 1
        :: kind == ACK && acked(r) -> d_ring!QUIET,(d_aborting == r -> r : d_aborting); d_aborting = 0
        :: kind == ACK && !acked(r) && held_by_slot(r) -> d_fail(); d_sent = 0; d_ring!QUIET,d_room
#ifdef NO_STATUS_COMPARED
        :: kind == STATUS && d_room && !d_left -> d_fail()
#else
        :: kind == STATUS && d_room == r && !d_left -> d_fail()
#endif
        :: else
        fi }
    :: d_step { d_link && cut[d_link] -> d_down() }
    od
}

/* ================ destination: mover ================ */

inline dm_end() { dm_room = 0; dm_moved = 0; d_lease = 0 }

inline dm_fail() {
    if :: open(d_state) -> d_state = FAILED :: else fi;
    dm_end()
}

/* Queue pairs go, with what they had brought; then the leases end. */
inline dm_close() {
    do :: notices??[_,_,eval(dm_session)] -> notices??_,_,eval(dm_session) :: else -> break od;
#ifdef NO_PAIRS_FIRST
    late = dm_session;
#else
    d_pairs = d_pairs & ~(1 << dm_session);
#endif
    dm_session = 0;
    if :: dm_room -> dm_fail() :: else fi
}

inline take_command() {
    d_ring?kind,r;
    if
    :: kind == OPEN -> dm_close(); dm_session = r
    :: kind == CLOSE -> dm_close()
    :: kind == EXPECT -> dm_room = r; dm_moved = !dm_session;
        if
        :: !open(d_state) && dm_moved -> dm_end()
        :: open(d_state) && !dm_session -> dm_fail()
        :: else
        fi
#ifdef NO_LEASE_TO_QUIET
    :: kind == CANCEL && dm_room == r -> dm_end()
#else
    :: kind == CANCEL && dm_room == r && dm_moved -> dm_end()
#endif
    :: kind == QUIET && dm_room == r && !open(d_state) -> dm_end()
    :: else
    fi
}

#ifdef NO_NOTICE_COMPARED
#define expected(r) (dm_room && (d_state == WAITING || d_state == TRANSFERRING))
#else
#define expected(r) (dm_room == r && (d_state == WAITING || d_state == TRANSFERRING))
#endif
#ifdef NO_ALL_LANES
#define all_lanes true
#else
#define all_lanes (d_lanes == 3)
#endif

active proctype DestinationMover() {
#ifdef NO_PAIRS_FIRST
    byte late;
#endif
end:
    do
    :: d_step { nempty(d_ring) -> take_command() }
    /* A step that finds a notice leaves it to the next step. By then earlier commands are taken. */
#ifdef NO_JUDGE_LATER
    :: d_step { notices??[_,_,eval(dm_session)] -> notices??r,lane,eval(dm_session);
#else
    :: d_step { empty(d_ring) && notices??[_,_,eval(dm_session)] -> notices??r,lane,eval(dm_session);
#endif
        if
        :: expected(r) -> d_state = TRANSFERRING; d_lanes = d_lanes | (1 << lane);
            if :: all_lanes -> dm_end(); d_state = SUCCESS :: else fi
        :: else
        fi }
#ifdef NO_PAIRS_FIRST
    :: d_step { late -> d_pairs = d_pairs & ~(1 << late); late = 0 }
#endif
    /* Its queue pairs fail. */
    :: d_step { faults && dm_session -> faults = 0; faulty = 1; r = dm_session; dm_close(); d_reports!LOST,r }
    od
}

/* ================ source: ctl and engine ================ */

inline s_fail() {
    if
#ifdef NO_MARK_FIRST
    :: s_room && open(s_state) && !s_marks -> s_marks = 1; s_ring!CANCEL,s_room
#else
    :: s_room && open(s_state) -> s_state = FAILED; s_ring!CANCEL,s_room
#endif
    :: else
    fi
}
#ifdef NO_MARK_FIRST
bit s_marks;
#endif

/* A message over a link that has ended is lost. */
inline s_answer(x) {
    if :: s_link && asked_on[x] == s_link -> to_destination[s_link]!ACK,x :: else fi
}

/* Both legs are here: granted, unless it has failed meanwhile. */
inline meet(x) {
    entry[x] = MET;
    if
    :: s_state == BOOTSTRAPPING -> s_state = WAITING; s_granted = 1
    :: else -> s_answer(x);
#ifndef NO_TURNED_DOWN_QUIET
        withdrawn[x] = 1
#endif
    fi
}

inline unlink(x) {
    if
#ifndef NO_KEPT_FORGOTTEN
    :: entry[x] == EARLY -> entry[x] = NONE
#endif
    :: entry[x] == DRAINING -> entry[x] = NONE
    :: entry[x] == MET ->
#ifndef NO_UNLINKED_BURIED
        entry[x] = ENTERED;
#endif
#ifndef NO_ROOMS_FAIL
        if :: s_room == x -> s_fail() :: else fi
#endif
    :: else
    fi
}

inline s_down() {
    if
    :: s_link -> s_ring!CLOSE,0; s_link = 0; unlink(A); unlink(B)
    :: else
    fi
}

#ifdef NO_WITHDRAWN_TO_ASK
#define is_withdrawn(x) true
#else
#define is_withdrawn(x) withdrawn[x]
#endif
#ifdef NO_DRAINING
#define is_quiet(x) true
#else
#define is_quiet(x) (s_state == SUCCESS || withdrawn[x])
#endif

inline abort(x) {
    if
    :: entry[x] == EARLY || entry[x] == NONE -> entry[x] = OVER; s_answer(x)
    :: entry[x] == OVER -> s_answer(x)
    :: entry[x] == MET && is_withdrawn(x) -> s_fail(); s_answer(x)
    :: entry[x] == MET && !is_withdrawn(x) -> ack_wanted[x] = 1;
        if
        :: s_state == SUCCESS && finds(x) -> withdrawn[x] = 1; ack_wanted[x] = 0; s_answer(x)
        :: else -> s_fail()
        fi
    :: entry[x] == DRAINING -> ack_wanted[x] = 1
    :: entry[x] == ENTERED
    fi
}

active proctype SourceWorker() {
end:
    do
    /* A request enters; a Destination can be there for it, or its room can be over. */
    :: d_step { !s_room && s_next <= B && (s_next == A && s_cancelled || entry[s_next] == OVER) -> s_next++ }
    :: d_step { !s_room && s_next <= B && !(s_next == A && s_cancelled) && entry[s_next] != OVER ->
        s_room = s_next; s_next++; s_state = BOOTSTRAPPING;
#ifdef NO_SLOT_GENERATION
        by_slot = s_room;
#endif
        if :: entry[s_room] == EARLY -> meet(s_room) :: else -> entry[s_room] = ENTERED fi }
    :: d_step { cancels && !s_cancelled && s_next <= B && s_room != B -> cancels--; s_cancelled = 1; if :: s_room == A -> s_fail() :: else fi }
#ifdef NO_MARK_FIRST
    :: d_step { s_marks -> s_marks = 0; if :: open(s_state) -> s_state = FAILED :: else fi }
#endif
    /* The prompt is computed: Begin with the lease, then its one chunk. */
    :: d_step { s_granted && !s_begun && !s_finished -> s_begun = 1; s_lease = 1; s_ring!BEGIN,s_room }
    :: d_step { s_begun && !s_told && !s_finished -> s_told = 1; s_ring!CHUNK,s_room }
    /* It has ended for its client; later the slot is free. */
    :: d_step { s_room && !s_finished && !open(s_state) -> s_finished = 1;
        if
        :: s_state == FAILED && entry[s_room] == MET && s_link && asked_on[s_room] == s_link -> to_destination[s_link]!STATUS,s_room
        :: else
        fi;
        if
        :: entry[s_room] == ENTERED || is_quiet(s_room) -> entry[s_room] = OVER
        :: else -> entry[s_room] = DRAINING
        fi }
    :: d_step { s_finished && !s_lease -> s_room = 0; s_granted = 0; s_begun = 0; s_told = 0; s_finished = 0 }
    /* Reports of the mover. */
    :: d_step { nempty(s_reports) -> s_reports?kind,r;
        if
        :: kind == WITHDRAWN && finds(r) && entry[r] == MET -> withdrawn[r] = 1;
            if :: ack_wanted[r] -> ack_wanted[r] = 0; s_answer(r) :: else fi
        :: kind == WITHDRAWN && finds(r) && entry[r] == DRAINING -> entry[r] = OVER;
            if :: ack_wanted[r] -> ack_wanted[r] = 0; s_answer(r) :: else fi
        :: kind == LOST && r == s_link ->
#ifdef NO_HANG_UP
            s_ring!CLOSE,0; unlink(A); unlink(B)
#else
            n = s_link; s_down(); cut[n] = 1
#endif
        :: else
        fi }
    :: d_step { s_link && nempty(to_source[s_link]) -> to_source[s_link]?kind,r;
        if
        :: kind == DESTINATION -> 
            if
            :: entry[r] == NONE -> entry[r] = EARLY; asked_on[r] = s_link
            :: entry[r] == ENTERED && s_room == r -> asked_on[r] = s_link; meet(r)
            :: else -> asked_on[r] = s_link; s_answer(r)
            fi
        :: kind == ABORT -> asked_on[r] = s_link; abort(r)
        fi }
    /* A link that is dialled later voids the one before it. */
    :: d_step { s_link < 2 && nempty(to_source[2]) && to_source[2]?[ANNOUNCE,_] -> to_source[2]?kind,r;
        s_down(); s_link = 2; s_ring!OPEN,2; to_destination[2]!WELCOME,0 }
    :: d_step { s_link && cut[s_link] -> s_down() }
    od
}

/* ================ source: mover and NIC ================ */

inline sm_end() { sm_room = 0; sm_cancelled = 0; sm_complete = 0; s_lease = 0 }

inline drop_queued(x, l) { if :: write[at(x, l)] == QUEUED -> write[at(x, l)] = 0 :: else fi }

/* A lane's poster has left the room, and all that it has posted has completed. */
#ifdef NO_POSTER_COUNTED
#define left(x, l) true
#else
#define left(x, l) (write[at(x, l)] != QUEUED)
#endif
#ifdef NO_COMPLETIONS_FIRST
#define clean(x, l) true
#else
#define clean(x, l) (!write[at(x, l)] || write[at(x, l)] == QUEUED)
#endif

inline sm_withdrawn(x) { s_reports!WITHDRAWN,x; sm_end() }

/* Writes that have not left never leave; those that have left can still land. */
inline flush(x, l) {
    if
#ifdef NO_POSTER_EMPTIED
    :: write[at(x, l)] != FLIES && write[at(x, l)] != QUEUED -> write[at(x, l)] = 0
#else
    :: write[at(x, l)] != FLIES -> write[at(x, l)] = 0
#endif
    :: else
    fi
}

inline sm_close() {
    sm_session = 0; sp_cancel[0] = 0; sp_cancel[1] = 0;
    flush(A, 0); flush(A, 1); flush(B, 0); flush(B, 1);
    if
    :: sm_room -> if :: open(s_state) -> s_state = FAILED :: else fi;
#ifndef NO_CLOSE_ENDS
        sm_end()
#endif
    :: else
    fi
}

/* The lane that brings the count to zero reports. */
inline over(x, l) {
    if
    :: sm_room == x && clean(x, l) && clean(x, 1 - l) && left(x, 1 - l) ->
        if
        :: sm_cancelled -> sm_withdrawn(x)
        :: !sm_cancelled && sm_complete -> sm_end(); if :: open(s_state) -> s_state = SUCCESS :: else fi
        :: else
        fi
    :: else
    fi
}

inline complete(x, l) { write[at(x, l)] = 0; over(x, l) }

/* A lane's poster takes Cancel. */
inline take_cancel(l) {
    r = sp_cancel[l]; sp_cancel[l] = 0;
#ifndef NO_QUEUE_DROPPED
    drop_queued(r, l);
#endif
#ifdef NO_JOBS_IN_ORDER
    if :: sm_room == B -> drop_queued(B, l) :: else fi;
#endif
    if :: sm_cancelled -> over(r, l) :: else fi
}

/* A NIC reads its pages when a write departs. The write lands if its target queue pair exists. */
inline depart(x, l) {
    assert(s_lease && s_room == x);
    write[at(x, l)] = FLIES
}

#ifdef NO_FRESH_PAIRS
#define fits(x) d_pairs
#else
#define fits(x) (d_pairs >> pairs[x] & 1)
#endif

inline land(x, l) {
    if
    :: fits(x) ->
        assert(d_lease && d_room == x);
        d_page[l] = x; notices!x,l,pairs[x];
        if :: sm_session == pairs[x] -> write[at(x, l)] = LANDED :: else -> write[at(x, l)] = 0 fi
    :: else -> write[at(x, l)] = (sm_session == pairs[x] -> GONE : 0)
    fi
}

active proctype SourceMover() {
end:
    do
    :: d_step { nempty(s_ring) -> s_ring?kind,r;
        if
        :: kind == OPEN -> sm_close(); sm_session = r
        :: kind == CLOSE -> sm_close()
        :: kind == BEGIN -> sm_room = r;
            if
#ifdef NO_BEGIN_COMPARED
            :: !sm_session ->
#else
            :: !open(s_state) || !sm_session ->
#endif
                if :: open(s_state) -> s_state = FAILED :: else fi; sm_end()
            :: else
            fi
        :: kind == CHUNK && sm_room == r && !sm_cancelled ->
            if
            :: s_state == WAITING -> s_state = TRANSFERRING; sm_complete = 1; pairs[r] = sm_session;
                write[at(r, 0)] = QUEUED; write[at(r, 1)] = QUEUED
            :: else
            fi
        :: kind == CANCEL && sm_room != r -> s_reports!WITHDRAWN,r
        :: kind == CANCEL && sm_room == r -> sm_cancelled = 1;
            if
            :: !write[at(r, 0)] && !write[at(r, 1)] -> sm_withdrawn(r)
            :: else -> sp_cancel[0] = r; sp_cancel[1] = r;
#ifdef NO_HELD_TO_COMPLETION
                sm_end()
#endif
            fi
        :: else
        fi }
    :: d_step { sp_cancel[0] -> take_cancel(0) }
    :: d_step { sp_cancel[1] -> take_cancel(1) }
    /* Queued writes are posted as there is room. */
    :: d_step { write[at(A, 0)] == QUEUED -> write[at(A, 0)] = POSTED }
    :: d_step { write[at(A, 1)] == QUEUED -> write[at(A, 1)] = POSTED }
    :: d_step { write[at(A, 0)] == LANDED && sm_session -> complete(A, 0) }
    :: d_step { write[at(A, 1)] == LANDED && sm_session -> complete(A, 1) }
    :: d_step { write[at(B, 0)] == LANDED && sm_session -> complete(B, 0) }
    :: d_step { write[at(B, 1)] == LANDED && sm_session -> complete(B, 1) }
    /* Its queue pairs fail: by themselves, or because their writes are not taken. */
    :: d_step { sm_session && (faults ||
            pairs[A] == sm_session && (write[at(A, 0)] == GONE || write[at(A, 1)] == GONE) ||
            pairs[B] == sm_session && (write[at(B, 0)] == GONE || write[at(B, 1)] == GONE)) ->
        if
        :: !faulty && faults -> faults = 0; faulty = 1
        :: else
        fi;
        r = sm_session; sm_close(); s_reports!LOST,r }
    od
}

active proctype Nic() {
end:
    do
    :: d_step { write[at(A, 0)] == POSTED -> depart(A, 0) }
    :: d_step { write[at(A, 1)] == POSTED -> depart(A, 1) }
    :: d_step { write[at(A, 0)] == FLIES -> land(A, 0) }
    :: d_step { write[at(A, 1)] == FLIES -> land(A, 1) }
    /* B's writes follow none and go at once, but after what their poster was ordered before. */
#ifdef NO_JOBS_IN_ORDER
    :: d_step { write[at(B, 0)] == QUEUED -> depart(B, 0); land(B, 0) }
    :: d_step { write[at(B, 1)] == QUEUED -> depart(B, 1); land(B, 1) }
#else
    :: d_step { write[at(B, 0)] == QUEUED && !sp_cancel[0] -> depart(B, 0); land(B, 0) }
    :: d_step { write[at(B, 1)] == QUEUED && !sp_cancel[1] -> depart(B, 1); land(B, 1) }
#endif
    od
}

active proctype World() {
end:
    do
    :: d_step { faults && !cut[1] -> faults = 0; faulty = 1; cut[1] = 1 }
    :: faults -> faults = 0
    /* Nothing more happens. A request that waits for a peer that is gone has its deadline. */
    :: timeout ->
        assert(!d_aborting);
        if
        :: d_step { s_room && open(s_state) && (faulty || d_result[s_room] == 2) -> s_fail() }
        :: d_step { d_room && open(d_state) && (faulty || d_room == A) -> d_fail() }
        :: else -> break
        fi
    od;
    assert(!d_lease && !s_lease);
    assert(!d_room && d_result[A] && d_result[B]);
    assert(!s_room);
    assert(entry[A] != DRAINING && entry[A] != MET && entry[B] != DRAINING && entry[B] != MET);
    assert(faulty || d_result[B] == 1)
}
