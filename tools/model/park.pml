/* How a mover parks and wakes: src/stdx/event_count.rs, EventLoop::step in
 * src/transfer/event_loop.rs, the word PARKED of src/transfer/transport/shm/ring.rs.
 *
 * The listener is a mover. One ringer is a thread of its process, which notifies its event count.
 * The other is a source in another process, which writes an offer and looks at the destination's
 * page. Every thread has a store buffer: others see its stores later, unless a fence or an atomic
 * exchange has emptied it. (Both can be weaker on other machines. The SeqCst fences are needed for
 * the store buffer.) The wait has no time-out here, unlike in the code.
 *
 * It checks: no wake-up is lost, both pieces of work are taken, and no thread waits for ever (no
 * invalid end state).
 *
 * Each of these rules is needed. A check removes one of them:
 *   NO_RINGER_FENCE    the ringer fences between its work and its look at `parked`  EventCount::notify
 *   NO_OFFER_FENCE     the source fences between its offer and its look at PARKED   Writer::write
 *   NO_LISTENER_FENCE  the listener fences between `parked` and its last look       EventCount::prepare_wait
 *   NO_LAST_LOOK       the listener looks for work once more before it waits        EventLoop::step
 *   NO_PARK_FIRST      sessions are marked parked before that fence, not after it   EventLoop::step
 *   NO_LASTING_WAKE    a wake-up just before the wait ends the wait, too (eventfd)  Waiter::new
 *   NO_CLEAR_FIRST     the doorbell is cleared before that look, not after it       Waiter::run
 */

/* Memory, and per thread a store buffer for each word it stores. */
bit work[2], parked[2];             /* 0: event count, 1: the session's page */
bit late_work[2], late_parked[2];   /* stored, not yet visible */
bit value[2];                       /* of late_parked */
bit doorbell;                       /* eventfd */
bit waits;
byte taken;

/* A thread's own buffer is empty. */
#define settled_ringer(i)  (!late_work[i])
#define settled_listener   (!late_parked[0] && !late_parked[1])

inline wake() {
#ifdef NO_LASTING_WAKE
    if :: waits -> doorbell = 1 :: else fi
#else
    doorbell = 1
#endif
}

proctype Ringer(bit i) {
    bit seen;
    late_work[i] = 1;
    if
#ifdef NO_RINGER_FENCE
    :: i == 0 -> skip
#else
    :: i == 0 -> settled_ringer(0)
#endif
#ifdef NO_OFFER_FENCE
    :: i == 1 -> skip
#else
    :: i == 1 -> settled_ringer(1)
#endif
    fi;
    seen = parked[i];
    if
    /* The first ringer takes the duty: an exchange, which does not overtake its own stores. */
    :: seen && i == 0 ->
        atomic { settled_ringer(0) -> seen = parked[0]; parked[0] = 0 };
        if :: seen -> atomic { wake() } :: else fi
    :: seen && i == 1 -> atomic { wake() }
    :: else
    fi
}

/* One turn of the mover; `found`: there was work. */
inline look() {
    d_step {
        found = 0;
        if :: work[0] -> work[0] = 0; taken++; found = 1 :: else fi;
        if :: work[1] -> work[1] = 0; taken++; found = 1 :: else fi
    }
}

/* A thread sees its own stores in order: a word is not stored anew while the last value is under way. */
inline store_parked(i, v) { atomic { !late_parked[i] -> late_parked[i] = 1; value[i] = v } }

active proctype Listener() {
    bit found;
    do
    :: taken == 2 -> break
    :: else ->
        look();
        if
        :: found
        :: else ->
#ifndef NO_PARK_FIRST
            store_parked(1, 1);
#endif
            store_parked(0, 1);
#ifndef NO_LISTENER_FENCE
            settled_listener;
#endif
#ifdef NO_PARK_FIRST
            store_parked(1, 1);
#endif
#ifdef NO_LAST_LOOK
            found = 0;
#else
            look();
#endif
            if
            :: found || taken == 2
            :: else ->
#ifdef NO_CLEAR_FIRST
                doorbell = 0;
#endif
                waits = 1; atomic { doorbell -> waits = 0 }
            fi;
            store_parked(0, 0);
            store_parked(1, 0);
            doorbell = 0
        fi
    od
}

active proctype Buffers() {
end:
    do
    :: d_step { late_work[0] -> work[0] = 1; late_work[0] = 0 }
    :: d_step { late_work[1] -> work[1] = 1; late_work[1] = 0 }
    :: d_step { late_parked[0] -> parked[0] = value[0]; late_parked[0] = 0 }
    :: d_step { late_parked[1] -> parked[1] = value[1]; late_parked[1] = 0 }
    od
}

init { atomic { run Ringer(0); run Ringer(1) } }
