"""The C interface: types of `baton.h`, and the loaded library.

`BATON_LIBRARY` names another file of the library than the one in this package.
"""

import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

ABI = 1
PAYLOAD_BYTES = 188
KIND_BYTES = 32


class _Structure(Structure):
    """A structure that refuses numbers that do not fit. ctypes would cut off their bits."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, int) and getattr(self, name) != value:
            raise ValueError(f"{name} is {value}, which does not fit")


class Layout(_Structure):
    """Where the KV of a token is. `baton_layout` of the header describes the fields."""

    _fields_ = [
        *((name, c_uint32) for name in (
            "pages", "page_size", "layers", "kv_heads", "head_dim", "element", "ranks",
            "model_kv_heads")),
        *((name, c_uint64) for name in (
            "page_stride", "layer_stride", "kv_stride", "head_stride", "token_stride",
            "rank_stride")),
    ]


class Config(_Structure):
    _fields_ = [
        ("size", c_uint32),
        ("role", c_uint32),
        ("region", c_uint64),
        ("layout", Layout),
        ("kind", c_uint8 * KIND_BYTES),
        ("host", c_char_p),
        ("allow", c_char_p),
        ("transports", c_char_p),
        ("devices", c_char_p),
        ("key", c_char_p),
        ("key_bytes", c_size_t),
        ("cpus", POINTER(c_uint32)),
        ("cpus_len", c_size_t),
        *((name, c_uint32) for name in (
            "slots", "prompt_pages", "sessions", "lanes", "copy_threads")),
    ]


class RawEvent(_Structure):
    _fields_ = [
        ("request", c_uint64),
        ("room", c_uint64),
        ("kind", c_uint32),
        ("cause", c_uint32),
        ("payload", c_uint8 * PAYLOAD_BYTES),
        ("padding", c_uint32),
    ]


class RawCounters(_Structure):
    _fields_ = [
        ("size", c_uint32),
        ("open", c_uint32),
        *((name, c_uint64) for name in ("landed", "failed", "work_requests", "doorbells")),
    ]


LogCallback = ctypes.CFUNCTYPE(None, c_uint32, c_char_p, c_void_p)

_IDS = POINTER(c_uint32)
_OUT = POINTER(c_uint64)
_FUNCTIONS = {
    "baton_abi": (c_uint32, []),
    "baton_error_name": (c_char_p, [c_int32]),
    "baton_last_error": (c_size_t, [c_char_p, c_size_t]),
    "baton_cause_name": (c_size_t, [c_uint32, c_char_p, c_size_t]),
    "baton_log": (c_int32, [LogCallback, c_void_p, c_uint32]),
    "baton_region_new": (c_int32, [c_size_t, _OUT]),
    "baton_region_adopt": (c_int32, [c_void_p, c_size_t, c_uint32, _OUT]),
    "baton_region_base": (c_int32, [c_uint64, POINTER(c_void_p), POINTER(c_size_t)]),
    "baton_region_free": (c_int32, [c_uint64]),
    "baton_agent_new": (c_int32, [POINTER(Config), _OUT]),
    "baton_agent_free": (c_int32, [c_uint64]),
    "baton_address": (c_int32, [c_uint64, c_char_p, c_size_t]),
    "baton_status": (c_void_p, [c_uint64, _IDS]),
    "baton_event_fd": (c_int32, [c_uint64]),
    "baton_offer": (c_int32, [c_uint64, c_uint64, _IDS, c_size_t, c_uint32, _OUT]),
    "baton_wish": (c_int32, [c_uint64, c_uint64, c_char_p, _IDS, c_size_t, c_uint32, _OUT]),
    "baton_lease": (c_int32, [c_uint64, c_uint64, c_uint32, _IDS, c_size_t]),
    "baton_compute": (c_int32, [c_uint64, c_uint64, c_uint32]),
    "baton_send_last": (c_int32, [c_uint64, c_uint64, c_char_p, c_size_t]),
    "baton_cancel": (c_int32, [c_uint64, c_uint64]),
    "baton_release": (c_int32, [c_uint64, c_uint64]),
    "baton_poll": (c_int32, [c_uint64, POINTER(RawEvent), c_size_t]),
    "baton_wait": (c_int32, [c_uint64, c_uint64]),
    "baton_counters": (c_int32, [c_uint64, POINTER(RawCounters)]),
}


def path() -> Path:
    """The file of the library."""
    return Path(os.environ.get("BATON_LIBRARY") or Path(__file__).with_name("libbaton.so"))


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(path()))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.baton_abi() != ABI:
        raise ImportError(f"{path()} has interface {library.baton_abi()}, not {ABI}")
    return library


library = _load()
