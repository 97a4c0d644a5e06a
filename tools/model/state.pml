/* Pages of recurrent state on a prefill worker: src/kv/{request_pages,page_cache,pool}.rs,
 * src/sched/{slots,chunks,prefill}.rs.
 *
 * Four requests have prompts of two chunks. The first chunks of all but the third are equal, and the
 * state behind them can become a checkpoint. Another one can begin with its second chunk then. The
 * fourth request is as large as the pool. The engine is one thread; the mover is another one, which
 * sends the state to the destination. The destination of a request can come at any time. A write to
 * a page takes two steps, and the mover can read between them. A fault (FAULTS) cancels the first
 * request at any time, also within its first chunk. A checkpoint that replaces another one is not
 * modelled.
 *
 * It checks, for every order of steps:
 *   a chunk reads the state of its prefix                every chunk asserts it
 *   the mover sends the state of the whole prompt        every departure asserts it
 *   an admitted request finds its pages                  every allocation asserts it
 *   every request ends, every page goes back             when nothing more can happen (no invalid
 *                                                        end state)
 *
 * Each of these rules is needed. A check removes one of them:
 *   NO_LAST_CHUNK          state crosses with the last chunk                    hand_over
 *   NO_LEASE_KEPT          a page with a lease does not become free             PagePool::remove_user
 *   NO_CHECKPOINT_HELD     a request holds the checkpoint until it has read it  PagePool::reuse_checkpoint
 *   NO_CHECKPOINT_COUNTED  admission counts it beside the request's own pages   admission::charge
 *   NO_WAY_WITHOUT         if there is room only without it, it is not used     SlotEntry::reusable_in
 *   NO_OWN_PAGES           the chunk behind it writes to the request's pages    RequestPages::state
 *   NO_FIXED_PAGES         a checkpoint has pages of its own from the beginning RequestPages::begin_checkpoint
 *   NO_WHOLE_CHUNK         it enters the cache when its chunk is complete       SlotEntry::end_chunk
 */
#ifndef FAULTS
#define FAULTS 1
#endif
#define REQUESTS 4
#define PAGES 3
/* What a page holds: nothing of use, the state behind the first chunk of request r, or that behind its
 * prompt. The third request has another first chunk. */
#define JUNK 0
#define shares(r) (r != 3)
#define prefix(r) (shares(r) -> 1 : 2)
#define whole(r) (10 + r)
/* Stages. */
#define WAITING 0
#define FIRST 1
#define SECOND 2
#define COMPUTED 3
#define OVER 4

/* Page 0 is none. */
byte holds[PAGES + 1], users[PAGES + 1], leases[PAGES + 1];
byte cached;                                /* the page of the checkpoint; 0: none */
byte stage[REQUESTS + 1], own[REQUESTS + 1], origin[REQUESTS + 1], checkpoint[REQUESTS + 1];
byte further[2];                            /* pages of the large request beside that of its state */
bit granted[REQUESTS + 1];                  /* the destination has come; the engine has not seen it */
byte listed[REQUESTS + 1];                  /* the page that the mover has got; it has a lease */
bit told[REQUESTS + 1], sent[REQUESTS + 1], ended[REQUESTS + 1];
byte cancels = FAULTS;
#ifdef NO_CHECKPOINT_HELD
bit borrowed[REQUESTS + 1];
#endif
/* Local to a step. */
hidden byte p, q;
byte to;

#ifdef NO_LEASE_KEPT
#define is_free(p) (users[p] == 0 && p != cached)
#else
#define is_free(p) (users[p] == 0 && leases[p] == 0 && p != cached)
#endif
#define is_idle(p) (p != 0 && users[p] == 0 && leases[p] == 0)
/* Pages that are free or evictable. */
#define one(condition) (condition -> 1 : 0)
#define available (one(is_free(1)) + one(is_free(2)) + one(is_free(3)) + one(is_idle(cached)))

/* Leaves a page with a user in p. */
inline allocate() {
    p = 1;
    do
    :: p <= PAGES && !is_free(p) -> p++
    :: else -> break
    od;
    if
    :: p > PAGES ->
        assert(is_idle(cached));            /* an admitted request finds its pages */
        p = cached; cached = 0
    :: else
    fi;
    users[p]++
}

inline release(page) { if :: page -> users[page]--; page = 0 :: else fi }

inline release_origin(r) {
#ifdef NO_CHECKPOINT_HELD
    if :: borrowed[r] -> origin[r] = 0 :: else fi;
#endif
    release(origin[r])
}

/* Pages that a request takes when it begins: its own, and the checkpoint if it is idle. */
#define need(r) (r == 4 -> PAGES : 1)
#ifdef NO_CHECKPOINT_COUNTED
#define charge(r) need(r)
#else
#define charge(r) (need(r) + one(is_idle(cached) && shares(r)))
#endif
#ifdef NO_WAY_WITHOUT
#define has_room(r) (available >= charge(r))
#else
#define has_room(r) (available >= need(r))
#endif

