"""The scheduler side of `BatonConnector`: which blocks of which requests are handed over.

Owns: settings, what is refused at start, rooms, digests of prompts, metadata for the workers.
"""

import hashlib
import secrets
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger

logger = init_logger("vllm.baton_kv.scheduler")

_ROOMS = 1 << 63
# A block of one layer must be one run of bytes.
_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_ANSWERED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


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
    """How long prefill keeps the KV of a prompt that it has answered."""
    load_seconds: float = 30.0
    slots: int = 1024

    @classmethod
    def of(cls, extra: dict[str, Any]) -> "Settings":
        """The settings of a configuration. An unknown or wrong one is an error."""
        unknown = sorted(set(extra) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"kv_connector_extra_config has unknown keys: {', '.join(unknown)}")
        values = {name: value for name, value in extra.items() if value is not None}
        for name in {"transports", "allow", "devices", "cpus"} & set(values):
            parts = values[name].split(",") if isinstance(values[name], str) else values[name]
            values[name] = tuple(int(one) if name == "cpus" else one.strip() for one in parts)
        for name in ("keep_seconds", "load_seconds", "slots"):
            if not 0 < float(values.get(name, 1)) <= 86_400:
                raise ValueError(f"kv_connector_extra_config: {name} is out of range")
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
    frame = sys._getframe()
    while frame := frame.f_back:
        if type(frame.f_locals.get("self")).__name__ == "MultiConnector":
            return True
    return False


def new_counts() -> dict[str, Any]:
    """What workers count: seconds of each load, bytes, failures by cause, prompts, open ones."""
    return {"seconds": [], "bytes": 0, "failures": {}, "handed_over": 0, "open": None}


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
    # Requests that do not need their load any more.
    abandoned: set[str] = field(default_factory=set)
    # Finished requests with an end to report. True: their KV is not needed.
    kept: dict[str, bool] = field(default_factory=dict)


@dataclass
class _Prompt:
    """A request of prefill. It has a room while workers have an offer of it."""

    digests: list[int]
    num_tokens: int
    room: int | None = None
    is_complete: bool = False


@dataclass
class _Fetch:
    """A request of decode. Its state is `new`, then perhaps `loading`, then `done`."""

    load: Load
    is_owner: bool
    can_load: bool
    state: str = "new"
    is_finished: bool = False


def digests_of(request: Any, block_size: int) -> list[int]:
    """A digest of all that decides the KV up to the end of each block, the last one included."""
    lora, features = request.lora_request, request.mm_features or ()
    seed = [(one.identifier, one.mm_position.offset, one.mm_position.length) for one in features]
    chain, digests = repr((lora and lora.lora_name, seed)).encode(), []
    for start in range(0, len(request.prompt_token_ids), block_size):
        block = array("q", request.prompt_token_ids[start:start + block_size])
        chain = hashlib.sha256(chain + block.tobytes()).digest()
        digests.append(int.from_bytes(chain[:4], "little"))
    return digests


def _fault_of(params: dict[str, Any], tp_size: int) -> str | None:
    """What is wrong with the parameters of a client, which can be anything."""
    room, addresses = params.get("bootstrap_room"), params.get("remote_addresses")
    if type(room) is not int or not 0 <= room < _ROOMS:
        return "bootstrap_room is no number of 63 bits"
    if params.get("tp_size", tp_size) != tp_size:
        return f"tp_size is not {tp_size}, as here"
    if not isinstance(addresses, list) or len(addresses) != tp_size:
        return f"remote_addresses is no list of {tp_size}"
    if not all(isinstance(one, str) and one.isascii() and one.isprintable() and len(one) < 256
               for one in addresses):
        return "remote_addresses has something else than addresses"
    return None


