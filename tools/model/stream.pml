/* The hand-off over tcp, in which the destination's mover reads frames from streams into its pages:
 * src/transfer/transport/tcp/{source,destination}.rs. src/transfer/manager and src/transfer/mover
 * are modelled only for this transport.
 *
 * Two rooms, A and B, go one after the other through the same slot and pages on either side, and over
 * the same two lanes. A can be cancelled on either side at any time. A fault (FAULTS) cuts the link or
 * the streams. Each thread's steps are options of its process; others can come between any two of
 * them. A frame is a head and one piece of KV; a lane's one frame of a room is its last. A room's
 * number is also its slots' generation.
 *
 * It checks, for every order of steps:
 *   bytes land only in pages leased to their room        every landing asserts it
 *   bytes leave only pages leased to their room          every departure asserts it
 *   a lane stays in step with its frames                 every piece that is read
 *   Success only with all bytes                          when decode takes the room over
 *   every lease ends, every room ends, on both sides     when nothing more can happen
 *   B, which is never cancelled, succeeds without fault  the same
 *
 * Each of these rules is needed. A check removes one of them:
 *   NO_MARK_FIRST        marked Failed, then Cancel                              manager::*::fail
 *   NO_MOVER_ENDS        only the mover ends a lease, not a cancel               kv/lease.rs
 *   NO_REVOKE            Cancel discards the rest of an open frame               TcpDestination::revoke
 *   NO_FRAME_COMPARED    a head names room, slot and generation                  ExpectedSlots::expected
 *   NO_JUDGE_LATER       a head is judged one step later                         TcpDestination::step
 *   NO_ALL_LANES         Success takes the last frame of every lane              StatusTable, EndLane
 *   NO_FRAME_FINISHED    a frame that has begun is finished                      TcpSource::withdraw
 *   NO_HELD_TO_SENT      ... and until then its pages are held                   SourceMover::complete
 *   NO_CLOSE_ENDS        ... or until its stream is lost                         SourceMover::close
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

mtype = { DESTINATION, ABORT, STATUS, ACK, EXPECT, BEGIN, CHUNK, CANCEL, CLOSE, HEAD, PIECE };

/* The link, and the lanes. */
chan to_source = [4] of { mtype, byte };
chan to_destination = [4] of { mtype, byte };
chan lane0 = [2] of { mtype, byte };        /* HEAD: room; PIECE: what it holds */
chan lane1 = [2] of { mtype, byte };
bit cut, torn;
byte faults = FAULTS;
/* Local to a step. */
hidden byte r;
hidden mtype kind;

/* Source: slot's word, room, what its engine and ctl know. */
byte s_state = FAILED, s_room, s_next = A;
bit s_up = 1, s_granted, s_begun, s_told, s_lease, s_cancelled;
bit s_early[3], s_over[3];
chan s_ring = [6] of { mtype, byte };
byte s_page;
/* Its mover, by lane: the room with a frame to send, and the room with a head that has left. */
byte sm_room, queued[2], begun[2]; bit sm_up = 1, sm_cancelled, sm_complete;

/* Destination: the same. */
byte d_state = FAILED, d_room, d_next = A, d_result[3];
bit d_up = 1, d_event, d_sent, d_lease, d_cancelled;
byte d_lanes, d_page[2];
chan d_ring = [5] of { mtype, byte };
/* Its mover, by lane: the head that was read, and whether its piece is to land. */
byte dm_room, head[2]; bit dm_up = 1, judged[2], live[2], dm_lost;

/* ================ destination: ctl and engine ================ */

inline d_fail() {
    if
    :: d_room && open(d_state) -> d_state = FAILED; d_ring!CANCEL,d_room;
#ifdef NO_MOVER_ENDS
        d_lease = 0
#endif
    :: else
    fi
}

inline d_down() { d_up = 0; cut = 1; d_ring!CLOSE,0; d_fail() }

active proctype DestinationWorker() {
end:
    do
    :: d_step { !d_room && d_next <= B && d_up && !(d_next == A && d_cancelled) ->
        d_room = d_next; d_next++; d_lease = 1; d_state = WAITING; d_ring!EXPECT,d_room; d_event = 1 }
    :: d_step { !d_room && d_next <= B && (!d_up || d_next == A && d_cancelled) -> d_result[d_next] = 2; d_next++ }
    :: d_step { d_event -> d_event = 0;
        if :: d_state != FAILED && d_up -> d_sent = 1; to_source!DESTINATION,d_room :: else fi }
    :: d_step { !d_cancelled && !d_result[A] -> d_cancelled = 1; if :: d_room == A -> d_fail() :: else fi }
    /* Decode takes it over, or it leaves. */
    :: d_step { d_room && !d_result[d_room] && !d_event && !open(d_state) ->
        if
        :: d_state == SUCCESS -> d_result[d_room] = 1; assert(d_page[0] == d_room && d_page[1] == d_room)
        :: else -> d_result[d_room] = 2; if :: d_sent && d_up -> to_source!ABORT,d_room :: else fi
        fi }
    /* The slot is used again, and so are its pages. */
    :: d_step { d_room && d_result[d_room] && !d_lease -> d_room = 0; d_sent = 0; d_lanes = 0; d_page[0] = 0; d_page[1] = 0 }
    :: d_step { d_up && nempty(to_destination) -> to_destination?kind,r;
        if :: d_room == r && !d_result[r] -> d_fail() :: else fi }
    :: d_step { d_up && (cut || dm_lost) -> d_down() }
    od
}

