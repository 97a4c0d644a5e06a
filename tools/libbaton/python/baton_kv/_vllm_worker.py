"""The worker side of `BatonConnector`: agents over the memory of vLLM's KV cache.

Owns: the region, the agents, open transfers, their counters. vLLM packs the keys inside a block,
so whole blocks are handed over: to the library, a block is a page of one token.
"""

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm
from baton_kv import Agent, BatonError, Element, Event, EventKind, Layout, LogLevel, Region, Role
from baton_kv import log_to
from vllm.logger import init_logger

from ._vllm_scheduler import BatonMetadata, Load, Save, Settings, new_counts

logger = init_logger("vllm.baton_kv.worker")

# A smaller cache can lie among other objects of the heap, which must not move.
REMAP_BYTES = 64 << 20
PREEMPTION_SECONDS = 10.0
_DROP_SECONDS = 0.05
_POLL_SECONDS = 0.02
# An offer begins before its prompt is computed, and that can take long.
_COMPUTE_SECONDS = 3600.0
# What differs from host to host, not from model to model.
_LOCAL_NAMES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(eq=False)
class _Transfer:
    """An offer, a load, or a drop: a request that only frees the KV at the source."""

    kind: str
    request_id: str
    role: Role
    handle: int
    blocks: int = 0
    valid: int = 0
    began: float = field(default_factory=time.monotonic)
    is_open: bool = True
    is_cancelled: bool = False
    has_landed: bool = False
    cause: str = "ended"


def layout_of(kv_cache_config: Any) -> Layout:
    """Whole blocks as the library sees them: one head of two halves."""
    tensor = kv_cache_config.kv_cache_tensors[0]
    block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    if block % 4:
        raise ValueError(f"a block of {block} bytes is no multiple of 4")
    return Layout(
        pages=kv_cache_config.num_blocks, page_size=1, layers=len(tensor.layers), kv_heads=1,
        head_dim=block // 4, element=Element.F16, page_stride=tensor.block_stride,
        layer_stride=tensor.layer_stride, kv_stride=block // 2, head_stride=block,
        token_stride=block)


