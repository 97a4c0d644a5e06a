/* The hand-off over shm, in which the destination's mover copies out of the source's pages:
 * src/transfer/transport/shm/mod.rs and src/transfer/pages.rs (lease words). src/transfer/manager
 * and src/transfer/mover are modelled only for this transport.
 *
 * Two rooms, A and B, go one after the other through the same slot and pages on either side. A can be
 * cancelled on either side at any time; the link can be cut (FAULTS). There is one process per
 * thread, and other processes can come between any two steps. A missing fence is modelled as the
 * reordering that it forbids.
 *
 * It checks, for every order of steps:
 *   bytes land only in pages leased to their room        every copy asserts it
 *   Success only with all bytes and the record           when decode takes the room over
 *   every lease ends, every room ends, on both sides     when nothing more can happen
 *   B, which is never cancelled, succeeds without fault  the same
 *
 * Each of these rules is needed. A check removes one of them:
 *   NO_MARK_FIRST        marked Failed, then Cancel                              manager::*::fail
 *   NO_MOVER_ENDS        only the mover ends a lease, not a cancel               kv/lease.rs
 *   NO_OFFER_COMPARED    an offer names room and generation                      ExpectedSlots::expected
 *   NO_JUDGE_LATER       what is seen is judged one step after                   ShmDestination::step
 *   NO_HELD_TO_DONE      the source holds its pages until Done                   SourceMover::done
 *   NO_DONE_COMPARED     Done names room, slot and generation                    Rooms::done
 *   NO_BUMP              every end of a source lease bumps its word              SourceMover::end_lease
 *   NO_BUMP_FENCE        ... before the pages are used again                     PageLists::bump
 *   NO_SECOND_LOOK       the word is looked at behind the copy                   ShmDestination::copy
 *   NO_READER_FENCE      ... and not before its end
 *   NO_OFFERED_WORD      ... and compared with the offer's, not with an earlier look
 *   NO_ALL_LEFT          ... after every copying thread has left                 CopyPool::share
 *   NO_STORE_FENCE       copies are stored before Success shows                  copy::store_fence
 *   NO_END_BEFORE        the lease's end, with the record, comes before Success  DestinationMover::succeed
 */
#ifndef FAULTS
#define FAULTS 1
#endif
#define A 1
#define B 2
#define JUNK 9
/* As in src/transfer/status.rs. */
#define FAILED 0
#define BOOTSTRAPPING 1
#define WAITING 2
#define TRANSFERRING 3
#define SUCCESS 4
#define open(s) (s == BOOTSTRAPPING || s == WAITING || s == TRANSFERRING)

mtype = { DESTINATION, ABORT, DONE, STATUS, ACK, EXPECT, BEGIN, CHUNK, CANCEL };

/* The link. A room's number is also its slot's generation: the slot is A's first, then B's. */
chan to_source = [4] of { mtype, byte };
chan to_destination = [4] of { mtype, byte };
bit cut, s_saw_cut, d_saw_cut;
byte faults = FAULTS;

/* Source: slot's word, room, what its engine and ctl know. */
byte s_state = FAILED, s_room, s_next = A;
bit s_granted, s_begun, s_lease, s_told, s_owes_cancel, s_cancelled;
bit s_early[3], s_over[3];                  /* rooms: Early, Over */
chan s_ring = [6] of { mtype, byte };       /* ctl and engine to mover */
byte s_page[2];
byte word, late_word;                       /* lease word; bumps that are not seen yet */
/* Source's mover. */
byte sm_room; bit sm_pending, sm_complete;
chan offers = [2] of { byte, byte };        /* room, word */

/* Destination: the same. */
byte d_state = FAILED, d_room, d_next = A, d_result[3];
bit d_event, d_sent, d_lease, d_over, d_owes_cancel, d_cancelled;
chan d_ring = [4] of { mtype, byte };
chan d_ends = [2] of { bit };               /* leases back; with the record? */
byte d_page[2], late_page;                  /* late: the second page's store is not seen yet */
/* Destination's mover. */
byte dm_room, dm_done; bit d_stop;
/* A thread that copies beside it: idle, a page to copy that either can take, at work, has left. */
#define IDLE 0
#define OPEN 1
#define JOINED 2
#define LEFT 3
byte helper;

