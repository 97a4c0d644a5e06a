"""Wrong, stale and forged references to KV, of Baton and, beside it, of NIXL."""
import random, time

from behind import ask, check, free_port
from pair_requests import (
    expect_healthy, expect_usage_zero, ids_of, post, prefilled, prompt)
from pair_servers import DECODE, PREFILL

KEEP_SECONDS = 4
SHORT = PREFILL.but(keep_seconds=KEEP_SECONDS)
NIXL = "NixlConnector"
BLOCKS = 120


class Trial:
    """Asks decode with wrong parameters. Each text is new, because a local hit hides wrong KV."""

    def __init__(self, prefill, decode):
        self.prefill, self.decode, self.number, self.rows = prefill, decode, 1000, []

    def text(self):
        self.number += 1
        return prompt(self.number)

    def ask(self, name, params, text=None):
        text = text or self.text()
        right = ids_of(post(self.prefill, text))
        before, failures = self.decode.loaded_tokens(), self.decode.failures()
        began = time.monotonic()
        answer = post(self.decode, text, params)
        seconds = time.monotonic() - began
        if answer.status == 200:
            said = "right ids" if ids_of(answer) == right else "WRONG IDS"
        else:
            said = f"status {answer.status}"
        causes = [cause for cause, count in self.decode.failures().items()
                  if count > failures.get(cause, 0)]
        loaded = self.decode.loaded_tokens() - before
        self.rows.append((name, said, loaded))
        cause = causes[0] if causes else "no load"
        print(f"       {name:34} {said:11} {cause:12} {seconds:5.2f} s", flush=True)

    def expect_no_wrong_kv(self, allowed):
        for name, said, loaded in self.rows:
            assert said in allowed and loaded == 0, (name, said, loaded)
        expect_healthy(self.prefill, self.decode)


def ask_with_wrong_references(pair, policy):
    prefill, decode = pair.need(SHORT, DECODE.but(policy=policy))
    trial, text = Trial(prefill, decode), prompt(51)
    good = prefilled(prefill, text)
    used = dict(good)
    assert post(decode, text, used).status == 200
    forged = {
        "address without a server": [f"127.0.0.1:{free_port()}"],
        "address that is forbidden": ["10.1.2.3:80"], "no address": ["nonsense"],
        "address of HTTP": [f"127.0.0.1:{prefill.port}"], "too many addresses": ["x"] * 3,
        "address of decode itself": [f"127.0.0.1:{decode.port}"]}
    trial.ask("room used twice", used, text + " Again.")
    trial.ask("room used twice, same prompt", used, text)
    trial.ask("room of another prompt", prefilled(prefill, trial.text()))
    trial.ask("unknown room", {**good, "bootstrap_room": random.getrandbits(62)})
    for name, addresses in forged.items():
        trial.ask(name, {**prefilled(prefill, text), "remote_addresses": addresses})
    for name, words in {
            "wrong types": {"bootstrap_room": "x", "remote_addresses": 7},
            "another number of ranks": {"tp_size": 4}}.items():
        fresh = trial.text()
        trial.ask(name, {**prefilled(prefill, fresh), **words}, fresh)
    # The count is compared by the ends, whatever the parameters say.
    trial.ask("a part of the prompt", prefilled(prefill, text + " It goes on."), text)
    trial.ask("more than the prompt", {**prefilled(prefill, text), "remote_num_tokens": 10**6},
              text + " It goes on.")
    fresh = trial.text()
    late = prefilled(prefill, fresh)
    expect_usage_zero(prefill, KEEP_SECONDS + 5)
    trial.ask("KV that has expired", late, fresh)
    return trial


@check
def wrong_references_are_recomputed(pair):
    trial = ask_with_wrong_references(pair, "recompute")
    trial.expect_no_wrong_kv(["right ids"])
    return f"{len(trial.rows)} cases, 0 wrong"


@check
def wrong_references_fail(pair):
    trial = ask_with_wrong_references(pair, "fail")
    fresh = trial.text()
    params = prefilled(trial.prefill, fresh)
    trial.prefill.kill()
    prefill = trial.prefill.start().await_start()
    trial.ask("a prefill that has ended", params, fresh)
    trial.ask("its room at the next prefill",
              {**params, "remote_addresses": prefilled(prefill, prompt(3))["remote_addresses"]},
              fresh)
    # Parameters that name no KV are computed at decode, as are those that never had any.
    trial.expect_no_wrong_kv(["right ids", "status 500"])
    return f"{len(trial.rows)} cases, 0 wrong"


def nixl_cases(trial, lease):
    """The five cases of vllm#52234. Prefill has few blocks, so blocks are soon used again."""
    prefill, decode = trial.prefill, trial.decode

    def given(**words):
        fresh = trial.text()
        return {**prefilled(prefill, fresh), **words}, fresh

    trial.ask("unknown request", *given(remote_request_id="cmpl-unknown-0-00000000"))
    params, fresh = given()
    outside = [[block + 10**6 for block in group] for group in params["remote_block_ids"]]
    trial.ask("blocks that do not exist", {**params, "remote_block_ids": outside}, fresh)
    params, fresh = given()
    assert post(decode, fresh, params).status == 200
    trial.ask("reference used twice", params, fresh + " Again.")
    params, fresh = given()
    assert post(decode, fresh, params).status == 200
    for _ in range(2 * BLOCKS // 15):
        post(prefill, trial.text())
    # Another prompt of the same length, because vLLM compares the count of blocks.
    other = fresh.replace("short story", "long letter")
    trial.ask("blocks given to other prompts", params, other)
    params, fresh = given()
    time.sleep(lease + 2)
    trial.ask("lease that is over", params, fresh)


@check
def five_cases_beside_nixl(pair):
    """Prints what NixlConnector does with them. Only the answers of Baton must be right."""
    wrong = {}
    few = ("--num-gpu-blocks-override", str(BLOCKS))
    for connector in (NIXL, "BatonConnector"):
        setups = [one.but(connector=connector, keep_seconds=KEEP_SECONDS, transports="tcp",
                          more=few) for one in (PREFILL, DECODE.but(policy="fail"))]
        trial = Trial(*pair.need(*setups))
        print(f"     {connector}", flush=True)
        if connector == NIXL:
            nixl_cases(trial, 30)
        else:
            baton_cases(trial)
            trial.expect_no_wrong_kv(["right ids", "status 500"])
        wrong[connector] = [name for name, said, _ in trial.rows if said == "WRONG IDS"]
    return ", ".join(f"{name}: {len(cases)} wrong of 5" for name, cases in wrong.items())


def baton_cases(trial):
    """The same five. There are no block ids to forge, so the second one is a longer prompt."""
    prefill, decode = trial.prefill, trial.decode
    fresh = trial.text()
    trial.ask("unknown request", {**prefilled(prefill, fresh), "bootstrap_room": 77}, fresh)
    fresh = trial.text()
    trial.ask("blocks that do not exist", prefilled(prefill, fresh), fresh + prompt(7))
    fresh = trial.text()
    params = prefilled(prefill, fresh)
    assert post(decode, fresh, params).status == 200
    trial.ask("reference used twice", params, fresh + " Again.")
    for _ in range(2 * BLOCKS // 15):
        post(prefill, trial.text())
    trial.ask("blocks given to other prompts", params, fresh.replace("short story", "long letter"))
    fresh = trial.text()
    params = prefilled(prefill, fresh)
    time.sleep(KEEP_SECONDS + 2)
    trial.ask("lease that is over", params, fresh)