/* ================ destination: mover ================ */

inline dm_end() { dm_room = 0; d_lease = 0 }

inline dm_close() {
    dm_up = 0; torn = 1; head[0] = 0; head[1] = 0; judged[0] = 0; judged[1] = 0; live[0] = 0; live[1] = 0;
    if
    :: dm_room -> if :: open(d_state) -> d_state = FAILED :: else fi; dm_end()
    :: else
    fi
}

#ifdef NO_REVOKE
#define revoke(l)
#else
#define revoke(l) if :: head[l] == r -> live[l] = 0 :: else fi;
#endif
#ifdef NO_FRAME_COMPARED
#define expected(r) (dm_room && (d_state == WAITING || d_state == TRANSFERRING))
#else
#define expected(r) (dm_room == r && (d_state == WAITING || d_state == TRANSFERRING))
#endif
#ifdef NO_ALL_LANES
#define all_lanes true
#else
#define all_lanes (d_lanes == 3)
#endif
#ifdef NO_JUDGE_LATER
#define commands_taken true
#else
#define commands_taken empty(d_ring)
#endif

inline judge(l) {
    judged[l] = 1;
    if :: expected(head[l]) -> d_state = TRANSFERRING; live[l] = 1 :: else fi
}

inline read_piece(l, lane) {
    lane?kind,r;
    assert(kind == PIECE);
    if
    :: live[l] -> assert(d_lease && d_room == head[l]); d_page[l] = r;
        if
        :: d_state == TRANSFERRING -> d_lanes = d_lanes | (1 << l);
            if :: all_lanes -> dm_end(); d_state = SUCCESS :: else fi
        :: else
        fi
    :: else
    fi;
    head[l] = 0; judged[l] = 0; live[l] = 0
}

active proctype DestinationMover() {
end:
    do
    :: d_step { nempty(d_ring) -> d_ring?kind,r;
        if
        :: kind == CLOSE && dm_up -> dm_close()
        :: kind == EXPECT -> dm_room = r;
            if
            :: !dm_up || !open(d_state) -> if :: open(d_state) -> d_state = FAILED :: else fi; dm_end()
            :: else
            fi
        :: kind == CANCEL && dm_room == r -> revoke(0) revoke(1) dm_end()
        :: else
        fi }
    /* A head is judged one step after it was read. By then earlier commands are taken. */
    :: d_step { dm_up && !head[0] && nempty(lane0) -> lane0?kind,head[0]; assert(kind == HEAD) }
    :: d_step { dm_up && !head[1] && nempty(lane1) -> lane1?kind,head[1]; assert(kind == HEAD) }
    :: d_step { head[0] && !judged[0] && commands_taken -> judge(0) }
    :: d_step { head[1] && !judged[1] && commands_taken -> judge(1) }
    :: d_step { judged[0] && nempty(lane0) -> read_piece(0, lane0) }
    :: d_step { judged[1] && nempty(lane1) -> read_piece(1, lane1) }
    :: d_step { torn && dm_up -> dm_close(); dm_lost = 1 }
    od
}

/* ================ source: ctl and engine ================ */

#ifdef NO_MARK_FIRST
bit s_marks;
#endif
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