inline begin(r) {
    if
    :: cached && shares(r) && available >= charge(r) ->
        origin[r] = cached;
#ifdef NO_CHECKPOINT_HELD
        borrowed[r] = 1;
#else
        users[cached]++;
#endif
        stage[r] = SECOND
    :: else -> stage[r] = FIRST
    fi;
    allocate(); own[r] = p;
    if
    :: r == 4 -> allocate(); further[0] = p; allocate(); further[1] = p
    :: else
    fi
}

/* The engine tells the mover of a destination, and of state that it can send. */
inline hand_over(r) {
    if
    :: granted[r] && listed[r] == 0 && own[r] && !ended[r] -> listed[r] = own[r]; leases[own[r]]++
    :: else
    fi;
    if
#ifdef NO_LAST_CHUNK
    :: listed[r] && stage[r] >= SECOND && stage[r] != OVER -> told[r] = 1
#else
    :: listed[r] && stage[r] == COMPUTED -> told[r] = 1
#endif
    :: else
    fi
}

inline finish(r) {
    stage[r] = OVER;
    release(own[r]);
    if :: r == 4 -> release(further[0]); release(further[1]) :: else fi;
    release_origin(r);
    release(checkpoint[r])
}

inline compute_first(r) {
    d_step {
        if
        /* There is room for a checkpoint. */
        :: cached == 0 && shares(r) && available ->
            allocate(); checkpoint[r] = p;
#ifdef NO_WHOLE_CHUNK
            cached = p;
#endif
#ifdef NO_FIXED_PAGES
            to = own[r]
#else
            to = p
#endif
        :: else -> to = own[r]
        fi;
        holds[to] = JUNK
    };
    if
    :: cancels && r == 1 -> d_step { cancels = 0; finish(r) }
    :: d_step {
        holds[to] = prefix(r);
        if
        :: checkpoint[r] ->
#ifdef NO_FIXED_PAGES
            q = own[r]; own[r] = checkpoint[r]; checkpoint[r] = q;
#endif
            origin[r] = checkpoint[r]; checkpoint[r] = 0; cached = origin[r]
        :: else
        fi;
        stage[r] = SECOND
    }
    fi
}

inline compute_second(r) {
    d_step {
        p = (origin[r] -> origin[r] : own[r]);
        assert(holds[p] == prefix(r));         /* a chunk reads the state of its prefix */
#ifdef NO_OWN_PAGES
        to = p;
#else
        to = own[r];
#endif
        holds[to] = JUNK
    };
    d_step {
        holds[to] = whole(r);
        release_origin(r);
        stage[r] = COMPUTED
    }
}

#define is_over(r) (stage[r] == OVER && listed[r] == 0)

/* What the engine can do for a request. */
#define steps(r) \
    :: cancels && r == 1 && stage[r] != OVER -> d_step { cancels = 0; finish(r) } \
    :: stage[r] == WAITING && has_room(r) -> d_step { begin(r); hand_over(r) } \
    :: stage[r] == FIRST -> compute_first(r); d_step { hand_over(r) } \
    :: stage[r] == SECOND -> compute_second(r); d_step { hand_over(r) } \
    :: stage[r] == COMPUTED && granted[r] && !told[r] -> d_step { hand_over(r) } \
    :: stage[r] == COMPUTED && sent[r] -> d_step { finish(r) } \
    /* A lease ends when the mover says so. */ \
    :: ended[r] && listed[r] -> d_step { leases[listed[r]]--; listed[r] = 0 } \
    /* The request is gone, and the mover has not begun: it ends the lease on Cancel. */ \
    :: stage[r] == OVER && listed[r] && !told[r] && !ended[r] -> d_step { ended[r] = 1 }

active proctype Engine() {
    do
    :: is_over(1) && is_over(2) && is_over(3) && is_over(4) -> break
    steps(1)
    steps(2)
    steps(3)
    steps(4)
    od;
    assert(users[1] + users[2] + users[3] + leases[1] + leases[2] + leases[3] == 0)
}

active proctype Mover() {
    byte r;
end:
    do
    :: told[1] && !sent[1] -> r = 1; goto send
    :: told[2] && !sent[2] -> r = 2; goto send
    :: told[3] && !sent[3] -> r = 3; goto send
    :: told[4] && !sent[4] -> r = 4; goto send
    od;
send:
    assert(holds[listed[r]] == whole(r));   /* the mover sends the state of the whole prompt */
    d_step { sent[r] = 1; ended[r] = 1; r = 0 };
    goto end
}

/* Destinations come in any order. */
active proctype Destinations() {
end:
    do
    :: d_step { !granted[1] -> granted[1] = 1 }
    :: d_step { !granted[2] -> granted[2] = 1 }
    :: d_step { !granted[3] -> granted[3] = 1 }
    :: d_step { !granted[4] -> granted[4] = 1 }
    od
}
