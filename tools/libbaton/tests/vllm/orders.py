"""Orders of calls that random runs of the model seldom make, one function for each group."""

import contextlib

from checks import FAST, pair, prefilled, until
from engine import Engine, Request

PROMPT = range(10)
SHORT = {**FAST, "keep_seconds": 1}


@contextlib.contextmanager
def blocked(engine, request, but=0):
    """Others hold all free blocks but the cached ones of this request, and `but` more."""
    held = engine.pool.take_all_but(engine.pool.hits(request.prompt_token_ids))
    engine.pool.give_back(held[:but])
    engine.add(request)
    engine.step()
    yield held
    engine.pool.give_back(held[but:])


def compute(engine):
    """Leaves the prompt in the prefix cache."""
    request = Request("computed", PROMPT, 1, None)
    engine.add(request)
    until([engine], lambda: request.is_finished)


def end(*engines):
    until(engines, lambda: not any(one.requests or one.worker._open for one in engines))
    for one in engines:
        one.end()


def ask_again(engine, params):
    """Requests without room, with or without a part in the cache. Each one needs parameters."""
    compute(engine)
    request = Request("has hits", PROMPT, 2, params[0])
    with blocked(engine, request):
        engine.step()
        engine.abort(request)
    request = Request("loses hits", PROMPT, 2, params[1])
    with blocked(engine, request) as held:
        engine.pool.forget()
        held += engine.pool.take_all_but([])
        engine.step()
        engine.step()
        engine.abort(request)
    request = Request("gets hits", PROMPT, 2, params[2])
    engine.add(Request("other", PROMPT, 9, None))
    with blocked(engine, request, but=3):
        engine.step()
        engine.abort(request)


def ask_again_with_a_load():
    prefill, decode = pair(extra=SHORT)
    ask_again(decode, [prefilled(prefill, PROMPT, f"p{number}") for number in range(3)])
    end(prefill, decode)


def ask_again_without_a_load():
    for role, params in (("kv_producer", {"do_remote_decode": True}), ("kv_consumer", None)):
        engine = Engine(role, extra=SHORT)
        ask_again(engine, [params] * 3)
        end(engine)


def load_a_part():
    prefill, decode = pair(extra=SHORT)
    params = prefilled(prefill, PROMPT)
    compute(decode)
    request = Request("loads", PROMPT, 2, params)
    decode.add(request)
    until([prefill, decode], lambda: request.is_finished)
    assert request.was_loaded
    end(prefill, decode)


def prefer_the_cache():
    """vLLM can use the part that is cached, and throw the connector's answer away."""
    prefill, decode = pair(extra=SHORT)
    params = prefilled(prefill, PROMPT)
    compute(decode)
    request = Request("prefers", PROMPT, 2, params, prefers_local=True)
    decode.add(request)
    until([prefill, decode], lambda: request.is_finished)
    assert not request.was_loaded
    end(prefill, decode)


def fail_a_load(is_cached):
    """The load of a room that prefill does not know ends, and decode computes the prompt."""
    prefill, decode = pair("recompute", SHORT)
    params = prefilled(prefill, PROMPT)
    request = Request("fails", PROMPT, 2, {**params, "bootstrap_room": 1})
    decode.add(request)
    decode.step()
    if is_cached:
        compute(decode)
    until([decode], lambda: request.is_finished)
    assert request.has_failed
    end(prefill, decode)


def load_another_prompt():
    """It has other tokens in one block, the last and partial one too. Its load fails."""
    with contextlib.ExitStack() as ends:
        # A mistake in the connector ends this early, and other runs follow.
        prefill, decode = engines = pair("recompute", SHORT)
        for one in engines:
            ends.callback(one.end)
        for at in range(len(PROMPT)):
            other = [99 if index == at else token for index, token in enumerate(PROMPT)]
            request = Request(f"other {at}", other, 2, prefilled(prefill, PROMPT, f"p{at}"))
            decode.add(request)
            until(engines, lambda: request.is_finished)
            assert request.has_failed, f"the prompt with another token {at} was loaded"


def leave_a_load():
    prefill, decode = pair(extra=SHORT, lag=1)
    params = [prefilled(prefill, PROMPT, f"p{number}") for number in range(3)]
    for number, is_time in enumerate((
            lambda one: one.has_status("WAITING_FOR_REMOTE_KVS"),
            lambda one: any(one.request_id in results.finished_recving
                            for _, results in decode.outputs),
            lambda one: one.request_id in decode.ready)):
        request = Request(f"leaves {number}", PROMPT, 2, params[number])
        if number == 0:
            # It would land at once.
            request.kv_transfer_params["bootstrap_room"] = 1
        decode.add(request)
        until([prefill, decode], lambda: is_time(request))
        decode.abort(request)
    end(prefill, decode)


def preempt():
    """Before the last token is known, before a client leaves, and before a prompt goes on."""
    decode = Engine("kv_consumer", extra=SHORT, lag=1)
    for max_tokens, leaves, forgets in ((1, False, True), (9, True, True), (9, False, True),
                                        (9, False, False)):
        request = Request(f"preempted {max_tokens} {leaves} {forgets}", PROMPT, max_tokens, None)
        decode.add(request)
        until([decode], lambda: len(request.tokens) > len(PROMPT))
        decode._preempt(request)
        if forgets:
            decode.pool.forget()
        decode.step()
        if leaves:
            decode.abort(request)
        until([decode], lambda: request.is_finished)
    end(decode)


def run():
    ask_again_with_a_load()
    ask_again_without_a_load()
    load_a_part()
    prefer_the_cache()
    fail_a_load(is_cached=False)
    fail_a_load(is_cached=True)
    load_another_prompt()
    leave_a_load()
    preempt()
