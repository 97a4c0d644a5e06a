"""vLLM's own `Scheduler` in both roles, around two real connectors and a model of the memory.

    real_scheduler.py MODEL ROUNDS [MISTAKE]

vLLM 0.33 has no build for CPUs, but its scheduler is plain Python: PYTHONPATH names its sources.
Each token writes a pattern of all tokens before it. Each step reads all KV of its requests, so the
first step that uses wrong KV finds it. The run ends with counts of what has occurred.
With a mistake in the connector it must not end well.
"""

import collections
import hashlib
import importlib.metadata
import logging
import random
import sys
import time
from types import SimpleNamespace

import torch

# The package of the sources is not installed. Without this, vLLM finds no platform.
_version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.0+cpu" if name == "vllm" else _version(name)

import vllm  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_request_block_hasher, init_none_hash)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

import calls  # noqa: E402
from baton_kv import _vllm_worker  # noqa: E402
from baton_kv._vllm_worker import WorkerSide  # noqa: E402
from baton_kv.vllm import BatonConnector  # noqa: E402

# The memory of the model has its pages for itself.
_vllm_worker.REMAP_BYTES = 0
# Few blocks, so that requests are preempted.
BLOCK, BLOCKS, LAYERS, CHUNK = 16, 30, 2, 48
COUNTS, CALLS = collections.Counter(), set()


def configuration(model, role, policy, is_async):
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", max_model_len=1024),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=CHUNK, max_model_len=1024,
            is_encoder_decoder=False, enable_chunked_prefill=True, async_scheduling=is_async),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="BatonConnector", kv_connector_module_path="baton_kv.vllm", kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"keep_seconds": 3, "load_seconds": 1, "slots": 64}))
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
    names, page = [f"layer.{number}" for number in range(LAYERS)], spec.page_size_bytes
    attention = SimpleNamespace(
        isa="vec", get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "MODEL"))
    config.compilation_config.static_forward_context.update(dict.fromkeys(names, attention))
    tensor = KVCacheTensor(size=LAYERS * BLOCKS * page, layers=names, layer_stride=BLOCKS * page,
                           block_stride=page)
    return config, KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_layout="LBHNC",
        kv_cache_groups=[KVCacheGroupSpec(names, spec)], hash_block_size=BLOCK)


def pattern(tokens, layer):
    """The KV of the last of these tokens: 8 floats."""
    return list(hashlib.sha256(repr((tokens, layer)).encode()).digest()[:8])


def next_token(tokens):
    return hashlib.sha256(repr(tokens).encode()).digest()[0]


