"""Processes that are killed or stopped while requests are open."""
import concurrent.futures, functools, http.client, json, os, signal, threading, time

from behind import check
from pair_requests import (
    expect_healthy, expect_usage_zero, ids_of, post, prefilled, prompt, prompt_ids)
from pair_servers import DECODE, PREFILL

WITNESS = "WitnessConnector"
# A link without a sign of life ends after this time. A step follows.
LINK_SECONDS, STEP_SECONDS = 2, 0.5
HELD = {"X-Request-Id": "hold"}
HELD_REQUESTS = 8
SOURCE = PREFILL.but(connector=WITNESS)
FAILING, COMPUTING = (DECODE.but(name=f"decode-{policy}", policy=policy, connector=WITNESS)
                      for policy in ("fail", "recompute"))
LONG = 24


class Asked:
    """A request that is asked by a thread, and the time of its end."""

    def __init__(self, call, *arguments, **more):
        self.answer, self.at = None, None
        self.thread = threading.Thread(target=self._run, args=(call, arguments, more))
        self.thread.start()

    def _run(self, call, arguments, more):
        try:
            self.answer = call(*arguments, **more)
        except (OSError, http.client.HTTPException, AssertionError) as error:
            self.answer = error
        self.at = time.monotonic()

    def wait(self, seconds=60):
        self.thread.join(seconds)
        assert not self.thread.is_alive(), f"no answer after {seconds} s"
        return self.answer


def await_true(is_true, what, seconds=10):
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def await_open(pair, requests):
    """Waits until decode loads what prefill holds."""
    rooms = {one.room for one in requests}
    path = pair.folder / "started.jsonl"
    await_true(lambda: path.exists() and rooms <= {
        json.loads(line)["room"] for line in path.read_text().splitlines()}, "no load is open")
    time.sleep(0.3)
    assert all(one.at is None for one in requests), "a load has ended"


def hold(pair, is_on):
    path = pair.folder / "hold"
    path.touch() if is_on else path.unlink(missing_ok=True)


def held(prefill, decode, text, **more):
    """Prefill keeps the last tokens of the request back, so its load is open."""
    params = prefilled(prefill, text, HELD)
    asked = Asked(post, decode, text, params, **more)
    asked.room = params["bootstrap_room"]
    return asked


# --- prefill dies --------------------------------------------------------------------------------

def prefill_dies(pair, part):
    """Kills one process while requests of all kinds are open, at decodes of both policies."""
    prefill, failing, computing = pair.need(SOURCE, FAILING, COMPUTING)
    decodes, base = (failing, computing), {"api": 2000, "engine": 2100, "worker": 2200}[part]
    texts = {when: prompt(base + number, LONG)
             for number, when in enumerate(("before", "answered", "during", "after"))}
    right = {when: ids_of(post(prefill, text)) for when, text in texts.items()}
    long_ids = ids_of(post(prefill, texts["after"], max_tokens=450))
    failures = failing.failures(), computing.failures()
    loaded = [one.loaded_tokens() for one in decodes]
    hold(pair, True)
    ready = [prefilled(prefill, texts["after"]) for _ in decodes]
    longest = max(len(prompt_ids(prefill, text)) for text in texts.values())
    after = [Asked(post, one, texts["after"], params, max_tokens=450)
             for one, params in zip(decodes, ready)]
    await_true(lambda: all(one.loaded_tokens() > old for one, old in zip(decodes, loaded)),
               "nothing is loaded")
    answered = [prefilled(prefill, texts["answered"]) for _ in decodes]
    during = [held(prefill, one, texts["during"]) for one in decodes]
    await_open(pair, during)
    before = Asked(prefilled, prefill, prompt(base + 50, LONG) + " Never computed before.")
    os.kill(prefill.pid_of(part), signal.SIGKILL)
    died = time.monotonic()
    # The other two processes live on without the API server, and have the KV.
    hold(pair, part != "api")
    waiting = [Asked(post, one, texts["answered"], params)
               for one, params in zip(decodes, answered)]
    ends, computed = [], []
    for when, (at_failing, at_computing) in {"during": during, "answered": waiting}.items():
        status = at_failing.wait().status
        assert status == 500 or ids_of(at_failing.answer) == right[when], (when, status)
        assert ids_of(at_computing.wait()) == right[when], when
        ends.append(at_failing.at - died)
        computed.append(at_computing.at - died)
        assert max(ends) < LINK_SECONDS + STEP_SECONDS, (when, ends)
    for one in after:
        assert ids_of(one.wait()) == long_ids
    before.wait()
    hold(pair, False)
    causes = [new_failures(one, old) for one, old in zip(decodes, failures)]
    for one, old, found in zip(decodes, loaded, causes):
        count = sum(found.values())
        # A worker lives on for a moment after its engine, and its agent still serves a load that
        # needs no more computing. The held one fails.
        assert part == "api" or 1 <= count <= 2, (one.name, found)
        # The request before the death has brought KV, and each of the two that has not failed.
        assert one.loaded_tokens() - old <= (3 - count) * longest, (one.name, found)
    words = (f"loads ended after {min(ends):.2f} to {max(ends):.2f} s with {causes[0]}, "
             f"or were computed after {max(computed):.2f} s, "
             f"prefill's own request after {before.at - died:.2f} s")
    return f"{words}; {prefill_returns(prefill, decodes, base + 60)}"


