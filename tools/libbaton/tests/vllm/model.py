"""Drives two model engines with the real connector and the real library, in random orders.

    BATON_LIBRARY=... PYTHONPATH=tools/libbaton/python python model.py [EXAMPLES]

Prefill and decode are `Engine`s in this process. `hypothesis` chooses what clients do and which
engine steps. At the end of each example, all requests must end and all blocks must be free.
"""

import functools
import logging
import sys
import time

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from hypothesis.stateful import run_state_machine_as_test

import calls
import orders
from engine import CALLS, OCCURRED, Engine, Request, note

KEEP, LOAD, DRAIN = 0.5, 1.0, 20.0
EXAMPLES_MORE = 300
EXTRA = {"keep_seconds": KEEP, "load_seconds": LOAD, "transports": "shm,tcp", "slots": 64}
# Of prefill in some examples: fewer than its prompts.
FEW_SLOTS = 2
# Everything of this must occur in a run.
WANTED = [
    "kv_producer abort WAITING", "kv_producer abort RUNNING", "kv_producer abort PREEMPTED",
    "kv_consumer abort WAITING", "kv_consumer abort RUNNING", "kv_consumer abort PREEMPTED",
    "kv_consumer abort WAITING_FOR_REMOTE_KVS", "kv_producer preemption in mid-prompt",
    "failed load, policy fail", "failed load, policy recompute", "loaded", "room used again",
    "other prompt", "unknown room", "wrong parameters", "answer thrown away",
    "local hit is enough", "prefill restarts", "decode restarts", "a step late", "rejected",
    "no load comes", "no slot",
]
PROMPTS = st.builds(lambda base, length: [base + at % 7 for at in range(length)],
                    st.integers(0, 1), st.integers(1, 40))
WRONG = [
    {"bootstrap_room": -1}, {"bootstrap_room": "7"}, {"bootstrap_room": 1 << 63},
    {"bootstrap_room": True}, {"bootstrap_room": None}, {"remote_addresses": None},
    {"remote_addresses": []}, {"remote_addresses": ["a", "b"]}, {"remote_addresses": [7]},
    {"remote_addresses": ["127.0.0.1:1\0x"]}, {"remote_addresses": ["nonsense"]},
    {"remote_addresses": ["127.0.0.1:1"]}, {"remote_addresses": {"a": 1}}, {"tp_size": 2},
    {"tp_size": "x"},
]


def needs(name):
    """Skips a rule while this list is empty. Rules are equal in each run, but times are not."""
    def wrap(function):
        @functools.wraps(function)
        def call(self, **drawn):
            if getattr(self, name):
                function(self, **drawn)
        return call
    return wrap


# The first words of each failure: `hypothesis` hides them when a failure does not come again.
FAILURES = []


def noted(function):
    @functools.wraps(function)
    def call(self, *arguments, **named):
        try:
            return function(self, *arguments, **named)
        except Exception as error:
            self.is_broken = True
            FAILURES.append(f"{type(error).__name__}: {error}".splitlines()[0])
            raise
    return call


