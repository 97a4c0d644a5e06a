"""Clients that close their connections at random times."""
import collections, concurrent.futures, random

import calls
from behind import check
from pair_requests import (
    expect_healthy, expect_usage_zero, ids_of, leave, post, prefilled, prompt)
from pair_servers import DECODE, PREFILL

CLIENTS, THREADS = 1000, 24
# A prompt of the tiny model has 60 tokens a sentence.
SENTENCES = 28
KEEP_SECONDS = 5
# A load of a client that has left ends with one of these.
LEFT = {"aborted", "client_gone"}


class Storm:
    def __init__(self, prefill, decode, seed, clients=CLIENTS):
        self.prefill, self.decode, self.seed, self.clients = prefill, decode, seed, clients
        self.ends, self.answers = collections.Counter(), []

    def run(self):
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(self.client, range(self.clients)):
                pass

    def client(self, number):
        chance = random.Random(f"{self.seed} {number}")
        # A third of the prompts begin as others do.
        start = prompt(chance.randrange(8), chance.randrange(1, 8)) if chance.random() < 0.3 else ""
        text = f"{start} Seed {self.seed}, number {number}. " + prompt(
            number, chance.randrange(1, SENTENCES - 8))
        way = chance.choices(["stays", "leaves prefill", "leaves decode", "forgets"],
                             [35, 20, 40, 5])[0]
        self.ends[way] += 1
        more = {"max_tokens": chance.randrange(1, 40), "stream": way == "leaves decode"}
        if way == "leaves prefill":
            leave(self.prefill, text, {"do_remote_decode": True}, chance.random() * 0.6,
                  max_tokens=1)
            return
        params = prefilled(self.prefill, text)
        if way == "leaves decode":
            leave(self.decode, text, params, chance.random() * 0.6, **more)
        elif way == "stays":
            self.answers.append((text, more, ids_of(post(self.decode, text, params, **more))))

    def expect_right_ids(self, count):
        """Compares a part of the answers, for the time it takes."""
        for text, more, said in random.Random(self.seed).sample(self.answers, count):
            right = ids_of(post(self.prefill, text, **more))
            assert said == right, (text, said, right)


def counts_of(decode):
    return (decode.loaded_tokens(), decode.metric("external_prefix_cache_queries_total"),
            decode.metric("external_prefix_cache_hits_total"))


@check
def a_thousand_clients_that_leave_cost_nothing(pair):
    prefill, decode = pair.need(PREFILL.but(keep_seconds=KEEP_SECONDS), DECODE)
    words = []
    for seed in (1, 2, 3):
        storm = Storm(prefill, decode, seed)
        before, failures = counts_of(decode), decode.failures()
        ended = decode.metric("baton_load_seconds_count")
        storm.run()
        expect_healthy(prefill, decode)
        seconds = max(expect_usage_zero(one, KEEP_SECONDS + 5) for one in (prefill, decode))
        storm.expect_right_ids(60)
        failed = {cause: count - failures.get(cause, 0)
                  for cause, count in decode.failures().items() if count > failures.get(cause, 0)}
        assert set(failed) <= LEFT, f"loads failed: {failed}"
        loaded, asked, granted = (now - then for now, then in zip(counts_of(decode), before))
        assert asked == granted, f"decode has asked for {asked} tokens, {granted} were granted"
        assert 0 < loaded <= granted, (loaded, granted)
        # The last block of a prompt is never in the prefix cache.
        loads = decode.metric("baton_load_seconds_count") - ended
        assert loads >= storm.ends["stays"], (loads, storm.ends)
        words.append(f"seed {seed}: {dict(storm.ends)}, {loaded:.0f} tokens loaded, "
                     f"failed loads {failed}, no KV after {seconds:.1f} s")
    return "\n       ".join(words)


@check
def the_calls_of_vllm_are_recorded(pair):
    few = ("--num-gpu-blocks-override", 100)
    prefill, decode = pair.need(*(
        one.but(connector="RecordedConnector", keep_seconds=KEEP_SECONDS, more=few)
        for one in (PREFILL, DECODE)))
    Storm(prefill, decode, 4, 200).run()
    expect_healthy(prefill, decode)
    for one in (prefill, decode):
        expect_usage_zero(one, KEEP_SECONDS + 5)
    found = set((pair.folder / "calls.txt").read_text().splitlines())
    return f"{calls.compare('pair-0.32.0', found, pair.options.record)} orders of calls"