class Runner:
    """What a worker knows of its requests, from nothing else than the outputs of the scheduler."""

    def __init__(self, config, caches):
        self.connector = BatonConnector(config, KVConnectorRole.WORKER, caches)
        page = caches.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        self.memory = torch.zeros(LAYERS * BLOCKS * page // 4)
        self.kv = self.memory.view(LAYERS, BLOCKS, BLOCK, 8)
        self.connector.register_kv_caches({f"layer.{number}": self.kv[number]
                                           for number in range(LAYERS)})
        self.tokens, self.blocks = {}, {}

    def run(self, output):
        metadata = output.kv_connector_metadata
        self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        for request_id in output.finished_req_ids:
            self.tokens.pop(request_id, None), self.blocks.pop(request_id, None)
        computed = self.take(output)
        sampled = {one: self.compute(one, computed[one], count)
                   for one, count in output.num_scheduled_tokens.items()}
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        COUNTS["loaded"] += len(results.finished_recving - results.failed_recving)
        COUNTS["failed loads"] += len(results.failed_recving)
        stats = self.connector.get_kv_connector_stats()
        self.connector.clear_connector_metadata()
        ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={one: at for at, one in enumerate(ids)},
            sampled_token_ids=[sampled[one] for one in ids], logprobs=None,
            prompt_logprobs_dict={}, pooler_output=None,
            kv_connector_output=KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving, kv_connector_stats=stats))

    def take(self, output):
        computed = {}
        for new in output.scheduled_new_reqs:
            known = self.tokens.get(new.req_id, [])
            self.tokens[new.req_id] = known or list(new.prompt_token_ids)
            self.blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, blocks, count in zip(cached.req_ids, cached.new_block_ids,
                                             cached.num_computed_tokens):
            fresh = list(blocks[0]) if blocks else []
            if request_id in cached.resumed_req_ids:
                COUNTS["resumed"] += 1
                self.blocks[request_id] = fresh
            else:
                self.blocks[request_id] += fresh
            computed[request_id] = count
        return computed

    def compute(self, request_id, computed, count):
        tokens, blocks = self.tokens[request_id], self.blocks[request_id]
        for token in range(computed + count):
            for layer in range(LAYERS):
                at, right = self.kv[layer, blocks[token // BLOCK], token % BLOCK], pattern(
                    tokens[:token + 1], layer)
                if token < computed:
                    assert at.tolist() == right, f"{request_id} reads wrong KV of token {token}"
                else:
                    at.copy_(torch.tensor(right))
        if computed + count < len(tokens):
            return []
        tokens.append(next_token(tokens))
        return [tokens[-1]]


class Engine:
    """A scheduler and its runner. With `is_async`, the scheduler is a step ahead."""

    def __init__(self, model, role, policy, is_async):
        config, caches = configuration(model, role, policy, is_async)
        self.runner, self.is_async = Runner(config, caches), is_async
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            config, caches, StructuredOutputManager(config), block_size=BLOCK,
            hash_block_size=BLOCK, log_stats=True)
        handshake = self.runner.connector.get_handshake_metadata()
        self.scheduler.connector.set_xfer_handshake_metadata({0: handshake})
        calls.watch(self.scheduler.connector, CALLS.add)
        self.pending = collections.deque()
        self.answers, self.said = {}, collections.defaultdict(list)

    def add(self, request_id, tokens, params, max_tokens):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True,
                                  extra_args={"kv_transfer_params": params} if params else None)
        sampling.update_from_generation_config({}, 256)
        self.scheduler.add_request(Request(
            request_id, list(tokens), sampling, None,
            block_hasher=get_request_block_hasher(BLOCK, sha256)))

    def abort(self, request_id):
        if request_id in self.scheduler.requests:
            status = self.scheduler.requests[request_id].status
            if not RequestStatus.is_finished(status):
                COUNTS[f"{request_id[0]} aborted while {status.name}"] += 1
                self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self):
        if self.scheduler.has_requests():
            self.pending.append(self.scheduler.schedule())
        while len(self.pending) > self.is_async or (
                self.pending and not self.scheduler.has_requests()):
            output = self.pending.popleft()
            done = self.scheduler.update_from_output(output, self.runner.run(output))
            for one in [one for outputs in done.values() for one in outputs.outputs]:
                self.said[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.answers[one.request_id] = (
                        str(one.finish_reason), one.kv_transfer_params)

    def usage(self):
        return self.scheduler.kv_cache_manager.usage


class Pair:
    """A prefill and a decode with many requests, and the rules by which they end."""

    def __init__(self, model, policy, is_async, chance):
        self.prefill = Engine(model, "kv_producer", "fail", is_async)
        self.decode = Engine(model, "kv_consumer", policy, is_async)
        self.chance, self.policy, self.open, self.number = chance, policy, {}, 0

    def begin(self):
        chance, self.number = self.chance, self.number + 1
        start = [chance.randrange(2)] * chance.choice([0, 8, 40, 120])
        tokens = start + [chance.randrange(250) for _ in range(chance.randrange(1, 200))]
        self.prefill.add(f"p{self.number}", tokens, {"do_remote_decode": True}, 1)
        self.open[self.number] = tokens

    def step(self):
        chance = self.chance
        if len(self.open) < 8 and chance.random() < 0.3:
            self.begin()
        if chance.random() < 0.05 and self.open:
            # Few requests are between two chunks of their prompt.
            running = [int(one.request_id[1:]) for one in self.prefill.scheduler.running]
            among = running if running and chance.random() < 0.3 else list(self.open)
            number = chance.choice(among)
            self.prefill.abort(f"p{number}"), self.decode.abort(f"d{number}")
        for engine in (self.prefill, self.decode):
            engine.step()
        for number in list(self.open):
            self.follow(number)

    def follow(self, number):
        ended = self.prefill.answers.pop(f"p{number}", None)
        tokens = self.open[number]
        if ended is not None and ended[1] is None:
            del self.open[number]
        elif ended is not None:
            params, kind = dict(ended[1]), self.chance.random()
            if kind < 0.1:
                params["bootstrap_room"] = self.chance.getrandbits(62)
                COUNTS["unknown room"] += 1
            if kind > 0.95:
                COUNTS["never asked"] += 1
                del self.open[number]
                return
            self.decode.add(f"d{number}", tokens, params, self.chance.randrange(1, 40))
        elif f"p{number}" not in self.prefill.scheduler.requests and (
                f"d{number}" not in self.decode.scheduler.requests):
            self.check(number, tokens)

    def check(self, number, tokens):
        """A request that has ended well says what the tokens before it decide."""
        reason, _ = self.decode.answers.pop(f"d{number}", ("aborted", None))
        COUNTS[f"decode: {reason}"] += 1
        for token in self.decode.said.pop(f"d{number}", []):
            assert token == next_token(tokens), f"d{number} says something wrong"
            tokens.append(token)
        del self.open[number]

    def drain(self):
        until = time.monotonic() + 20
        while any(engine.scheduler.has_requests() or engine.pending
                  for engine in (self.prefill, self.decode)):
            assert time.monotonic() < until, [
                list(engine.scheduler.requests) for engine in (self.prefill, self.decode)]
            self.prefill.step(), self.decode.step()
            for number in list(self.open):
                self.follow(number)
            time.sleep(0.0005)
        for engine in (self.prefill, self.decode):
            assert engine.usage() == 0, engine.usage()
            worker, scheduler = engine.runner.connector, engine.scheduler.connector
            assert not (worker._offers or worker._kept or scheduler._rooms or scheduler._fetches)
            worker.shutdown()


def reported_twice(worker, results):
    worker._ended |= results.finished_recving


def freed_early(worker, results):
    results.finished_recving |= {one.request_id for one in worker._open.values()
                                 if one.kind == "load"}


def failures_unsaid(worker, results):
    results.failed_recving.clear()


def never_reported(worker, results):
    results.finished_recving.clear(), results.failed_recving.clear()


MISTAKES = [reported_twice, freed_early, failures_unsaid, never_reported]


def plant(name):
    right = WorkerSide.get_transfer_results
    mistake, = [one for one in MISTAKES if one.__name__ == name]

    def wrong(worker, finished_req_ids):
        results = right(worker, finished_req_ids)
        mistake(worker, results)
        return results

    WorkerSide.get_transfer_results = wrong


def main():
    logging.disable(logging.ERROR)
    init_none_hash(sha256)
    model, rounds = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) > 3:
        plant(sys.argv[3])
    for is_async in (False, True):
        for policy in ("recompute", "fail"):
            pair = Pair(model, policy, is_async, random.Random(f"{policy} {is_async}"))
            for _ in range(rounds):
                pair.step()
            pair.drain()
    print(f"vLLM {vllm.__version__} in {vllm.__path__[0]}")
    for name, count in sorted(COUNTS.items()):
        print(f"{count:7} {name}")
    for line in sorted(CALLS):
        print("call", line)


if __name__ == "__main__":
    main()
