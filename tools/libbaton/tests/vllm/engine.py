"""A model of one vLLM engine around a real `BatonConnector`: scheduler, worker and memory.

It calls the connector as vLLM 0.32 does. As in vLLM, an id that is unknown or reported twice ends
the run. Each token writes a pattern of all tokens before it. Each step reads all KV of its
requests, so the first step that uses wrong KV finds it. Free blocks have a pattern of their own, so
a late write is found as well.
"""

import ctypes
import hashlib
import mmap
import pickle
import time
from collections import Counter, deque
from dataclasses import dataclass
from types import SimpleNamespace

import calls
import stub

stub.install()

from baton_kv import _vllm_worker  # noqa: E402
from baton_kv._vllm_scheduler import KVConnectorRole  # noqa: E402
from baton_kv.vllm import BatonConnector  # noqa: E402

# The memory of the model has its pages for itself. The model decides how long a step takes.
_vllm_worker.REMAP_BYTES = _vllm_worker.IDLE_MILLISECONDS = 0

BLOCK, LAYERS, TOKEN_BYTES = 4, 2, 8
BLOCK_BYTES = BLOCK * TOKEN_BYTES
# What has occurred, and the calls that were made, for all engines.
OCCURRED, CALLS = Counter(), set()
note = lambda name: OCCURRED.update([name])
FREE = b"\xee" * BLOCK_BYTES


@dataclass
class FullAttentionSpec:
    block_size: int = BLOCK
    num_kv_heads: int = 1
    head_size: int = 1
    page_size_bytes: int = BLOCK_BYTES


class Request:
    """What the connector sees of a request, and what the model knows of it."""

    def __init__(self, request_id, prompt, max_tokens, params, *, skips_cache=False,
                 prefers_local=False):
        self.request_id = request_id
        self.prompt_token_ids = list(prompt)
        self.kv_transfer_params = pickle.loads(pickle.dumps(params))
        self.prompt_embeds, self.mm_features = None, []
        self.tokens = list(prompt)
        self.max_tokens = max_tokens
        self.skips_cache, self.prefers_local = skips_cache, prefers_local
        self.num_computed_tokens = 0
        self.blocks = []
        self.is_delayed = self.was_loaded = self.has_failed = False
        self.answer = self.began = None
        self.set_status("WAITING")

    num_prompt_tokens = property(lambda self: len(self.prompt_token_ids))

    def set_status(self, name):
        self.status = SimpleNamespace(name=name)

    def has_status(self, name):
        return self.status.name == name

    @property
    def is_finished(self):
        return self.status.name.startswith("FINISHED")


class Blocks:
    """The block table of a request, and which of its blocks are in the prefix cache."""

    def __init__(self, table, hashed):
        self._table, self._hashed = list(table), hashed

    def get_block_ids(self):
        return (list(self._table),)

    def get_unhashed_block_ids_all_groups(self):
        return ([block for block in self._table if block not in self._hashed],)


class Memory:
    """The KV cache: the same bytes for the model and for the library."""

    def __init__(self, blocks):
        self.size = blocks * LAYERS * BLOCK_BYTES
        self.map = mmap.mmap(-1, self.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.layer_stride = blocks * BLOCK_BYTES
        self.device, self.dtype = SimpleNamespace(type="cpu"), "bytes"

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=lambda: self.address, nbytes=lambda: self.size)

    def at(self, layer, block, offset=0):
        return layer * self.layer_stride + block * BLOCK_BYTES + offset