class Pair(RuleBasedStateMachine):
    """A prefill engine, a decode engine, and their clients."""

    @initialize(policy=st.sampled_from(["fail", "recompute"]), lags=st.tuples(
        st.integers(0, 1), st.integers(0, 1)), blocks=st.sampled_from([14, 24, 40]),
        has_few_slots=st.sampled_from([False, False, False, True]))
    def start(self, policy, lags, blocks, has_few_slots):
        self.policy, self.lags, self.blocks = policy, lags, blocks
        self.slots = {"kv_producer": FEW_SLOTS} if has_few_slots else {}
        self.prefill, self.decode = self.engine("kv_producer"), self.engine("kv_consumer")
        self.count, self.is_broken = 0, False
        self.prompts, self.answered, self.loads = [], [], []

    def engine(self, role):
        return Engine(role, blocks=self.blocks, policy=self.policy,
                      extra={**EXTRA, "slots": self.slots.get(role, EXTRA["slots"])},
                      lag=self.lags[role == "kv_consumer"])

    def request(self, prompt, max_tokens, params, **more):
        self.count += 1
        return Request(f"r{self.count}", prompt, max_tokens, params, **more)

    # --- clients -------------------------------------------------------------------------------

    @rule(prompt=PROMPTS, max_tokens=st.sampled_from([1, 1, 1, 3]))
    def ask_prefill(self, prompt, max_tokens):
        request = self.request(prompt, max_tokens, {"do_remote_decode": True})
        self.prompts.append(request)
        self.prefill.add(request)

    @rule(prompt=PROMPTS, steps=st.integers(5, 30), first=st.sampled_from([0, 0, 2, 3]))
    def ask_prefill_and_wait(self, prompt, steps, first):
        self.ask_prefill(prompt=prompt, max_tokens=1)
        if first:
            # The request loses its blocks in the middle, and is computed again.
            self.step(self.prefill, first, 0.0)
            self.prefill.preempt_all()
        self.step(self.prefill, steps, 0.0)

    @rule(prompt=PROMPTS, steps=st.integers(1, 3))
    def ask_prefill_and_leave(self, prompt, steps):
        self.ask_prefill(prompt=prompt, max_tokens=3)
        request = self.prompts[-1]
        self.step(self.prefill, steps, 0.0)
        if not request.is_finished:
            self.prefill.abort(request)

    @rule(steps=st.integers(0, 3), copies=st.sampled_from([1, 1, 2]), which=st.integers(0, 99))
    @needs("answered")
    def ask_decode_and_leave(self, steps, copies, which):
        self.ask_decode(copies=copies, max_tokens=3, skips_cache=False, prefers_local=False)
        self.step(self.decode, steps, 0.0)
        if which % 4 == 0:
            self.decode.preempt_all()
        self.abort(at_decode=True, which=which)

    @rule(max_tokens=st.integers(1, 20), how=st.sampled_from(["", "", "skip", "local"]))
    @needs("answered")
    def ask_decode_and_wait(self, max_tokens, how):
        self.ask_decode(copies=1, max_tokens=max_tokens, skips_cache=how == "skip",
                        prefers_local=how == "local")
        self.step(self.decode, 10, 0.002)

    @rule(prompt=PROMPTS, at_decode=st.booleans(), max_tokens=st.integers(1, 12))
    def ask_for_all(self, prompt, at_decode, max_tokens):
        engine = self.decode if at_decode else self.prefill
        engine.add(self.request(prompt, max_tokens, None))

    @rule(copies=st.sampled_from([1, 1, 1, 2]), max_tokens=st.integers(1, 12),
          skips_cache=st.sampled_from([False, False, True]), prefers_local=st.booleans())
    @needs("answered")
    def ask_decode(self, copies, max_tokens, skips_cache, prefers_local):
        prompt, params, until = self.answered.pop(0)
        for copy in range(copies):
            request = self.request(prompt, max_tokens, params, skips_cache=skips_cache,
                                   prefers_local=prefers_local)
            self.decode.add(request)
            self.loads.append((request, params, until, copy == 0))

    @rule(prompt=PROMPTS, loads=st.booleans(), forgets=st.booleans(), leaves=st.booleans())
    @needs("answered")
    def ask_decode_without_room(self, prompt, loads, forgets, leaves):
        """Only the cached blocks of the prompt are left."""
        pool, params = self.decode.pool, None
        if loads:
            prompt, params, until = self.answered.pop(0)
        held = pool.take_all_but(pool.hits(prompt))
        request = self.request(prompt, 2, params)
        self.decode.add(request)
        if loads:
            self.loads.append((request, params, until, True))
        self.step(self.decode, 1, 0.0)
        if forgets:
            pool.forget()
            self.step(self.decode, 1, 0.0)
        if leaves and not request.is_finished:
            self.decode.abort(request)
        pool.give_back(held)

    @rule(which=st.integers(0, 99))
    @needs("loads")
    def use_a_room_again(self, which):
        note("room used again")
        first, params, *_ = self.loads[which % len(self.loads)]
        self.decode.add(self.request(first.prompt_token_ids, 2, params))

    @rule(at=st.one_of(st.integers(1, 3), st.integers(1, 40)),
          is_shortened=st.sampled_from([False, False, True]))
    @needs("answered")
    def ask_for_another_prompt(self, at, is_shortened):
        note("other prompt")
        prompt, params, _ = self.answered.pop(0)
        prompt = list(prompt)
        if is_shortened and len(prompt) > 1:
            prompt.pop()
        else:
            prompt[-min(at, len(prompt))] += 50
        self.decode.add(self.request(prompt, 2, params))
        self.step(self.decode, 6, 0.002)

    @rule(change=st.sampled_from(WRONG))
    @needs("answered")
    def ask_with_wrong_parameters(self, change):
        note("wrong parameters")
        prompt, params, _ = self.answered.pop(0)
        self.decode.add(self.request(prompt, 2, {**params, **change}))

    @rule(room=st.integers(0, 5))
    @needs("answered")
    def ask_for_an_unknown_room(self, room):
        note("unknown room")
        prompt, params, _ = self.answered.pop(0)
        self.decode.add(self.request(prompt, 2, {**params, "bootstrap_room": room}))

    @rule()
    @needs("answered")
    def reject(self):
        note("rejected")
        prompt, params, _ = self.answered.pop(0)
        self.decode.reject(self.request(prompt, 2, params))

    @rule(at_decode=st.booleans(), which=st.integers(0, 99))
    def take_blocks_and_abort(self, at_decode, which):
        self.take_all_blocks(at_decode=at_decode)
        self.abort(at_decode=at_decode, which=which)

    @rule(at_decode=st.booleans(), which=st.integers(0, 99))
    def abort(self, at_decode, which):
        engine = self.decode if at_decode else self.prefill
        alive = [one for one in engine.requests.values() if not one.is_finished]
        if alive:
            engine.abort(alive[which % len(alive)])

    # --- engines -------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 6), pause=st.sampled_from([0.0, 0.0, 0.0005, 0.002]))
    def step_prefill(self, steps, pause):
        self.step(self.prefill, steps, pause)

    @rule(steps=st.integers(1, 6), pause=st.sampled_from([0.0, 0.0, 0.0005, 0.002]))
    def step_decode(self, steps, pause):
        self.step(self.decode, steps, pause)

    @noted
    def step(self, engine, steps, pause):
        if engine.lag:
            note("a step late")
        for _ in range(steps):
            engine.step()
            time.sleep(pause)
        self.look()

    def look(self):
        """Takes the answers of prefill, and looks at ended loads."""
        for request in [one for one in self.prompts if one.is_finished]:
            self.prompts.remove(request)
            if request.answer:
                until = time.monotonic() + KEEP / 2
                self.answered.append((request.prompt_token_ids, request.answer, until))
            elif request.has_status("FINISHED_LENGTH_CAPPED"):
                # Its last token can come after it has lost its blocks, if the scheduler is ahead.
                assert self.slots or self.lags[0], f"{request.request_id} has no answer"
                note("no slot" if self.slots else "no blocks")
        for entry in [one for one in self.loads if one[0].is_finished]:
            self.loads.remove(entry)
            self.judge(*entry)

    def judge(self, request, _, until, is_first):
        """A load that began in time must succeed if nothing stood in its way."""
        has_to_load = not (request.skips_cache or request.prefers_local)
        is_aborted = request.has_status("FINISHED_ABORTED")
        if has_to_load and not is_aborted and (request.began or time.monotonic()) < until:
            assert request.was_loaded == is_first and not request.has_failed, (
                f"{request.request_id} was not loaded as it should")
        assert not request.has_status("FINISHED_ERROR") or request.has_failed

    @rule(at_decode=st.booleans())
    def take_all_blocks(self, at_decode):
        (self.decode if at_decode else self.prefill).preempt_all()

    @rule(chance=st.integers(0, 4))
    def restart_prefill(self, chance):
        if chance == 0:
            note("prefill restarts")
            self.prefill.end()
            self.prefill = self.engine("kv_producer")
            self.prompts = []
            self.loads = [(one[0], one[1], 0.0, one[3]) for one in self.loads]
            self.answered = [(prompt, params, 0.0) for prompt, params, _ in self.answered]

    @rule(chance=st.integers(0, 4))
    def restart_decode(self, chance):
        if chance == 0:
            note("decode restarts")
            self.decode.end()
            self.decode = self.engine("kv_consumer")
            self.loads = []

    # --- the end -------------------------------------------------------------------------------

    def teardown(self):
        if not hasattr(self, "prefill"):
            return
        try:
            # After a failure, more words would hide it.
            if not self.is_broken:
                self.drain()
        finally:
            self.decode.end()
            self.prefill.end()

    @noted
    def drain(self):
        engines, until = (self.prefill, self.decode), time.monotonic() + DRAIN
        while len(self.answered) > (self.blocks == 14):
            self.reject()
        while any(one.requests or one.outputs or one.worker._open for one in engines):
            for engine in engines:
                engine.step()
                while engine.outputs and not engine.requests:
                    engine._update(*engine.outputs.popleft())
            self.look()
            if self.answered:
                note("no load comes")
            assert time.monotonic() < until, [list(engine.requests) for engine in engines]
            time.sleep(0.0005)
        for engine in engines:
            engine.step()
            engine.outputs.clear()
            self.nothing_is_left(engine)

    def nothing_is_left(self, engine):
        assert not any(engine.pool.users), engine.pool.users
        scheduler, worker = engine.connector, engine.worker
        left = (scheduler._prompts, scheduler._fetches, scheduler._rooms, scheduler._offered,
                worker._offers, worker._kept, worker._ended, worker._failed, worker._open)
        assert not any(left), left


def run(examples, phases=(Phase.generate,), **more):
    run_state_machine_as_test(Pair, settings=settings(
        max_examples=examples, stateful_step_count=40, deadline=None, database=None,
        phases=phases, suppress_health_check=list(HealthCheck), **more))


def missing():
    """What has not occurred yet."""
    return [name for name in WANTED if not OCCURRED[name]]


def main():
    logging.disable(logging.ERROR)
    began, examples = time.monotonic(), 0
    orders.run()
    least = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    # Examples are random, so a few more are needed now and then.
    while examples < least or (missing() and examples < least + EXAMPLES_MORE):
        run(50, (Phase.generate, Phase.shrink))
        examples += 50
    for name, count in sorted(OCCURRED.items()):
        print(f"{count:7} {name}")
    unmade = set()
    for name, recorded in calls.recordings().items():
        unmade |= recorded - CALLS
        print(f"{len(recorded & CALLS):7} of {len(recorded)} orders of calls by {name}")
    print(f"{examples} examples, {time.monotonic() - began:.0f} s; "
          f"did not occur: {[*missing(), *sorted(unmade)] or 'nothing'}")
    return bool(missing() or unmade)


if __name__ == "__main__":
    sys.exit(main())