active proctype SourceWorker() {
end:
    do
    /* A request comes; its Destination may be here. */
    :: d_step { !s_room && s_next <= B && !s_over[s_next] && !(s_next == A && s_cancelled) ->
        s_room = s_next; s_next++; s_granted = s_early[s_room]; s_state = (s_granted -> WAITING : BOOTSTRAPPING) }
    :: d_step { !s_room && s_next <= B && (s_over[s_next] || s_next == A && s_cancelled) -> s_over[s_next] = 1;
        if :: s_early[s_next] && s_up -> to_destination!ACK,s_next :: else fi;
        s_next++ }
    :: d_step { !s_cancelled && !s_over[A] -> s_cancelled = 1; if :: s_room == A -> s_fail() :: else fi }
#ifdef NO_MARK_FIRST
    :: d_step { s_marks -> s_marks = 0; if :: open(s_state) -> s_state = FAILED :: else fi }
#endif
    /* The prompt is computed: Begin with the lease, then its one chunk. */
    :: d_step { s_granted && !s_begun && !s_over[s_room] -> s_begun = 1; s_lease = 1; s_page = s_room; s_ring!BEGIN,s_room }
    :: d_step { s_begun && !s_told && !s_over[s_room] -> s_told = 1; s_ring!CHUNK,s_room }
    /* It has ended for its client; later the slot is free, and others use its pages. */
    :: d_step { s_room && !s_over[s_room] && !open(s_state) -> s_over[s_room] = 1;
        if :: s_state == FAILED && s_granted && s_up -> to_destination!STATUS,s_room :: else fi }
    :: d_step { s_room && s_over[s_room] && !s_lease -> s_room = 0; s_granted = 0; s_begun = 0; s_told = 0; s_page = JUNK }
    :: d_step { s_up && nempty(to_source) -> to_source?kind,r;
        if
        :: kind == DESTINATION && s_over[r] -> to_destination!ACK,r
        :: kind == DESTINATION && !s_over[r] && s_room != r -> s_early[r] = 1
        :: kind == DESTINATION && !s_over[r] && s_room == r && s_state == BOOTSTRAPPING -> s_state = WAITING; s_granted = 1
        :: kind == DESTINATION && !s_over[r] && s_room == r && s_state != BOOTSTRAPPING -> to_destination!ACK,r
        :: kind == ABORT && s_room == r -> s_fail()
        :: kind == ABORT && s_room != r -> s_over[r] = 1
        fi }
    :: d_step { s_up && (cut || !sm_up) -> s_up = 0; cut = 1; s_early[A] = 0; s_early[B] = 0; s_ring!CLOSE,0;
        if :: s_granted -> s_fail() :: else fi }
    od
}

/* ================ source: mover ================ */

inline sm_end() { sm_room = 0; sm_cancelled = 0; sm_complete = 0; s_lease = 0 }

inline sm_close() {
    sm_up = 0; torn = 1; queued[0] = 0; queued[1] = 0; begun[0] = 0; begun[1] = 0;
    if
    :: sm_room -> if :: open(s_state) -> s_state = FAILED :: else fi;
#ifndef NO_CLOSE_ENDS
        sm_end()
#endif
    :: else
    fi
}

inline withdraw(l) {
    if :: queued[l] == r -> queued[l] = 0 :: else fi;
#ifdef NO_FRAME_FINISHED
    begun[l] = 0
#endif
}

/* The rest of a frame leaves. */
inline send_piece(l, lane) {
    assert(s_lease && s_room == begun[l]);
    lane!PIECE,s_page;
    begun[l] = 0;
    if
    :: !queued[1 - l] && !begun[1 - l] && sm_room ->
        if
        :: sm_cancelled -> sm_end()
        :: !sm_cancelled && sm_complete -> sm_end(); if :: open(s_state) -> s_state = SUCCESS :: else fi
        :: else
        fi
    :: else
    fi
}

active proctype SourceMover() {
end:
    do
    :: d_step { nempty(s_ring) -> s_ring?kind,r;
        if
        :: kind == CLOSE && sm_up -> sm_close()
        :: kind == BEGIN -> sm_room = r;
            if
            :: !sm_up || !open(s_state) -> if :: open(s_state) -> s_state = FAILED :: else fi; sm_end()
            :: else
            fi
        :: kind == CHUNK && sm_room == r && !sm_cancelled && s_state == WAITING ->
            s_state = TRANSFERRING; sm_complete = 1; queued[0] = r; queued[1] = r
        :: kind == CANCEL && sm_room == r -> withdraw(0); withdraw(1);
#ifdef NO_HELD_TO_SENT
            sm_end()
#else
            if :: !begun[0] && !begun[1] -> sm_end() :: else -> sm_cancelled = 1 fi
#endif
        :: else
        fi }
    :: d_step { queued[0] && !begun[0] && nfull(lane0) -> begun[0] = queued[0]; queued[0] = 0; lane0!HEAD,begun[0] }
    :: d_step { queued[1] && !begun[1] && nfull(lane1) -> begun[1] = queued[1]; queued[1] = 0; lane1!HEAD,begun[1] }
    :: d_step { begun[0] && nfull(lane0) -> send_piece(0, lane0) }
    :: d_step { begun[1] && nfull(lane1) -> send_piece(1, lane1) }
    :: d_step { torn && sm_up -> sm_close() }
    od
}

active proctype World() {
end:
    do
    :: d_step { faults && !cut -> faults = 0; cut = 1 }
    :: d_step { faults && !torn -> faults = 0; torn = 1 }
    :: faults -> faults = 0
    /* Nothing more happens. A request that waits for a peer that is gone has its deadline. */
    :: timeout ->
        if
        :: d_step { s_room && open(s_state) && (cut || d_result[s_room] == 2) -> s_fail() }
        :: d_step { d_room && open(d_state) && (cut || d_room == A) -> d_fail() }
        :: else -> break
        fi
    od;
    assert(!d_lease && !s_lease);
    assert(!d_room && d_result[A] && d_result[B]);
    assert(!s_room);
    assert(cut || d_result[B] == 1)
}