class Pool:
    """Blocks with counts of their users, and the prefix cache. Block 0 is never given out."""

    def __init__(self, blocks, memory):
        self.memory = memory
        self.free = deque(range(1, blocks))
        self.users = [0] * blocks
        self.cached, self.hashes = {}, {}
        for block in self.free:
            self._clear(block)

    def _clear(self, block):
        for layer in range(LAYERS):
            at = self.memory.at(layer, block)
            self.memory.map[at:at + BLOCK_BYTES] = FREE

    def take(self):
        block = self.free.popleft()
        if block in self.hashes:
            del self.cached[self.hashes.pop(block)]
        else:
            for layer in range(LAYERS):
                at = self.memory.at(layer, block)
                assert self.memory.map[at:at + BLOCK_BYTES] == FREE, (
                    f"block {block} was written after its end")
        self.users[block] = 1
        return block

    def take_all_but(self, kept):
        """Other requests take all free blocks but these."""
        taken = [block for block in self.free if block not in kept]
        for block in taken:
            self.free.remove(block)
            self.free.appendleft(block)
            self.take()
        return taken

    def share(self, block):
        if self.users[block] == 0:
            self.free.remove(block)
        self.users[block] += 1

    def give_back(self, blocks):
        # The last block first: the start of a prompt stays longest in the cache.
        for block in reversed(blocks):
            self.users[block] -= 1
            assert self.users[block] >= 0
            if self.users[block] == 0:
                self.free.append(block)
                if block not in self.hashes:
                    self._clear(block)

    def cache(self, tokens, blocks):
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            key, block = tuple(tokens[:end]), blocks[end // BLOCK - 1]
            if key not in self.cached and block not in self.hashes:
                self.cached[key], self.hashes[block] = block, key

    def hits(self, tokens):
        """The cached blocks of a prompt, of which the last token is always computed."""
        found = []
        for end in range(BLOCK, len(tokens), BLOCK):
            block = self.cached.get(tuple(tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def forget(self):
        for block in [block for block in self.hashes if self.users[block] == 0]:
            del self.cached[self.hashes.pop(block)]
            self._clear(block)


def pattern(tokens, layer):
    """The KV of the last of these tokens."""
    return hashlib.sha256(repr((tokens, layer)).encode()).digest()[:TOKEN_BYTES]


def next_token(tokens):
    return hashlib.sha256(repr(tokens).encode()).digest()[0]


def configuration(role, blocks, extra, spec=FullAttentionSpec(), model="."):
    layers = [f"layer.{number}" for number in range(LAYERS)]
    attention = SimpleNamespace(
        isa="vec", get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "MODEL"))
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="BatonConnector", kv_connector_extra_config=extra,
            is_kv_producer=role != "kv_consumer", is_kv_consumer=role != "kv_producer"),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, pipeline_parallel_size=1, prefill_context_parallel_size=1,
            decode_context_parallel_size=1, tensor_parallel_size=1, rank=0),
        model_config=SimpleNamespace(
            enable_sleep_mode=False, max_model_len=blocks * BLOCK, dtype="bytes", model=model,
            model_weights="", revision=None, quantization=None, hf_config=None,
            hf_text_config=SimpleNamespace(to_dict=dict)),
        cache_config=SimpleNamespace(block_size=BLOCK), speculative_config=None, lora_config=None,
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(layers, attention)),
    ), SimpleNamespace(
        num_blocks=blocks, kv_cache_layout="LBHNC",
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)],
        kv_cache_tensors=[SimpleNamespace(
            layers=layers, offset=0, layer_stride=blocks * BLOCK_BYTES, block_stride=BLOCK_BYTES)])


