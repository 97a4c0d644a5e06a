"""The worker side of `BatonConnector`: agents over the memory of vLLM's KV cache.

Owns: the region, the agents, open transfers, their counters. vLLM packs the keys inside a block,
so whole blocks are handed over: to the library, a block is a page of one token.
"""

import hashlib
import select
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton_kv import (
    Agent, BatonError, Element, ErrorCode, Event, EventKind, Layout, LogLevel, Region, Role, log_to)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorHandshakeMetadata, KVConnectorRole, KVConnectorTransferResults)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.logger import init_logger

from ._vllm_facts import facts_of
from ._vllm_scheduler import SECONDS_MAX, Load, Save, Settings

logger = init_logger("vllm.baton_kv.worker")

# A smaller cache can lie among other objects of the heap, which must not move.
REMAP_BYTES = 64 << 20
PREEMPTION_SECONDS = 10.0
_DROP_SECONDS = 0.05
_POLL_SECONDS = 0.02
# A request that arrives meanwhile is that late.
IDLE_MILLISECONDS = 10


@dataclass
class BatonHandshake(KVConnectorHandshakeMetadata):
    """Where destinations find a rank."""

    address: str


class BatonStats(KVConnectorStats):
    """Seconds of each load, and counts by the name of a metric, with a cause after a space."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counts = Counter(self.data["counts"])
        counts.update(other.data["counts"])
        self.data = {"seconds": self.data["seconds"] + other.data["seconds"],
                     "counts": dict(counts)}
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds = self.data["seconds"]
        return {"loads": len(seconds), **self.data["counts"],
                "milliseconds a load": round(1e3 * sum(seconds) / max(len(seconds), 1), 3)}

    def is_empty(self) -> bool:
        return not any(self.data.values())


@dataclass(eq=False)
class _Transfer:
    """An offer, a load, or a drop: a request that only frees the KV at the source."""

    kind: str
    request_id: str
    role: Role
    handle: int
    blocks: int = 0
    began: float = field(default_factory=time.monotonic)
    is_open: bool = True
    is_cancelled: bool = False
    cause: str | None = "internal"
    """Why it has failed. None if it has not."""


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


def _raise_if_dead(error: BatonError) -> None:
    """Without its agent, an engine would fail each request and look healthy."""
    if error.code is ErrorCode.DEAD:
        raise error


def _log(level: LogLevel, line: str) -> None:
    write = {LogLevel.ERROR: logger.error, LogLevel.WARN: logger.warning,
             LogLevel.INFO: logger.info}.get(level, logger.debug)
    write("%s", line.strip())


class WorkerSide(KVConnectorBase_V1):
    """Hands over and loads blocks. All calls come on one thread."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._region: Region | None = None
        self._agents: dict[Role, Agent] = {}
        self._events = select.poll()
        self._open: dict[tuple[Role, int], _Transfer] = {}
        # The last offer of each request, until vLLM frees its blocks.
        self._offers: dict[str, _Transfer] = {}
        self._kept: dict[str, float] = {}
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._seconds: list[float] = []
        self._counts = Counter[str]()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Makes the agents over the one storage of all KV caches."""
        role, config = self._kv_transfer_config, self._kv_cache_config
        storages = {cache.untyped_storage().data_ptr(): cache for cache in kv_caches.values()}
        (address, cache), *others = storages.items()
        if others or cache.device.type != "cpu":
            raise ValueError(f"BatonConnector does not support {len(storages)} KV storages of "
                             f"{cache.device.type}, but one of cpu")
        offset = config.kv_cache_tensors[0].offset
        size = cache.untyped_storage().nbytes() - offset
        given, transports = self._settings, self._settings.transports
        if role.is_kv_producer and "shm" in transports and size < REMAP_BYTES:
            logger.warning("A KV cache of %d bytes is too small to be shared: no shm", size)
            transports = tuple(name for name in transports if name != "shm")
            if not transports:
                raise ValueError("kv_connector_extra_config: transports needs another than shm")
        log_to(_log, LogLevel.INFO)
        self._region = Region.adopt(address + offset, size,
                                    remap=role.is_kv_producer and "shm" in transports)
        facts = facts_of(self._vllm_config, config, str(cache.dtype))
        logger.info("Both ends must have equal facts: %s", facts)
        longest = -(-self._vllm_config.model_config.max_model_len
                    // self._vllm_config.cache_config.block_size)
        key = Path(given.key_file).read_bytes() if given.key_file else b""
        for one, is_used in ((Role.SOURCE, role.is_kv_producer),
                             (Role.DESTINATION, role.is_kv_consumer)):
            if is_used:
                self._agents[one] = Agent(
                    one, self._region, layout_of(config), hashlib.sha256(facts.encode()).digest(),
                    host=given.host, allow=given.allow, transports=transports, key=key,
                    devices=given.devices, cpus=given.cpus, slots=given.slots, lanes=given.lanes,
                    sessions=given.sessions, prompt_pages=min(longest, config.num_blocks))
                self._events.register(self._agents[one].event_fd(), select.POLLIN)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Where destinations find this rank."""
        agent = self._agents.get(Role.SOURCE)
        return BatonHandshake(agent.address if agent else "")

    def shutdown(self) -> None:
        """Frees all. It can be called twice."""
        parts: list[Agent | Region] = [*self._agents.values()]
        parts += [self._region] if self._region else []
        # The numbers of the agents' descriptors become those of other files.
        self._agents, self._region, self._events = {}, None, select.poll()
        for part in parts:
            try:
                part.free()
            except BatonError as error:
                logger.warning("The end of the connector: %s", error)

    # --- a step --------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Ends offers if this step gives their blocks to other requests."""
        for request_id, is_given_up in kv_connector_metadata.kept.items():
            self._kept[request_id] = time.monotonic() + self._settings.keep_seconds
            if is_given_up:
                self._cancel(self._offers.get(request_id))
        if kv_connector_metadata.preempted:
            self._end_offers(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts the loads of this step, and ends those that are not needed."""
        metadata: Any = self._get_connector_metadata()
        for load in metadata.loads:
            self._start(load, "load")
        if metadata.abandoned:
            for one in list(self._open.values()):
                if one.kind == "load" and one.request_id in metadata.abandoned:
                    self._cancel(one)
        if metadata.drops:
            is_alone = not any(one.kind == "drop" for one in self._open.values())
            drops = [self._start(load, "drop") for load in metadata.drops]
            # A step can be the last one for long, so a drop is not left to the next. A source that
            # does not answer costs one such wait.
            self._wait_for([one for one in drops if one and is_alone], _DROP_SECONDS)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Steps are handed over as a whole."""

    def wait_for_save(self) -> None:
        """Hands over what this step has computed."""
        metadata: Any = self._get_connector_metadata()
        for save in metadata.saves:
            try:
                self._hand_over(save)
            except BatonError as error:
                _raise_if_dead(error)
                logger.warning("%s is not handed over: %s", save.request_id, error)
                self._cancel(self._offers.get(save.request_id))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Ids of requests by what has ended: offers, loads, and loads that failed."""
        metadata: Any = self._get_connector_metadata()
        if metadata.is_idle and self._open:
            # vLLM steps without a pause while transfers are open, and that would slow them.
            self._events.poll(IDLE_MILLISECONDS)
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
        ended, self._ended = self._ended, set()
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(sent, ended, failed)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What has happened since the last call."""
        if not self._counts:
            return None
        stats = BatonStats({"seconds": self._seconds, "counts": dict(self._counts)})
        self._seconds, self._counts = [], Counter()
        return stats

    # --- transfers -----------------------------------------------------------------------------

    def _end_offers(self, request_ids: list[str]) -> None:
        ending = [self._offers.pop(one) for one in request_ids if one in self._offers]
        for offer in ending:
            self._cancel(offer)
        self._wait_for(ending, PREEMPTION_SECONDS)
        if any(offer.is_open for offer in ending):
            raise RuntimeError("peers still use blocks that are overwritten next")

    def _hand_over(self, save: Save) -> None:
        agent = self._agents[Role.SOURCE]
        if save.digests is not None:
            handle = self._offer(save.room, save.digests)
            self._offers[save.request_id] = self._open[Role.SOURCE, handle] = _Transfer(
                "offer", save.request_id, Role.SOURCE, handle)
        offer = self._offers.get(save.request_id)
        if offer is None or not offer.is_open or offer.is_cancelled:
            return
        if len(save.blocks) > offer.blocks:
            agent.lease(offer.handle, save.blocks[offer.blocks:])
            offer.blocks = len(save.blocks)
        if save.valid:
            agent.compute(offer.handle, save.valid)
        if save.is_complete:
            agent.send_last(offer.handle)

    def _offer(self, room: int, digests: list[int]) -> int:
        """A slot is free, or the agent is about to take it back."""
        until = time.monotonic() + _POLL_SECONDS
        while True:
            try:
                # It begins before its prompt is computed, and that can take long.
                return self._agents[Role.SOURCE].offer(room, digests, SECONDS_MAX)
            except BatonError as error:
                if error.code is not ErrorCode.FULL or time.monotonic() > until:
                    raise
                time.sleep(0.0002)

    def _start(self, load: Load, kind: str) -> _Transfer | None:
        """Starts a load or a drop. A load that cannot start ends in this step, as failed."""
        one, agent = None, self._agents[Role.DESTINATION]
        source = load.sources[self._vllm_config.parallel_config.rank]
        try:
            handle = agent.wish(load.room, source, load.digests, self._settings.load_seconds)
            one = self._open[Role.DESTINATION, handle] = _Transfer(
                kind, load.request_id, Role.DESTINATION, handle, len(load.blocks) - load.prefix)
            if kind == "load":
                agent.lease(handle, load.blocks, load.prefix)
        except BatonError as error:
            _raise_if_dead(error)
            logger.warning("The KV of %s cannot be loaded: %s", load.request_id, error)
            if one is not None:
                one.cause = "not_started"
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
            logger.debug("%s has an outcome of its own: %s", one.request_id, error)

    def _wait_for(self, transfers: list[_Transfer], seconds: float) -> None:
        until = time.monotonic() + seconds
        for one in transfers:
            while one.is_open and time.monotonic() < until:
                self._agents[one.role].wait(_POLL_SECONDS)
                self._take_events()

    def _take_events(self) -> None:
        for role, agent in self._agents.items() if self._open else ():
            for event in agent.poll():
                self._take(self._open[role, event.request], event)

    def _take(self, one: _Transfer, event: Event) -> None:
        if event.kind is EventKind.MET and one.kind == "drop":
            self._cancel(one)
        elif event.kind is EventKind.LANDED:
            one.cause = None
        elif event.kind is EventKind.FAILED and one.cause != "not_started":
            one.cause = event.cause
        elif event.kind is EventKind.ENDED:
            del self._open[one.role, one.handle]
            one.is_open = False
            self._agents[one.role].release(one.handle)
            self._take_end(one)

    def _take_end(self, one: _Transfer) -> None:
        if one.kind == "drop":
            return
        if one.cause is not None:
            logger.warning("The %s of %s has failed: %s", one.kind, one.request_id, one.cause)
        elif one.kind == "offer":
            self._counts["prompts_handed_over"] += 1
        else:
            layout = layout_of(self._kv_cache_config)
            self._seconds.append(time.monotonic() - one.began)
            self._counts["loaded_bytes"] += one.blocks * layout.token_stride * layout.layers
        if one.kind == "load":
            self._end_load(one.request_id, one.cause)

    def _end_load(self, request_id: str, cause: str | None) -> None:
        self._ended.add(request_id)
        if cause is not None:
            self._failed.add(request_id)
            self._counts[f"load_failures {cause}"] += 1