#define d_live (!d_saw_cut)
#define s_live (!s_saw_cut)

/* ---- destination: engine and ctl ---- */

/* Marks the slot, and owes the Cancel that the same thread sends next. */
inline d_fail() {
    if
    :: d_room && open(d_state) ->
#ifdef NO_MARK_FIRST
        d_owes_cancel = 1; d_ring!CANCEL,d_room
#else
        d_state = FAILED; d_owes_cancel = 1
#endif
#ifdef NO_MOVER_ENDS
        ; d_lease = 0
#endif
    :: else
    fi
}

active proctype DestinationWorker() {
    byte r; mtype kind; bit record;
end:
    do
    /* A request comes: pages are leased, WaitingForInput is set, the mover gets Expect, ctl an event. */
    :: d_step { !d_room && d_next <= B && d_live && !(d_next == A && d_cancelled) ->
        d_room = d_next; d_next++; d_lease = 1; d_over = 0; d_sent = 0; d_state = WAITING;
        d_ring!EXPECT,d_room; d_event = 1 }
    :: d_step { !d_room && d_next <= B && (!d_live || d_next == A && d_cancelled) -> d_result[d_next] = 2; d_next++ }
    :: d_step { d_event -> d_event = 0;
        if :: d_state != FAILED && d_live -> d_sent = 1; to_source!DESTINATION,d_room :: else fi }
    :: d_step { !d_cancelled && !d_result[A] -> d_cancelled = 1; if :: d_room == A -> d_fail() :: else fi }
    :: d_step { d_owes_cancel -> d_owes_cancel = 0;
#ifdef NO_MARK_FIRST
        d_state = FAILED
#else
        d_ring!CANCEL,d_room
#endif
        }
    :: d_step { nempty(d_ends) -> d_ends?record; assert(d_lease); d_lease = 0 }
    /* Success is visible; the lease's end must be here by then. */
    :: d_step { d_room && d_state == SUCCESS && !d_over ->
        if :: nempty(d_ends) -> d_ends?record; d_lease = 0 :: empty(d_ends) fi;
        assert(record);
        assert(d_page[0] == d_room && d_page[1] == d_room);
        d_over = 1; d_result[d_room] = 1 }
    :: d_step { d_room && d_state == FAILED && !d_over && !d_owes_cancel && !d_event -> d_over = 1; d_result[d_room] = 2;
        if :: d_sent && d_live -> to_source!ABORT,d_room :: else fi }
    /* The slot is used again, and so are its pages. */
    :: d_step { d_room && d_over && !d_lease -> d_room = 0; record = 0 }
    :: d_step { dm_done && d_live -> to_source!DONE,dm_done; dm_done = 0 }
    :: d_step { dm_done && !d_live -> dm_done = 0 }
    :: d_step { d_live && nempty(to_destination) -> to_destination?kind,r;
        if :: d_room == r -> d_fail() :: else fi }
    :: d_step { cut && !d_saw_cut && !d_owes_cancel -> d_saw_cut = 1; d_stop = 1; d_fail() }
    od
}

/* ---- destination: mover ---- */

inline dm_end(with) {
    d_ends!with; dm_room = 0
}

inline take_command() {
    d_ring?kind,r;
    if
    :: kind == EXPECT -> dm_room = r; if :: d_state == FAILED -> dm_end(0) :: else fi
    :: kind == CANCEL && dm_room == r -> dm_end(0)
    :: else
    fi
}

#ifdef NO_MOVER_ENDS
#define holds(r) true
#else
#define holds(r) (d_lease && d_room == r)
#endif

inline copy(i) {
    atomic {
        assert(d_lease && d_room == dm_room);
#ifdef NO_STORE_FENCE
        if :: i == 1 -> late_page = s_page[i] :: else -> d_page[i] = s_page[i] fi
#else
        d_page[i] = s_page[i]
#endif
    }
}

