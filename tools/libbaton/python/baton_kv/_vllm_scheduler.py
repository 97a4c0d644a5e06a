"""The scheduler side of `BatonConnector`: which blocks of which requests are handed over.

Owns: settings, what is refused at start, rooms, digests of prompts, metadata for the workers.
"""

import hashlib
import secrets
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole)
from vllm.logger import init_logger

logger = init_logger("vllm.baton_kv.scheduler")

_ROOMS = 1 << 63
# The longest life of a request in the library.
SECONDS_MAX = 1800.0
# A block of one layer must be one run of bytes.
_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_ANSWERED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def _list_of(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_all(value: Any) -> tuple[Any, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)):
            raise ValueError("it is no list")
        return tuple(read(one) for one in parts)
    return read_all


def _number_from(least: int) -> Callable[[Any], Any]:
    def read(value: Any) -> int:
        text = str(value).strip()
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ValueError(f"it is no whole number from {least} on")
        return int(text)
    return read


def _read_seconds(value: Any) -> float:
    seconds = float(value)
    if not 0.001 <= seconds <= SECONDS_MAX:
        raise ValueError(f"it is not 0.001 to {SECONDS_MAX:.0f}")
    return seconds


_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("transports", "allow", "devices"), _list_of(lambda one: str(one).strip())),
    **dict.fromkeys(("keep_seconds", "load_seconds"), _read_seconds),
    # The library has the upper limits.
    **dict.fromkeys(("slots", "sessions", "lanes"), _number_from(1)),
    "cpus": _list_of(_number_from(0))}