class Engine:
    """An engine. `lag` is how many steps its scheduler is ahead of the results of its worker."""

    def __init__(self, role, *, blocks=24, chunk=8, policy="fail", lag=0, extra=None,
                 spec=FullAttentionSpec(), model="."):
        self.role, self.memory = role, Memory(blocks)
        self.pool = Pool(blocks, self.memory)
        self.chunk, self.policy, self.lag = chunk, policy, lag
        settings = configuration(role, blocks, extra or {}, spec, model)
        self.worker = BatonConnector(settings[0], KVConnectorRole.WORKER, settings[1])
        self.worker.register_kv_caches({"layer.0": self.memory, "layer.1": self.memory})
        self.connector = BatonConnector(settings[0], KVConnectorRole.SCHEDULER, settings[1])
        handshake = pickle.loads(pickle.dumps(self.worker.get_handshake_metadata()))
        self.connector.set_xfer_handshake_metadata({0: handshake})
        for one in (self.worker, self.connector):
            calls.watch(one, CALLS.add)
        self.requests, self.waiting, self.running = {}, [], []
        self.ready, self.failed_loads = set(), set()
        self.finished_ids, self.preempted, self.outputs = set(), set(), deque()
        self.seen = set()

    def end(self):
        self.worker.shutdown()

    # --- what clients do -----------------------------------------------------------------------

    def add(self, request):
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)

    def reject(self, request):
        """The API server refuses a request, and tells the engine only of its parameters."""
        request.prompt_token_ids = request.tokens = [0]
        self.connector.on_new_request(request)
        request.set_status("FINISHED_ABORTED")
        assert not self.connector.request_finished(request, [])[0]

    def abort(self, request):
        if not request.is_finished:
            note(f"{self.role} abort {request.status.name}")
            self._finish(request, "FINISHED_ABORTED")

    def preempt_all(self):
        for request in list(self.running):
            self._preempt(request)
        self.pool.forget()

    # --- a step --------------------------------------------------------------------------------

    def step(self):
        output = self._schedule()
        self.outputs.append((output, self._run(output)))
        while len(self.outputs) > self.lag:
            self._update(*self.outputs.popleft())

    def _schedule(self):
        new, scheduled, computed = [], {}, {}
        for request in list(self.running):
            if request in self.running:
                self._schedule_one(request, scheduled)
        if not self.preempted:
            # Those that hold blocks come first, because others can wait for these blocks.
            for request in sorted(self.waiting, key=lambda one: not one.blocks):
                if not self._admit(request, scheduled):
                    break
        for request_id in scheduled:
            request = self.requests[request_id]
            computed[request_id] = request.num_computed_tokens
            new.append(SimpleNamespace(req_id=request_id,
                                       num_computed_tokens=request.num_computed_tokens))
        first = [one for one in new if not self.requests[one.req_id].num_computed_tokens]
        rest = [one for one in new if one not in first]
        output = SimpleNamespace(
            scheduled_new_reqs=first, num_scheduled_tokens=scheduled,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.req_id for one in rest],
                num_computed_tokens=[one.num_computed_tokens for one in rest]),
            preempted_req_ids=self.preempted, finished_req_ids=self.finished_ids,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda one: (list(self.requests[one].blocks),)))
        self.preempted, self.finished_ids = set(), set()
        output.metadata = pickle.loads(pickle.dumps(self.connector.build_connector_meta(output)))
        # What the worker gets: it has no other way to know of requests.
        output.work = [(self.requests[one], list(self.requests[one].tokens),
                        list(self.requests[one].blocks), computed[one], count)
                       for one, count in scheduled.items()]
        for request, _, _, _, count in output.work:
            request.num_computed_tokens += count
            if request.num_computed_tokens == len(request.tokens):
                request.tokens.append(next_token(request.tokens))
        return output

    def _schedule_one(self, request, scheduled):
        count = min(self.chunk, len(request.tokens) - request.num_computed_tokens)
        while not self._grow(request, request.num_computed_tokens + count):
            victim = self.running[-1]
            scheduled.pop(victim.request_id, None)
            self._preempt(victim)
            if victim is request:
                return
        scheduled[request.request_id] = count

    def _grow(self, request, tokens):
        needed = -(-tokens // BLOCK) - len(request.blocks)
        if needed > len(self.pool.free):
            return False
        request.blocks += [self.pool.take() for _ in range(max(needed, 0))]
        return True

    def _admit(self, request, scheduled):
        """Schedules a request that waits. False if there is no room for it."""
        if request.has_status("WAITING_FOR_REMOTE_KVS"):
            if request.request_id not in self.ready:
                return True
            self._promote(request)
        is_async, external, hits = False, 0, []
        if request.num_computed_tokens == 0:
            hits = [] if request.skips_cache else self.pool.hits(request.tokens)
            external, is_async = self._ask(request, len(hits) * BLOCK)
            computed = len(hits) * BLOCK + external
            assert computed <= len(request.tokens)
        else:
            computed = request.num_computed_tokens
        count = 0 if is_async else min(self.chunk, len(request.tokens) - computed)
        for block in hits:
            self.pool.share(block)
        before = request.blocks
        request.blocks = before or hits
        if not self._grow(request, computed + count):
            self.pool.give_back(hits)
            request.blocks = before
            return False
        self.connector.update_state_after_alloc(
            request, Blocks(request.blocks, self.pool.hashes), external)
        request.num_computed_tokens = computed
        if is_async:
            request.set_status("WAITING_FOR_REMOTE_KVS")
            request.began = time.monotonic()
            return True
        self.waiting.remove(request)
        self.running.append(request)
        request.set_status("RUNNING")
        scheduled[request.request_id] = count
        return True

    def _ask(self, request, computed):
        answers = {self.connector.get_num_new_matched_tokens(request, computed) for _ in range(2)}
        assert len(answers) == 1, "asking has an effect"
        (external, is_async), = answers
        assert external is not None, "the connector always knows"
        if request.skips_cache or (request.prefers_local and computed):
            # vLLM does not use the answer of the connector.
            note("answer thrown away" if request.skips_cache else "local hit is enough")
            return 0, False
        assert not is_async or external > 0
        return external, is_async

    def _promote(self, request):
        self.ready.remove(request.request_id)
        if request.request_id in self.failed_loads:
            self.failed_loads.remove(request.request_id)
            self.pool.give_back(request.blocks)
            request.blocks, request.num_computed_tokens = [], 0
        else:
            request.was_loaded = True
            note("loaded")
            self.pool.cache(request.tokens[:request.num_computed_tokens], request.blocks)
            if request.num_computed_tokens == len(request.tokens):
                request.num_computed_tokens -= 1
        request.set_status("WAITING")

    def _preempt(self, request):
        if request.num_computed_tokens < request.num_prompt_tokens:
            note(f"{self.role} preemption in mid-prompt")
        self.running.remove(request)
        self.pool.give_back(request.blocks)
        request.blocks, request.num_computed_tokens = [], 0
        request.set_status("PREEMPTED")
        self.waiting.insert(0, request)
        self.preempted.add(request.request_id)

    # --- the worker ----------------------------------------------------------------------------

    def _run(self, output):
        self.worker.handle_preemptions(output.metadata)
        self.worker.bind_connector_metadata(output.metadata)
        for request, tokens, blocks, computed, count in output.work:
            self._read(request, tokens, blocks, computed)
            self._write(tokens, blocks, computed, count)
        for _, tokens, blocks, computed, count in output.work:
            self.pool.cache(tokens[:computed + count], blocks)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        self.worker.get_kv_connector_stats()
        self.worker.clear_connector_metadata()
        return results

    def _read(self, request, tokens, blocks, computed):
        """Attention reads the KV of all tokens so far."""
        for token in range(computed):
            for layer in range(LAYERS):
                at = self.memory.at(layer, blocks[token // BLOCK], token % BLOCK * TOKEN_BYTES)
                found = self.memory.map[at:at + TOKEN_BYTES]
                assert found == pattern(tokens[:token + 1], layer), (
                    f"{request.request_id} reads wrong KV of token {token}")

    def _write(self, tokens, blocks, computed, count):
        for token in range(computed, computed + count):
            for layer in range(LAYERS):
                at = self.memory.at(layer, blocks[token // BLOCK], token % BLOCK * TOKEN_BYTES)
                self.memory.map[at:at + TOKEN_BYTES] = pattern(tokens[:token + 1], layer)

    # --- results -------------------------------------------------------------------------------

    def _update(self, output, results):
        assert results.failed_recving <= results.finished_recving
        errors = []
        for request_id in results.failed_recving:
            request = self.requests.get(request_id)
            if request is not None and request.has_status("WAITING_FOR_REMOTE_KVS"):
                request.has_failed = True
                note(f"failed load, policy {self.policy}")
                if self.policy == "recompute":
                    request.num_computed_tokens = 0
                    self.failed_loads.add(request_id)
                else:
                    errors.append(request)
        for request, tokens, _, computed, count in output.work:
            is_sampled = computed + count == len(tokens)
            outputs = len(tokens) + is_sampled - request.num_prompt_tokens
            if not request.is_finished and outputs >= request.max_tokens:
                self._finish(request, "FINISHED_LENGTH_CAPPED")
        for request in errors:
            self._finish(request, "FINISHED_ERROR")
        self.connector.update_connector_output(results)
        for request_id in results.finished_recving:
            self._take_received(request_id)
        for request_id in results.finished_sending:
            request = self.requests.get(request_id)
            assert request is not None and request.is_delayed, f"{request_id} is sent, unasked"
            self._free(request)

    def _take_received(self, request_id):
        request = self.requests.get(request_id)
        assert request is not None, f"{request_id} is received, but unknown"
        assert ("received", request_id) not in self.seen, f"{request_id} is received twice"
        self.seen.add(("received", request_id))
        if request.has_status("WAITING_FOR_REMOTE_KVS"):
            self.ready.add(request_id)
        else:
            assert request.is_finished, f"{request_id} is received while it runs"
            self._free(request)

    def _finish(self, request, status):
        was_loading = (request.has_status("WAITING_FOR_REMOTE_KVS")
                       and request.request_id not in self.ready)
        self.ready.discard(request.request_id)
        self.failed_loads.discard(request.request_id)
        request.set_status(status)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        is_delayed, request.answer = self.connector.request_finished(request, list(request.blocks))
        self.finished_ids.add(request.request_id)
        request.is_delayed = is_delayed
        if not is_delayed and not was_loading:
            self._free(request)

    def _free(self, request):
        self.pool.give_back(request.blocks)
        request.blocks = []
        del self.requests[request.request_id]
