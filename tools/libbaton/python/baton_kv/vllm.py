"""`BatonConnector`: vLLM 0.32 and 0.33 hand over the KV of prompts from prefill to decode.

    --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_role": "kv_producer",
                           "kv_connector_module_path": "baton_kv.vllm"}'

Decode has the role `kv_consumer`. A router sends a request to prefill with `kv_transfer_params`
`{"do_remote_decode": true}` and one token to generate. It sends the `kv_transfer_params` of the
answer to decode, with the request. `Settings` has the keys of `kv_connector_extra_config`.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics, KVConnectorStats)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from . import cause_name
from ._vllm_scheduler import SchedulerSide
from ._vllm_worker import BatonStats, WorkerSide

__all__ = ["BatonConnector"]

_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
_COUNTERS = {
    "loaded_bytes": "Bytes of KV that loads brought.",
    "prompts_handed_over": "Prompts that decode engines have loaded from here.",
    "load_failures": "Loads that failed, by cause.",
}
_CAUSES = sorted({cause_name(number) for number in range(256)} | {"not_started"})


class BatonPromMetrics(KVConnectorPromMetrics):
    """`BatonStats` for Prometheus."""

    def __init__(
        self, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._seconds = self._histogram_cls(
            name="vllm:baton_load_seconds", labelnames=labelnames, buckets=_SECONDS,
            documentation="Time from the start of a load to its end.")
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:baton_{name}", documentation=text,
                labelnames=[*labelnames, "cause"] if name == "load_failures" else labelnames)
            for name, text in _COUNTERS.items()}
        for labels in per_engine_labelvalues.values():
            for name in ("loaded_bytes", "prompts_handed_over"):
                self._counters[name].labels(*labels)
            for cause in _CAUSES:
                # An alert sees only a counter that grows, not one that begins.
                self._counters["load_failures"].labels(*labels, cause)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for seconds in transfer_stats_data["seconds"]:
            self._seconds.labels(*labels).observe(seconds)
        for words, count in transfer_stats_data["counts"].items():
            name, *cause = words.split()
            self._counters[name].labels(*labels, *cause).inc(count)


class BatonConnector(SchedulerSide, WorkerSide):
    """Both sides. A process of vLLM uses one of them."""

    _cache_hit_source = CacheHitSource.P2P

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return BatonStats(data or {"seconds": [], "counts": {}})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVConnectorPromMetrics:
        return BatonPromMetrics(*arguments)
