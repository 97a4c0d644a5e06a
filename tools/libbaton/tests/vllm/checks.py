"""The start of the connector, its counters, and hand-overs in a fixed order."""

import json
import logging
import pathlib
import random
import sys
import tempfile
import time
from types import SimpleNamespace
from unittest import mock

from engine import Engine, FullAttentionSpec, Memory, Request, configuration

from baton_kv import Agent, BatonError, ErrorCode, _vllm_worker
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


def pair(policy="fail", extra=FAST, **more):
    return (Engine("kv_producer", extra=extra, **more),
            Engine("kv_consumer", extra=extra, policy=policy, **more))


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
        "LoRA": lambda one, _: setattr(one, "lora_config", "some"),
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


def check_memory_that_cannot_be_handed_over_is_refused():
    def refuse(kinds, **more):
        vllm_config, kv_cache_config = configuration("kv_producer", 8, more)
        worker = BatonConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        caches = {f"layer.{number}": Memory(8) for number, _ in enumerate(kinds)}
        for cache, kind in zip(caches.values(), kinds):
            cache.device.type = kind
        return refusal(worker.register_kv_caches, caches)

    assert "1 KV storages of cuda" in refuse(["cuda"])
    assert "2 KV storages" in refuse(["cpu", "cpu"])
    with mock.patch.object(_vllm_worker, "REMAP_BYTES", 1 << 20):
        assert "transports needs another than shm" in refuse(["cpu"], transports="shm")


def check_settings():
    assert Settings.of({"transports": "tcp, rdma", "cpus": "1,2", "host": None}) == Settings(
        transports=("tcp", "rdma"), cpus=(1, 2))
    assert Settings.of({"allow": ["10.0.0.0/8"]}).allow == ("10.0.0.0/8",)
    assert "keep_secnds, x" in refusal(Settings.of, {"x": 1, "keep_secnds": 2, "slots": 3})
    assert Settings.of({"keep_seconds": "5", "slots": "7"}) == Settings(keep_seconds=5.0, slots=7)
    for name, value, why in [
            ("load_seconds", 0, "0: it is not 0.001 to 1800"),
            ("keep_seconds", float("nan"), "nan: it is not 0.001 to 1800"),
            ("keep_seconds", "long", "'long': could not convert string to float: 'long'"),
            ("slots", "0", "'0': it is no whole number from 1 on"),
            ("slots", 1.7, "1.7: it is no whole number from 1 on"),
            ("lanes", True, "True: it is no whole number from 1 on"),
            ("sessions", [1], "[1]: it is no whole number from 1 on"),
            ("cpus", "0-1", "'0-1': it is no whole number from 0 on"),
            ("transports", 5, "5: it is no list")]:
        words = f"kv_connector_extra_config: {name} is {why}"
        assert refusal(Settings.of, {name: value}) == words, (words, name)


def check_digests_depend_on_all_before():
    digests = lambda ids, *features: digests_of(SimpleNamespace(
        prompt_token_ids=ids, mm_features=features), 4)
    right = digests(list(range(10)))
    assert len(right) == 3 and len(set(right)) == 3
    assert digests(list(range(8))) == right[:2]
    changed = digests([0, 1, 2, 3, 9, *range(5, 10)])
    assert changed[0] == right[0] and changed[1] != right[1] and changed[2] != right[2]
    image = SimpleNamespace(identifier="x", mm_position=SimpleNamespace(offset=0, length=2))
    assert digests(list(range(10)), image)[0] != right[0]


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
        pathlib.Path(folder, "model.bin").write_bytes(b"other weights")
        for number, other in enumerate(({"spec": FullAttentionSpec(head_size=2)},
                                        {"model": folder})):
            params = prefilled(prefill, range(10), f"p{number}")
            decode = Engine("kv_consumer", extra=FAST, policy="recompute", **other)
            request = decoded([prefill, decode], range(10), params)
            assert request.has_failed and not request.was_loaded, other
            decode.end()
    prefill.end()


def check_weights_are_known_by_a_name_and_a_commit():
    hub = SimpleNamespace(model="no/folder", model_weights="", revision="main",
                          hf_config=SimpleNamespace(_commit_hash="c0ffee"))
    assert weights_of(hub) == "no/folder c0ffee"
    hub.hf_config._commit_hash = None
    assert weights_of(hub) == "no/folder main"
    with tempfile.TemporaryDirectory() as folder:
        # vLLM fetches everything but weights from object storage.
        hub.model, hub.model_weights = folder, "s3://a/model"
        assert weights_of(hub) == "s3://a/model main"


def check_weights_are_known_by_samples():
    """One small tensor among large ones that another training has changed."""
    sizes = {"large": 4 << 20, "small": 256, "last": 4 << 20}
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for changed in (None, *sizes):
            header, data = {"__metadata__": {"format": "pt"}}, b""
            for name, size in sizes.items():
                header[name] = {"dtype": "F32", "shape": [size // 4],
                                "data_offsets": [len(data), len(data) + size]}
                data += random.Random(name + (changed or "") * (name == changed)).randbytes(size)
            text = json.dumps(header).encode()
            file = pathlib.Path(folder, "model.safetensors")
            file.write_bytes(len(text).to_bytes(8, "little") + text + data)
            found += [weights_of(SimpleNamespace(model=name)) for name in (folder, file)]
        assert len(set(found)) == 4 and found[0] == found[1], found


def check_prompts_of_embeddings_are_not_handed_over():
    prefill = Engine("kv_producer", extra=FAST)
    request = Request("p", range(10), 1, {"do_remote_decode": True})
    request.prompt_embeds = "one row for each token"
    prefill.add(request)
    until([prefill], lambda: request.is_finished)
    assert request.answer is None
    prefill.end()


def check_a_prompt_without_a_slot_is_not_handed_over():
    prefill = Engine("kv_producer", extra={**FAST, "slots": 2})
    answers = [prefilled(prefill, range(10), f"p{number}") for number in range(3)]
    assert answers[1] and answers[2] is None
    until([prefill], lambda: not prefill.requests)
    assert prefilled(prefill, range(10), "p3")
    prefill.end()


def check_an_engine_without_its_agent_ends():
    for role in ("kv_producer", "kv_consumer"):
        params = prefilled(other := Engine("kv_producer", extra=FAST), range(10))
        engine = Engine(role, extra=FAST)
        with mock.patch.object(Agent, "offer" if role == "kv_producer" else "wish",
                               side_effect=BatonError(ErrorCode.DEAD, "the agent has ended")):
            engine.add(Request("x", range(10), 1, {"do_remote_decode": True}
                               if role == "kv_producer" else params))
            try:
                engine.step()
            except BatonError as error:
                assert error.code is ErrorCode.DEAD
            else:
                raise AssertionError(f"{role} goes on")
        engine.end()
        other.end()


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
    assert time.monotonic() - began > 0.1
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
