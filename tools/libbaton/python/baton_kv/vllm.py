"""`BatonConnector`: vLLM 0.32 and 0.33 hand over the KV of prompts from prefill to decode.

    --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_role": "kv_producer",
                           "kv_connector_module_path": "baton_kv.vllm"}'

Decode has the role `kv_consumer`. A router sends a request to prefill with `kv_transfer_params`
`{"do_remote_decode": true}` and one token to generate. It sends the `kv_transfer_params` of the
answer to decode, with the request. `Settings` has the keys of `kv_connector_extra_config`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorHandshakeMetadata, KVConnectorRole, KVConnectorTransferResults)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics, KVConnectorStats)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ._vllm_scheduler import Scheduler, Settings, new_counts, refuse_unsupported

if TYPE_CHECKING:
    from ._vllm_worker import Worker

__all__ = ["BatonConnector"]

_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]


@dataclass
class BatonHandshake(KVConnectorHandshakeMetadata):
    """Where destinations find a rank."""

    address: str


class BatonStats(KVConnectorStats):
    """`new_counts` of some steps and workers, as vLLM wants it."""

    def reset(self) -> None:
        self.data = new_counts()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        failures = dict(self.data["failures"])
        for cause, count in other.data["failures"].items():
            failures[cause] = failures.get(cause, 0) + count
        summed = ("seconds", "bytes", "handed_over")
        self.data = {**{name: self.data[name] + other.data[name] for name in summed},
                     "failures": failures, "open": other.data["open"]}
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds, failures = self.data["seconds"], self.data["failures"]
        return {
            "Loads": len(seconds), "MB loaded": round(self.data["bytes"] / 2**20, 3),
            "Avg load time (ms)": round(1e3 * sum(seconds) / max(len(seconds), 1), 3),
            "Failed loads": sum(failures.values()),
            "Prompts handed over": self.data["handed_over"]}

    def is_empty(self) -> bool:
        return self.data == new_counts()


class BatonPromMetrics(KVConnectorPromMetrics):
    """The same for Prometheus."""

    def __init__(
        self, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def each(make: Any, name: str, text: str, **more: Any) -> dict[int, Any]:
            metric = make(name=f"vllm:baton_{name}", documentation=text, labelnames=labelnames,
                          **more)
            return {engine: metric.labels(*values)
                    for engine, values in per_engine_labelvalues.items()}

        self._seconds = each(self._histogram_cls, "load_seconds",
                             "Time from the start of a load to its end.", buckets=_SECONDS)
        self._bytes = each(self._counter_cls, "loaded_bytes", "Bytes of KV that loads brought.")
        self._handed_over = each(self._counter_cls, "prompts_handed_over",
                                 "Prompts that decode engines have loaded from here.")
        self._open = each(self._gauge_cls, "open_requests", "Hand-overs and loads that are open.",
                          multiprocess_mode="mostrecent")
        self._failures = self._counter_cls(
            name="vllm:baton_load_failures", documentation="Loads that failed, by cause.",
            labelnames=[*labelnames, "cause"])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data = transfer_stats_data
        for seconds in data["seconds"]:
            self._seconds[engine_idx].observe(seconds)
        self._bytes[engine_idx].inc(data["bytes"])
        self._handed_over[engine_idx].inc(data["handed_over"])
        self._open[engine_idx].set(data["open"])
        for cause, count in data["failures"].items():
            self._failures.labels(*self.per_engine_labelvalues[engine_idx], cause).inc(count)


class BatonConnector(KVConnectorBase_V1):
    """Hands the calls of vLLM to the side that this process has: a scheduler or a worker."""

    _cache_hit_source = CacheHitSource.P2P
    _scheduler: Scheduler
    _worker: "Worker"

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported(vllm_config, kv_cache_config)
        settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._had_open: int | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(vllm_config)
        else:
            # Only a worker uses the library: the process of the scheduler can fork workers.
            from ._vllm_worker import Worker
            self._worker = Worker(vllm_config, kv_cache_config, settings)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._scheduler.addresses = [metadata[rank].address for rank in sorted(metadata)]

    def on_new_request(self, request: Any) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        count = self._scheduler.tokens_to_load(request, num_computed_tokens)
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocate(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._scheduler.metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.take_received(connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finish(request)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return BatonHandshake(self._worker.address)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Steps are handed over as a whole."""

    def wait_for_save(self) -> None:
        self._worker.save(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._worker.results()
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.role is KVConnectorRole.SCHEDULER:
            return None
        counts, had_open = self._worker.take_counts(), self._had_open
        self._had_open = counts["open"]
        return None if counts == {**new_counts(), "open": had_open} else BatonStats(counts)

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.shutdown()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return BatonStats(data or new_counts())

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVConnectorPromMetrics:
        return BatonPromMetrics(*arguments)