class Scheduler:
    """Decides what is handed over. All calls come on one thread."""

    def __init__(self, vllm_config: Any) -> None:
        self._role = vllm_config.kv_transfer_config
        self._tp_size: int = vllm_config.parallel_config.tensor_parallel_size
        self._block_size: int = vllm_config.cache_config.block_size
        self.addresses: list[str] = []
        self._prompts: dict[str, _Prompt] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._owners: dict[int, str] = {}
        self._next = BatonMetadata()

    def add(self, request: Any) -> None:
        """Looks at a new request. Wrong parameters only cost it the hand-over."""
        params, request_id = request.kv_transfer_params, request.request_id
        if not isinstance(params, dict):
            return
        is_load = params.get("do_remote_prefill") is True
        if not is_load and params.get("do_remote_decode") is not True:
            return
        if not request.prompt_token_ids:
            logger.warning("%s has a prompt without token ids: no hand-over", request_id)
        elif not (self._role.is_kv_consumer if is_load else self._role.is_kv_producer):
            logger.warning("%s asks for what kv_role forbids: no hand-over", request_id)
        elif is_load:
            self._add_fetch(request, params)
        else:
            self._prompts[request_id] = _Prompt(
                digests_of(request, self._block_size), request.num_prompt_tokens)

    def _add_fetch(self, request: Any, params: dict[str, Any]) -> None:
        request_id, count = request.request_id, request.num_prompt_tokens
        fault = _fault_of(params, self._tp_size)
        if fault is not None:
            logger.warning("%s is computed here: %s", request_id, fault)
            return
        room, remote = params["bootstrap_room"], params.get("remote_num_tokens")
        if remote not in (None, count):
            logger.warning("%s is computed here: remote_num_tokens is not %d", request_id, count)
        # A prompt with several answers is several requests. Only one of them can load.
        is_owner = self._owners.setdefault(room, request_id) == request_id
        load = Load(request_id, room, params["remote_addresses"],
                    digests_of(request, self._block_size))
        self._fetches[request_id] = _Fetch(load, is_owner, is_owner and remote in (None, count))

    def tokens_to_load(self, request: Any, computed: int) -> int:
        """How many tokens a load would bring. It has no effect: vLLM asks at any time."""
        fetch = self._fetches.get(request.request_id)
        can_load = fetch is not None and fetch.state == "new" and fetch.can_load
        return max(request.num_prompt_tokens - computed, 0) if can_load else 0

    def allocate(self, request: Any, blocks: Any, num_external: int) -> None:
        """Takes the blocks of a load, or the news that there is none."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.state != "new":
            return
        request.kv_transfer_params["do_remote_prefill"] = False
        if num_external == 0:
            self._drop(fetch)
            return
        table, needed = blocks.get_block_ids()[0], len(fetch.load.digests)
        prefix = len(table) - len(blocks.get_unhashed_block_ids_all_groups()[0])
        # A load that vLLM has cut would leave blocks without KV. Without blocks it fails.
        is_whole = prefix * self._block_size + num_external == request.num_prompt_tokens
        if is_whole and len(table) >= needed:
            fetch.load.blocks, fetch.load.prefix = table[:needed], prefix
        fetch.state = "loading"
        self._next.loads.append(fetch.load)

    def _drop(self, fetch: _Fetch) -> None:
        fetch.state = "done"
        if fetch.is_owner:
            self._next.drops.append(fetch.load)

    def metadata(self, output: Any) -> BatonMetadata:
        """What the workers do in this step."""
        for request_id in output.preempted_req_ids or ():
            self._next.preempted.append(request_id)
            prompt = self._prompts.get(request_id)
            if prompt is not None:
                # The blocks are gone. The request gets a new room when it is resumed.
                prompt.room, prompt.is_complete = None, False
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens))
        for request_id, count in output.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is not None and not prompt.is_complete:
                table = output.kv_connector_block_state.get_block_ids(request_id)[0]
                self._save(request_id, prompt, table, computed[request_id] + count)
        metadata, self._next = self._next, BatonMetadata()
        return metadata

    def _save(self, request_id: str, prompt: _Prompt, table: Sequence[int], tokens: int) -> None:
        digests = prompt.digests if prompt.room is None else None
        if prompt.room is None:
            prompt.room = secrets.randbelow(_ROOMS)
        total = len(prompt.digests)
        prompt.is_complete = tokens >= prompt.num_tokens
        valid = total if prompt.is_complete else tokens // self._block_size
        self._next.saves.append(Save(request_id, prompt.room, list(table[:total]), valid,
                                     prompt.is_complete, digests))

    def finish(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks of a finished request stay, and its answer's parameters."""
        fetch = self._fetches.get(request.request_id)
        if fetch is not None:
            self._finish_fetch(fetch)
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None or prompt.room is None:
            return False, None
        is_answered = prompt.is_complete and request.status.name in _ANSWERED
        self._next.kept[request.request_id] = not is_answered
        return True, {
            "do_remote_prefill": True, "do_remote_decode": False,
            "remote_addresses": self.addresses, "bootstrap_room": prompt.room,
            "tp_size": self._tp_size, "remote_num_tokens": prompt.num_tokens,
        } if is_answered else None

    def _finish_fetch(self, fetch: _Fetch) -> None:
        fetch.is_finished = True
        if fetch.state == "loading":
            self._next.abandoned.add(fetch.load.request_id)
            return
        if fetch.state == "new":
            self._drop(fetch)
        self._forget(fetch)

    def _forget(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.load.request_id]
        if fetch.is_owner:
            del self._owners[fetch.load.room]

    def take_received(self, request_ids: Iterable[str]) -> None:
        """Notes the ends of loads."""
        for request_id in request_ids:
            fetch = self._fetches.get(request_id)
            if fetch is not None:
                fetch.state = "done"
                if fetch.is_finished:
                    self._forget(fetch)
