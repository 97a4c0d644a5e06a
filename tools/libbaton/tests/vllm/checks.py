"""The start of the connector, its counters, and hand-overs in a fixed order."""

import logging
import pathlib
import random
import sys
import tempfile
import time
from types import SimpleNamespace

from engine import Engine, FullAttentionSpec, Request, configuration

from baton_kv._vllm_facts import weights_of
from baton_kv._vllm_scheduler import KVConnectorRole, Settings, digests_of
from baton_kv._vllm_worker import BatonStats
from baton_kv.vllm import BatonConnector

FAST = {"keep_seconds": 5, "load_seconds": 1, "slots": 16}


def refusal(call, *arguments):
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def start_with(change):
    vllm_config, kv_cache_config = configuration("kv_both", 8, {})
    change(vllm_config, kv_cache_config)
    for role in KVConnectorRole:
        BatonConnector(vllm_config, role, kv_cache_config)


def until(engines, is_over, seconds=10.0):
    end = time.monotonic() + seconds
    while not is_over():
        assert time.monotonic() < end
        for one in engines:
            one.step()
        time.sleep(0.0005)


def pair(policy="fail", **more):
    return (Engine("kv_producer", extra=FAST, **more),
            Engine("kv_consumer", extra=FAST, policy=policy, **more))


def prefilled(prefill, prompt, request_id="p"):
    request = Request(request_id, prompt, 1, {"do_remote_decode": True})
    prefill.add(request)
    until([prefill], lambda: request.is_finished)
    return request.answer


def decoded(engines, prompt, params, request_id="d", **more):
    request = Request(request_id, prompt, 2, params, **more)
    engines[1].add(request)
    until(engines, lambda: request.is_finished)
    return request


def check_what_is_not_supported_is_refused_by_name():
    def set_value(owner, name, value):
        return lambda *configs: setattr(getattr(configs[0], owner), name, value)

    changes = {
        "data parallelism": set_value("parallel_config", "data_parallel_size", 2),
        "pipeline parallelism": set_value("parallel_config", "pipeline_parallel_size", 2),
        "context parallelism": set_value("parallel_config", "decode_context_parallel_size", 2),
        "sleep mode": set_value("model_config", "enable_sleep_mode", True),
        "speculative decoding": lambda one, _: setattr(one, "speculative_config", "eagle"),
        "2 KV cache groups": lambda _, one: one.kv_cache_groups.append(one.kv_cache_groups[0]),
        "2 KV cache tensors": lambda _, one: one.kv_cache_tensors.append(None),
        "the KV cache layout LHBNC": lambda _, one: setattr(one, "kv_cache_layout", "LHBNC"),
        "the attention of MambaSpec": lambda _, one: setattr(
            one.kv_cache_groups[0], "kv_cache_spec", type("MambaSpec", (), {})()),
    }
    for name, change in changes.items():
        assert refusal(start_with, change) == f"BatonConnector does not support: {name}"

    class MultiConnector:
        def __init__(self):
            start_with(lambda *configs: None)

    assert "MultiConnector" in refusal(MultiConnector)


def check_settings():
    assert Settings.of({"transports": "tcp, rdma", "cpus": "1,2", "host": None}) == Settings(
        transports=("tcp", "rdma"), cpus=(1, 2))
    assert Settings.of({"allow": ["10.0.0.0/8"]}).allow == ("10.0.0.0/8",)
    assert "keep_secnds, x" in refusal(Settings.of, {"x": 1, "keep_secnds": 2, "slots": 3})
    assert "load_seconds" in refusal(Settings.of, {"load_seconds": 0})


def check_digests_depend_on_all_before():
    digests = lambda ids, lora=None: digests_of(SimpleNamespace(
        prompt_token_ids=ids, lora_request=lora, mm_features=None), 4)
    right = digests(list(range(10)))
    assert len(right) == 3 and len(set(right)) == 3
    assert digests(list(range(8))) == right[:2]
    changed = digests([0, 1, 2, 3, 9, *range(5, 10)])
    assert changed[0] == right[0] and changed[1] != right[1] and changed[2] != right[2]
    assert digests(list(range(10)), SimpleNamespace(lora_name="x"))[0] != right[0]


def check_counters_add_up():
    one = BatonStats({"seconds": [1.0], "counts": {"loaded_bytes": 5, "load_failures aborted": 1}})
    two = BatonStats({"seconds": [2.0], "counts": {"load_failures aborted": 2}})
    assert one.aggregate(two).reduce() == {
        "loads": 2, "loaded_bytes": 5, "load_failures aborted": 3, "milliseconds a load": 1500.0}
    assert not one.is_empty() and BatonStats({"seconds": [], "counts": {}}).is_empty()


def check_an_engine_of_both_roles_hands_over_to_itself():
    both = Engine("kv_both", extra=FAST)
    request = decoded([both, both], range(10), prefilled(both, range(10)))
    assert request.was_loaded
    until([both], lambda: not both.requests)
    both.end()


def check_unequal_facts_give_no_kv():
    prefill, decode = pair()
    decode.end()
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "model.safetensors").write_bytes(b"other weights")
        for number, other in enumerate(({"spec": FullAttentionSpec(head_size=2)},
                                        {"model": folder})):
            params = prefilled(prefill, range(10), f"p{number}")
            decode = Engine("kv_consumer", extra=FAST, policy="recompute", **other)
            request = decoded([prefill, decode], range(10), params)
            assert request.has_failed and not request.was_loaded, other
            decode.end()
    prefill.end()


def check_weights_are_known_by_samples_or_a_commit():
    hub = SimpleNamespace(model="no/folder", revision="main",
                          hf_config=SimpleNamespace(_commit_hash="c0ffee"))
    assert weights_of(hub) == "c0ffee"
    hub.hf_config._commit_hash = None
    assert weights_of(hub) == "main"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "model.safetensors")
        one = bytearray(random.Random(1).randbytes(1 << 20))
        found = []
        for place in (None, 0, 1 << 19, (1 << 20) - 256):
            changed = bytearray(one)
            if place is not None:
                # A tensor that another training has changed.
                changed[place:place + 256] = bytes(256)
            file.write_bytes(changed)
            found += [weights_of(SimpleNamespace(model=name)) for name in (folder, file)]
        assert len(set(found)) == 4 and found[0] == found[1], found


def check_kv_that_nobody_needs_is_freed_early():
    prefill, decode = pair()
    for number, more in enumerate(({"skips_cache": True}, None)):
        params = prefilled(prefill, range(10), f"p{number}")
        if more is None:
            decode.reject(Request("rejected", range(10), 1, params))
            decode.step()
        else:
            decoded([prefill, decode], range(10), params, **more)
        until([prefill], lambda: not prefill.requests, FAST["keep_seconds"] / 2)
    prefill.end()
    decode.end()


def check_kv_is_not_kept_for_ever():
    prefill = Engine("kv_producer", extra={**FAST, "keep_seconds": 0.2})
    prefilled(prefill, range(10))
    began = time.monotonic()
    until([prefill], lambda: not prefill.requests)
    assert 0.1 < time.monotonic() - began < 2
    prefill.end()


def main():
    logging.disable(logging.CRITICAL)
    failed = 0
    for name, check in [item for item in globals().items() if item[0].startswith("check_")]:
        try:
            check()
            print("ok  ", name)
        except AssertionError as error:
            failed += 1
            print("FAIL", name, error)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