active proctype DestinationMover() {
    byte r, offered, expected; mtype kind; bit seen, valid;
end:
    do
    :: d_step { nempty(d_ring) -> take_command() }
    /* The session is closed: its leases end, its rooms fail. */
    :: d_step { d_stop -> d_stop = 0; seen = 0;
        do :: nempty(offers) -> offers?r,offered :: empty(offers) -> break od;
        if :: dm_room -> dm_end(0); if :: open(d_state) -> d_state = FAILED :: else fi :: else fi }
    /* A step that finds an offer leaves it to the next step. By then earlier commands are taken. */
    :: nempty(offers) ->
#ifndef NO_JUDGE_LATER
        do
        :: d_step { nempty(d_ring) -> take_command() }
        :: empty(d_ring) -> break
        od;
#endif
        if
        :: d_step { nempty(offers) -> offers?r,offered }
        :: empty(offers) -> goto end
        fi;
        d_step {
#ifdef NO_OFFER_COMPARED
            valid = (dm_room && (d_state == WAITING || d_state == TRANSFERRING));
#else
            valid = (dm_room == r && (d_state == WAITING || d_state == TRANSFERRING));
#endif
            if :: valid -> d_state = TRANSFERRING :: else fi;
            expected = offered
        };
        if
        :: !valid
        :: else ->
#ifdef NO_OFFERED_WORD
            expected = word;
#endif
            helper = OPEN;
            copy(0);
#ifdef NO_READER_FENCE
            valid = (word == expected);
#endif
            if
            :: atomic { helper == OPEN -> helper = IDLE }; copy(1)
#ifdef NO_ALL_LEFT
            :: helper == JOINED
#endif
            :: helper == LEFT -> helper = IDLE
            fi;
#ifdef NO_SECOND_LOOK
            valid = 1;
#elif !defined(NO_READER_FENCE)
            valid = (word == expected);
#endif
            if
            :: valid ->
#ifdef NO_END_BEFORE
                d_step { if :: d_state == TRANSFERRING -> d_state = SUCCESS; dm_done = r :: else fi };
                d_step { dm_end(1) }
#else
                d_step { dm_end(1) };
                d_step { if :: d_state == TRANSFERRING && d_room == r -> d_state = SUCCESS; dm_done = r :: else fi }
#endif
            :: else ->
                d_step { dm_end(0) };
                d_step { if :: d_room == r && open(d_state) -> d_state = FAILED :: else fi }
            fi
        fi
    od
}

active proctype Helper() {
end:
    do
    :: atomic { helper == OPEN -> helper = JOINED };
        copy(1);
        helper = LEFT
    od
}

#ifdef NO_STORE_FENCE
active proctype StoreBuffer() {
end:
    do :: d_step { late_page -> d_page[1] = late_page; late_page = 0 } od
}
#endif

/* ---- source: engine and ctl ---- */

inline s_fail() {
    if
    :: s_room && open(s_state) ->
#ifdef NO_MARK_FIRST
        s_owes_cancel = 1; s_ring!CANCEL,s_room
#else
        s_state = FAILED; s_owes_cancel = 1
#endif
    :: else
    fi
}