def facts_of(vllm_config: Any, kv_cache_config: Any, dtype: str) -> str:
    """All that decides what the bytes of a block mean. It must be equal at both ends."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    layers = kv_cache_config.kv_cache_tensors[0].layers
    layer = vllm_config.compilation_config.static_forward_context[layers[0]]
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    names = ("block_size", "num_kv_heads", "head_size", "head_size_v", "page_size_bytes",
             "kv_quant_mode", "sliding_window", "num_head_slots")
    return json.dumps({
        "vllm": getattr(vllm, "__version__", ""), "isa": getattr(layer, "isa", None),
        "backend": layer.get_attn_backend().get_name(), "dtype": dtype,
        "layout": kv_cache_config.kv_cache_layout, "layers": layers,
        "spec": [type(spec).__name__, *(str(getattr(spec, name, None)) for name in names)],
        "tp_size": parallel.tensor_parallel_size, "tp_rank": parallel.rank,
        "model": {name: value for name, value in model.hf_text_config.to_dict().items()
                  if name not in _LOCAL_NAMES},
        "model_dtype": str(model.dtype), "quantization": str(model.quantization),
        "lora": vllm_config.lora_config is not None}, sort_keys=True, default=str)


def _first_open(transfers: list[_Transfer]) -> _Transfer | None:
    return next((one for one in transfers if one.is_open), None)


def _log(level: LogLevel, line: str) -> None:
    write = {LogLevel.ERROR: logger.error, LogLevel.WARN: logger.warning,
             LogLevel.INFO: logger.info}.get(level, logger.debug)
    write("%s", line.strip())


class Worker:
    """Hands over and loads blocks. All calls come on one thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._settings = settings
        self._region: Region | None = None
        self._agents: dict[Role, Agent] = {}
        self._open: dict[tuple[Role, int], _Transfer] = {}
        # The last offer of each request, until vLLM frees its blocks.
        self._offers: dict[str, _Transfer] = {}
        self._kept: dict[str, float] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._counts = new_counts()

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Makes the agents over the one storage of all KV caches."""
        role, config = self._vllm_config.kv_transfer_config, self._kv_cache_config
        storages = {cache.untyped_storage().data_ptr(): cache for cache in kv_caches.values()}
        (address, cache), *others = storages.items()
        if others or cache.device.type != "cpu":
            raise ValueError(f"BatonConnector does not support {len(storages)} KV storages of "
                             f"{cache.device.type}, but one of cpu")
        offset = config.kv_cache_tensors[0].offset
        size = cache.untyped_storage().nbytes() - offset
        transports = self._settings.transports
        if role.is_kv_producer and "shm" in transports and size < REMAP_BYTES:
            logger.warning("A KV cache of %d bytes is too small to be shared: no shm", size)
            transports = tuple(name for name in transports if name != "shm")
        log_to(_log, LogLevel.INFO)
        self._region = Region.adopt(address + offset, size,
                                    remap=role.is_kv_producer and "shm" in transports)
        facts = facts_of(self._vllm_config, config, str(cache.dtype))
        logger.info("Both ends must have equal facts: %s", facts)
        given, max_tokens = self._settings, self._vllm_config.model_config.max_model_len
        key = Path(given.key_file).read_bytes() if given.key_file else b""
        for one, is_used in ((Role.SOURCE, role.is_kv_producer),
                             (Role.DESTINATION, role.is_kv_consumer)):
            if is_used:
                self._agents[one] = Agent(
                    one, self._region, layout_of(config), hashlib.sha256(facts.encode()).digest(),
                    host=given.host, allow=given.allow, transports=transports, key=key,
                    devices=given.devices, cpus=given.cpus, slots=given.slots, lanes=given.lanes,
                    prompt_pages=-(-max_tokens // self._vllm_config.cache_config.block_size))

    @property
    def address(self) -> str:
        """Where destinations find this rank."""
        return self._agents[Role.SOURCE].address if Role.SOURCE in self._agents else ""

    def shutdown(self) -> None:
        """Frees all. It can be called twice."""
        parts = [*self._agents.values(), *([self._region] if self._region else [])]
        self._agents, self._region = {}, None
        for part in parts:
            try:
                part.free()
            except BatonError as error:
                logger.warning("The end of the connector: %s", error)

    # --- a step --------------------------------------------------------------------------------

    def begin_step(self, metadata: BatonMetadata) -> None:
        """Ends offers if this step gives their blocks to other requests."""
        for request_id, is_given_up in metadata.kept.items():
            self._kept[request_id] = time.monotonic() + self._settings.keep_seconds
            if is_given_up:
                self._cancel(self._offers.get(request_id))
        ending = [self._offers.pop(one) for one in metadata.preempted if one in self._offers]
        for offer in ending:
            self._cancel(offer)
        self._wait_for(ending, PREEMPTION_SECONDS)
        if any(offer.is_open for offer in ending):
            # The blocks are overwritten next, and a peer could still use them.
            raise RuntimeError(f"offers of preempted requests do not end: {metadata.preempted}")

    def start_loads(self, metadata: BatonMetadata) -> None:
        """Starts the loads of this step, and ends those that are not needed."""
        for load in metadata.loads:
            self._start(load, "load")
        for one in list(self._open.values()):
            if one.kind == "load" and one.request_id in metadata.abandoned:
                self._cancel(one)
        drops = [self._start(load, "drop") for load in metadata.drops]
        # A step can be the last one for long, so a drop is not left to the next.
        self._wait_for([one for one in drops if one], _DROP_SECONDS)

    def save(self, metadata: BatonMetadata) -> None:
        """Hands over what this step has computed."""
        for save in metadata.saves:
            try:
                self._save(save)
            except BatonError as error:
                logger.warning("%s is not handed over: %s", save.request_id, error)
                self._cancel(self._offers.get(save.request_id))

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Ids of requests by what has ended: offers, loads, and loads that failed."""
        self._take_events()
        sent: set[str] = set()
        for request_id, until in list(self._kept.items()):
            offer = self._offers.get(request_id)
            if offer is None or not offer.is_open:
                sent.add(request_id)
                self._offers.pop(request_id, None)
                del self._kept[request_id]
            elif time.monotonic() > until and not offer.is_cancelled:
                logger.warning("No decode engine has loaded the KV of %s", request_id)
                self._cancel(offer)
        received, failed = self._received, self._failed
        self._received, self._failed = set(), set()
        return sent, received, failed

    def take_counts(self) -> dict[str, Any]:
        """What has happened since the last call, and how much is open."""
        counts, self._counts = self._counts, new_counts()
        return {**counts, "open": len(self._open)}

    # --- transfers -----------------------------------------------------------------------------

    def _save(self, save: Save) -> None:
        agent = self._agents[Role.SOURCE]
        if save.digests is not None:
            handle = agent.offer(save.room, save.digests,
                                 _COMPUTE_SECONDS + self._settings.keep_seconds)
            self._offers[save.request_id] = self._open[Role.SOURCE, handle] = _Transfer(
                "offer", save.request_id, Role.SOURCE, handle)
        offer = self._offers.get(save.request_id)
        if offer is None or not offer.is_open or offer.is_cancelled:
            return
        if len(save.blocks) > offer.blocks:
            agent.lease(offer.handle, save.blocks[offer.blocks:])
            offer.blocks = len(save.blocks)
        if save.valid > offer.valid:
            agent.compute(offer.handle, save.valid)
            offer.valid = save.valid
        if save.is_complete:
            agent.send_last(offer.handle)

    def _start(self, load: Load, kind: str) -> _Transfer | None:
        """Starts a load or a drop. A load that cannot start ends in this step, as failed."""
        one, agent = None, self._agents[Role.DESTINATION]
        source = load.sources[self._vllm_config.parallel_config.rank]
        try:
            if kind == "load" and not load.blocks:
                raise ValueError("vLLM has cut the load")
            handle = agent.wish(load.room, source, load.digests, self._settings.load_seconds)
            one = self._open[Role.DESTINATION, handle] = _Transfer(
                kind, load.request_id, Role.DESTINATION, handle, len(load.blocks) - load.prefix)
            if kind == "load":
                agent.lease(handle, load.blocks, load.prefix)
        except (BatonError, ValueError) as error:
            logger.warning("The KV of %s cannot be loaded: %s", load.request_id, error)
            if one is not None:
                self._cancel(one)
            elif kind == "load":
                self._end_load(load.request_id, "not_started")
        return one

    def _cancel(self, one: _Transfer | None) -> None:
        if one is None or not one.is_open or one.is_cancelled:
            return
        one.is_cancelled = True
        try:
            self._agents[one.role].cancel(one.handle)
        except BatonError as error:
            # It has an outcome of its own. Its events still come.
            logger.debug("Nothing to cancel: %s", error)

    def _wait_for(self, transfers: list[_Transfer], seconds: float) -> None:
        until = time.monotonic() + seconds
        while (one := _first_open(transfers)) and time.monotonic() < until:
            self._agents[one.role].wait(_POLL_SECONDS)
            self._take_events()

    def _take_events(self) -> None:
        for role, agent in self._agents.items():
            for event in agent.poll():
                one = self._open.get((role, event.request))
                if one is not None:
                    self._take(one, event)

    def _take(self, one: _Transfer, event: Event) -> None:
        if event.kind is EventKind.MET and one.kind == "drop":
            self._cancel(one)
        elif event.kind is EventKind.LANDED:
            one.has_landed = True
        elif event.kind is EventKind.FAILED:
            one.cause = event.cause or one.cause
        elif event.kind is EventKind.ENDED:
            del self._open[one.role, one.handle]
            one.is_open = False
            self._agents[one.role].release(one.handle)
            self._take_end(one)

    def _take_end(self, one: _Transfer) -> None:
        if not one.has_landed and one.kind != "drop":
            logger.warning("The %s of %s has failed: %s", one.kind, one.request_id, one.cause)
        if one.kind == "offer":
            self._counts["handed_over"] += one.has_landed
        elif one.kind == "load":
            if one.has_landed:
                layout = layout_of(self._kv_cache_config)
                self._counts["seconds"].append(time.monotonic() - one.began)
                self._counts["bytes"] += one.blocks * layout.token_stride * layout.layers
            self._end_load(one.request_id, None if one.has_landed else one.cause)

    def _end_load(self, request_id: str, cause: str | None) -> None:
        self._received.add(request_id)
        if cause is not None:
            self._failed.add(request_id)
            self._counts["failures"][cause] = self._counts["failures"].get(cause, 0) + 1