@dataclass(frozen=True)
class Settings:
    """`kv_connector_extra_config`. A list can be a text with commas."""

    transports: tuple[str, ...] = ("shm", "tcp")
    host: str | None = None
    allow: tuple[str, ...] | None = None
    key_file: str | None = None
    devices: tuple[str, ...] | None = None
    lanes: int = 0
    cpus: tuple[int, ...] = ()
    keep_seconds: float = 30.0
    load_seconds: float = 30.0
    slots: int = 1024
    sessions: int = 256

    @classmethod
    def of(cls, extra: dict[str, Any]) -> "Settings":
        """The settings of a configuration. An unknown or wrong one is an error."""
        unknown = sorted(set(extra) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"kv_connector_extra_config has unknown keys: {', '.join(unknown)}")
        values = {name: value for name, value in extra.items() if value is not None}
        for name in _READERS.keys() & values:
            try:
                values[name] = _READERS[name](values[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"kv_connector_extra_config: {name} is {values[name]!r:.100}: "
                                 f"{error}") from None
        return cls(**values)


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises an error that names what this connector does not support."""
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    spec = type(groups[0].kv_cache_spec).__name__ if groups else "nothing"
    tensors, layout = kv_cache_config.kv_cache_tensors, kv_cache_config.kv_cache_layout
    found = {
        "data parallelism": parallel.data_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": (parallel.prefill_context_parallel_size > 1
                                or parallel.decode_context_parallel_size > 1),
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "sleep mode": vllm_config.model_config.enable_sleep_mode,
        "MultiConnector": _is_child(),
        f"{len(groups)} KV cache groups": len(groups) != 1,
        f"{len(tensors)} KV cache tensors": len(tensors) != 1,
        f"the attention of {spec}": spec not in _SPECS,
        f"the KV cache layout {layout}": layout not in _LAYOUTS}
    refused = [name for name, is_found in found.items() if is_found]
    if refused:
        raise ValueError(f"BatonConnector does not support: {', '.join(refused)}")


def _is_child() -> bool:
    # MultiConnector shows its children a configuration of their own.
    frame: FrameType | None = sys._getframe()
    while frame := frame and frame.f_back:
        if type(frame.f_locals.get("self")).__name__ == "MultiConnector":
            return True
    return False


@dataclass
class Save:
    """What the hand-over of a prompt can take after a step."""

    request_id: str
    room: int
    blocks: list[int]
    """All blocks of the prompt so far. The first `valid` have all their KV."""
    valid: int
    is_complete: bool
    digests: list[int] | None
    """One of each block, in the first step of a room."""


@dataclass
class Load:
    """The KV of a prompt, to be loaded or not needed. The first `prefix` blocks have theirs."""

    request_id: str
    room: int
    sources: list[str]
    digests: list[int]
    blocks: list[int] = field(default_factory=list)
    prefix: int = 0


@dataclass
class BatonMetadata(KVConnectorMetadata):
    """What the workers do in a step."""

    preempted: list[str] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    # KV that the source keeps for nothing.
    drops: list[Load] = field(default_factory=list)
    # Finished requests, which do not need their load any more.
    abandoned: set[str] = field(default_factory=set)
    # Finished requests with an end to report. True: their KV is not needed.
    kept: dict[str, bool] = field(default_factory=dict)
    # Nothing is computed in this step.
    is_idle: bool = False


@dataclass
class _Prompt:
    """A request of prefill. It has a room while workers have an offer of it."""

    digests: list[int]
    num_tokens: int
    room: int | None = None
    is_complete: bool = False


@dataclass
class _Fetch:
    """A request of decode. Once its load or its drop has begun, it has no other one."""

    load: Load
    has_begun: bool = False


def digests_of(request: Any, block_size: int) -> list[int]:
    """A digest of all that decides the KV up to the end of each block, the last one included."""
    seed = [(one.identifier, one.mm_position.offset, one.mm_position.length)
            for one in request.mm_features or ()]
    chain, digests = repr(seed).encode(), []
    for start in range(0, len(request.prompt_token_ids), block_size):
        block = array("q", request.prompt_token_ids[start:start + block_size])
        chain = hashlib.sha256(chain + block.tobytes()).digest()
        digests.append(int.from_bytes(chain[:4], "little"))
    return digests


def _are_valid(params: dict[str, Any], tp_size: int) -> bool:
    """Whether a load can have the parameters of a client, which can be anything."""
    room, addresses = params.get("bootstrap_room"), params.get("remote_addresses")
    return (type(room) is int and 0 <= room < _ROOMS
            and params.get("tp_size", tp_size) == tp_size
            and isinstance(addresses, list) and len(addresses) == tp_size
            and all(isinstance(one, str) and one.isascii() and one.isprintable()
                    and len(one) < 256 for one in addresses))


class SchedulerSide(KVConnectorBase_V1):
    """Decides what is handed over. All calls come on one thread."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        refuse_unsupported(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._slots = Settings.of(extra).slots
        self._tp_size: int = vllm_config.parallel_config.tensor_parallel_size
        self._block_size: int = vllm_config.cache_config.block_size
        self._addresses: list[str] = []
        self._prompts: dict[str, _Prompt] = {}
        # Requests of prefill that have a slot of their workers' agents.
        self._offered: set[str] = set()
        self._fetches: dict[str, _Fetch] = {}
        self._rooms: set[int] = set()
        self._next = BatonMetadata()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._addresses = [metadata[rank].address for rank in sorted(metadata)]

    def on_new_request(self, request: Any) -> None:
        """Wrong parameters only cost a request its hand-over."""
        params, request_id = request.kv_transfer_params, request.request_id
        if not isinstance(params, dict):
            return
        is_load = params.get("do_remote_prefill") is True
        if not is_load and params.get("do_remote_decode") is not True:
            return
        role, fault = self._kv_transfer_config, None
        if not request.prompt_token_ids:
            fault = "its prompt has no token ids"
        elif request.prompt_embeds is not None:
            fault = "its prompt has embeddings"
        elif not (role.is_kv_consumer if is_load else role.is_kv_producer):
            fault = "kv_role forbids it"
        elif is_load and not _are_valid(params, self._tp_size):
            fault = f"its parameters are wrong: {params!r:.400}"
        if fault:
            logger.warning("%s is not handed over: %s", request_id, fault)
            return
        digests = digests_of(request, self._block_size)
        if not is_load:
            self._prompts[request_id] = _Prompt(digests, request.num_prompt_tokens)
        elif (room := params["bootstrap_room"]) not in self._rooms:
            # A prompt with several answers is several requests. Only one of them can load.
            self._rooms.add(room)
            self._fetches[request_id] = _Fetch(
                Load(request_id, room, params["remote_addresses"], digests))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """It has no effect: vLLM asks at any time, and can throw the answer away."""
        fetch = self._fetches.get(request.request_id)
        can_load = fetch is not None and not fetch.has_begun
        count = max(request.num_prompt_tokens - num_computed_tokens, 0) if can_load else 0
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Takes the blocks of a load, or the news that there is none."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.has_begun:
            return
        fetch.has_begun = True
        if num_external_tokens == 0:
            self._next.drops.append(fetch.load)
            return
        table, needed = blocks.get_block_ids()[0], len(fetch.load.digests)
        prefix = len(table) - len(blocks.get_unhashed_block_ids_all_groups()[0])
        # A load that vLLM has cut would leave blocks without KV. Without blocks it fails.
        tokens = prefix * self._block_size + num_external_tokens
        if tokens == request.num_prompt_tokens and len(table) >= needed:
            fetch.load.blocks, fetch.load.prefix = table[:needed], prefix
        self._next.loads.append(fetch.load)

    def build_connector_meta(self, scheduler_output: Any) -> BatonMetadata:
        """What the workers do in this step."""
        output = scheduler_output
        for request_id in output.preempted_req_ids or ():
            self._next.preempted.append(request_id)
            self._offered.discard(request_id)
            prompt = self._prompts.get(request_id)
            if prompt is not None:
                # The blocks are gone. The request gets a new room when it is resumed.
                prompt.room, prompt.is_complete = None, False
        if self._prompts:
            self._plan_saves(output)
        metadata, self._next = self._next, BatonMetadata()
        metadata.is_idle = not output.num_scheduled_tokens
        return metadata

    def _plan_saves(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens))
        for request_id, count in output.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is not None and not prompt.is_complete:
                table = output.kv_connector_block_state.get_block_ids(request_id)[0]
                self._plan(request_id, prompt, table, computed[request_id] + count)

    def _plan(self, request_id: str, prompt: _Prompt, table: Sequence[int], tokens: int) -> None:
        digests = None
        if prompt.room is None:
            if len(self._offered) == self._slots:
                # A later step can have a slot.
                return
            self._offered.add(request_id)
            prompt.room, digests = secrets.randbelow(_ROOMS), prompt.digests
        total = len(prompt.digests)
        prompt.is_complete = tokens >= prompt.num_tokens
        valid = total if prompt.is_complete else tokens // self._block_size
        self._next.saves.append(Save(request_id, prompt.room, list(table[:total]), valid,
                                     prompt.is_complete, digests))

    def update_connector_output(self, connector_output: Any) -> None:
        """Offers that have ended give their slots back."""
        if connector_output.finished_sending:
            self._offered -= connector_output.finished_sending

    def request_finished(
        self, request: Any, block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks of a finished request stay, and its answer's parameters."""
        fetch = self._fetches.pop(request.request_id, None)
        if fetch is not None:
            self._rooms.remove(fetch.load.room)
            if fetch.has_begun:
                self._next.abandoned.add(request.request_id)
            else:
                self._next.drops.append(fetch.load)
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return False, None
        is_answered = request.status.name in _ANSWERED
        if prompt.room is None or not block_ids:
            # A request that was preempted has no blocks. The next metadata ends its offers.
            if is_answered:
                logger.warning("%s is not handed over: it has no slot, or has lost its blocks",
                               request.request_id)
            return False, None
        is_answered = is_answered and prompt.is_complete
        self._next.kept[request.request_id] = not is_answered
        return True, {
            "do_remote_prefill": True, "do_remote_decode": False, "tp_size": self._tp_size,
            "remote_addresses": self._addresses, "bootstrap_room": prompt.room,
        } if is_answered else None