active proctype SourceWorker() {
    byte r; mtype kind;
end:
    do
    /* A request comes; its Destination may be here. */
    :: d_step { !s_room && s_next <= B && !(s_next == A && s_cancelled) ->
        s_room = s_next; s_next++; s_granted = s_early[s_room];
        s_state = (s_granted -> WAITING : BOOTSTRAPPING) }
    :: d_step { !s_room && s_next <= B && s_next == A && s_cancelled -> s_over[A] = 1; s_next++;
        if :: s_early[A] && s_live -> to_destination!ACK,A :: else fi }
    :: d_step { !s_cancelled && !s_over[A] -> s_cancelled = 1; if :: s_room == A -> s_fail() :: else fi }
    :: d_step { s_owes_cancel -> s_owes_cancel = 0;
#ifdef NO_MARK_FIRST
        s_state = FAILED
#else
        s_ring!CANCEL,s_room
#endif
        }
    /* The prompt is computed in one go: Begin with the lease, then its one chunk. */
    :: d_step { s_granted && !s_begun && !s_over[s_room] -> s_begun = 1; s_lease = 1;
        s_page[0] = s_room; s_page[1] = s_room; s_ring!BEGIN,s_room }
    :: d_step { s_begun && !s_told && !s_over[s_room] -> s_told = 1; s_ring!CHUNK,s_room }
    /* The request has ended for its client. */
    :: d_step { s_room && !s_over[s_room] && !s_owes_cancel && (s_state == SUCCESS || s_state == FAILED) -> s_over[s_room] = 1;
        if :: s_state == FAILED && s_granted && s_live -> to_destination!STATUS,s_room :: else fi }
    :: d_step { s_room && s_over[s_room] && !s_lease -> s_room = 0; s_granted = 0; s_begun = 0; s_told = 0 }
    /* Free pages are used by others. */
    :: d_step { !s_lease && s_page[0] && s_page[0] != JUNK -> s_page[0] = JUNK }
    :: d_step { !s_lease && s_page[1] && s_page[1] != JUNK -> s_page[1] = JUNK }
#ifdef NO_BUMP_FENCE
    :: d_step { late_word -> word++; late_word-- }
#endif
    :: d_step { s_live && nempty(to_source) -> to_source?kind,r;
        if
        :: kind == DESTINATION && s_over[r] -> to_destination!ACK,r
        :: kind == DESTINATION && s_room == r && s_state == BOOTSTRAPPING -> s_state = WAITING; s_granted = 1
        :: kind == DESTINATION && s_room != r -> s_early[r] = 1
        :: kind == DESTINATION && s_room == r && s_state != BOOTSTRAPPING && !s_over[r] -> to_destination!ACK,r
#ifdef NO_DONE_COMPARED
        :: kind == DONE && s_room -> s_ring!DONE,s_room
#else
        :: kind == DONE && s_room == r && !s_over[r] -> s_ring!DONE,s_room
#endif
        :: kind == ABORT && s_room == r -> s_fail()
        :: kind == ABORT && s_room != r && !s_over[r] -> s_over[r] = 1; if :: s_next == r -> s_next++ :: else fi
        :: else
        fi }
    :: d_step { cut && !s_saw_cut && !s_owes_cancel -> s_saw_cut = 1; s_early[A] = 0; s_early[B] = 0;
        if :: s_granted -> s_fail() :: else fi }
    od
}

/* ---- source: mover ---- */

inline sm_end() {
#ifdef NO_BUMP
    skip;
#elif defined(NO_BUMP_FENCE)
    late_word++;
#else
    word++;
#endif
    sm_room = 0; sm_pending = 0; sm_complete = 0; s_lease = 0
}

active proctype SourceMover() {
    byte r; mtype kind;
end:
    do
    :: d_step { nempty(s_ring) -> s_ring?kind,r;
        if
        :: kind == BEGIN -> sm_room = r; if :: s_state == FAILED -> sm_end() :: else fi
        :: kind == CHUNK && sm_room == r -> sm_pending = 1
        :: kind == CANCEL && sm_room == r -> sm_end()
        :: kind == DONE && sm_room == r && sm_complete ->
            sm_end(); if :: open(s_state) -> s_state = SUCCESS :: else fi
        :: else
        fi }
    :: d_step { sm_pending && empty(s_ring) -> sm_pending = 0;
        if
        :: s_state == WAITING -> s_state = TRANSFERRING; sm_complete = 1;
            /* An offer is not seen before what was stored ahead of it. */
            word = word + late_word; late_word = 0; offers!sm_room,word
#ifdef NO_HELD_TO_DONE
            ; sm_end(); s_state = SUCCESS
#endif
        :: else
        fi }
    od
}

/* ---- the world ---- */

active proctype World() {
    bit expired;
end:
    do
    :: d_step { faults && !cut -> faults--; cut = 1 }
    :: faults -> faults = 0
    :: timeout ->
        if
        /* A request that waits for a peer that is gone has its deadline. */
        :: d_step { !expired && (cut || d_result[A] == 2 || s_over[A]) && (s_room && open(s_state) || d_room && open(d_state)) ->
            expired = 1; s_fail(); d_fail() }
        :: else -> break
        fi
    od;
    assert(!d_lease && !s_lease);
    assert(!d_room && d_result[A] && d_result[B]);
    assert(!s_room);
    assert(cut || d_result[B] == 1)
}