def new_failures(server, old):
    return {cause: int(count - old.get(cause, 0)) for cause, count in server.failures().items()
            if count > old.get(cause, 0)}


def prefill_returns(prefill, decodes, number):
    """The next prefill is used without a restart of decode."""
    prefill.kill()
    prefill.start().await_start()
    ready = time.monotonic()
    text = prompt(number, 6)
    before = [one.loaded_tokens() for one in decodes]
    answers = [post(one, text, prefilled(prefill, text)) for one in decodes]
    seconds = time.monotonic() - ready
    right = ids_of(post(prefill, text))
    assert all(ids_of(answer) == right for answer in answers)
    assert all(one.loaded_tokens() > old for one, old in zip(decodes, before)), "nothing was loaded"
    assert seconds < 3, seconds
    return f"the next prefill is used after {seconds:.2f} s"


for name in ("api", "engine", "worker"):
    run = functools.partial(prefill_dies, part=name)
    run.__name__ = f"prefills_{name}_is_killed"
    check(run)


# --- decode dies or stops ------------------------------------------------------------------------

class Clients:
    """Clients of another decode, all the time."""

    def __init__(self, prefill, decode, number):
        self.prefill, self.decode, self.number = prefill, decode, number
        self.is_over, self.answers = False, []
        self.pool = concurrent.futures.ThreadPoolExecutor(2)
        self.runs = [self.pool.submit(self.run, number + 1000 * one) for one in range(2)]

    def run(self, number):
        while not self.is_over:
            number += 1
            text = prompt(number, 3)
            params = prefilled(self.prefill, text)
            self.answers.append((text, ids_of(post(self.decode, text, params))))
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Also after a failed check, because the program waits for its threads.
        self.is_over = True

    def end(self):
        """All of them, with right ids. Returns how many."""
        self.is_over = True
        for run in self.runs:
            run.result()
        for text, said in self.answers:
            assert ids_of(post(self.prefill, text)) == said, text
        return len(self.answers)


def open_loads(pair, number):
    """Some loads of one decode that do not end, and clients of the other one."""
    prefill, dying, other = pair.need(SOURCE, FAILING, COMPUTING)
    expect_usage_zero(prefill, SOURCE.keep_seconds + 10)
    hold(pair, True)
    requests = [held(prefill, dying, prompt(number + one, LONG)) for one in range(HELD_REQUESTS)]
    await_open(pair, requests)
    usage = prefill.metric("kv_cache_usage_perc")
    assert usage > 0
    return prefill, dying, requests, usage, Clients(prefill, other, number + 5000)


def await_freed(prefill, usage):
    """What is left is of the other clients."""
    began = time.monotonic()
    await_true(lambda: prefill.metric("kv_cache_usage_perc") < usage / 4, "KV is kept", 3)
    return time.monotonic() - began


@check
def a_decode_that_is_killed_costs_prefill_nothing(pair):
    prefill, dying, requests, usage, clients = open_loads(pair, 3000)
    with clients:
        dying.kill()
        seconds = await_freed(prefill, usage)
        for one in requests:
            one.wait()
        time.sleep(2)
        count = clients.end()
    hold(pair, False)
    expect_healthy(prefill)
    return (f"{HELD_REQUESTS} prompts freed after {seconds:.2f} s, "
            f"{count} requests of others right; none kept after "
            f"{expect_usage_zero(prefill, 3):.2f} s")


@check
def a_decode_that_stops_for_10_seconds_costs_prefill_nothing(pair):
    prefill, stopped, requests, usage, clients = open_loads(pair, 13000)
    with clients:
        stopped.signal(signal.SIGSTOP)
        seconds = await_freed(prefill, usage)
        time.sleep(10 - seconds)
        stopped.signal(signal.SIGCONT)
        statuses = [one.wait().status for one in requests]
        count = clients.end()
    hold(pair, False)
    text = prompt(13500)
    before = stopped.loaded_tokens()
    assert ids_of(post(stopped, text, prefilled(prefill, text))) == ids_of(post(prefill, text))
    assert stopped.loaded_tokens() > before, "nothing was loaded afterwards"
    assert all(status == 500 for status in statuses), statuses
    expect_usage_zero(stopped, 3)
    return (f"{HELD_REQUESTS} prompts freed after {seconds:.2f} s, {count} requests of others "
            f"right; its own failed with {stopped.failures()}")
