"""Puts the few names of vLLM that `BatonConnector` imports in place, so that vLLM is not needed."""

import enum
import logging
import sys
import types
from dataclasses import dataclass, field


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class KVConnectorHandshakeMetadata:
    pass


@dataclass
class KVConnectorTransferResults:
    finished_sending: set = field(default_factory=set)
    finished_recving: set = field(default_factory=set)
    failed_recving: set = field(default_factory=set)


class KVConnectorBase_V1:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self.role = role

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def update_connector_output(self, connector_output):
        pass

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata


@dataclass
class KVConnectorStats:
    data: dict = field(default_factory=dict)


class KVConnectorPromMetrics:
    pass


class CacheHitSource(enum.Enum):
    P2P = "p2p"


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
_MODULES = {
    "vllm": {"__version__": "stub"},
    "vllm.logger": {"init_logger": logging.getLogger},
    f"{_BASE}.base": {
        one.__name__: one for one in (
            KVConnectorRole, KVConnectorMetadata, KVConnectorHandshakeMetadata,
            KVConnectorTransferResults, KVConnectorBase_V1)},
    f"{_BASE}.metrics": {
        one.__name__: one for one in (KVConnectorStats, KVConnectorPromMetrics)},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
}


def install():
    for name, values in _MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]),
                                   types.ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(values)
