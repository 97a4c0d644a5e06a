"""Baton's transfer engine: hands the KV cache of prompts from one process to another.

A source has computed KV, a destination receives it, over shared memory, RDMA or TCP. A request has
one outcome, `LANDED` or `FAILED`, and then one `ENDED`. The outcome says whether the KV can be
used. The end says that the pages can be reused; do not reuse them before it.
"""

import array
import atexit
import ctypes
import enum
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ._library import (
    KIND_BYTES,
    PAYLOAD_BYTES,
    Config,
    Layout,
    LogCallback,
    RawCounters,
    RawEvent,
    library,
)

__all__ = [
    "KIND_BYTES", "PAYLOAD_BYTES", "Agent", "BatonError", "Counters", "Element", "ErrorCode",
    "Event", "EventKind", "Layout", "LogLevel", "Region", "Role", "State", "cause_name",
    "log_to",
]

_EVENTS_PER_POLL = 64
# More than the longest time of a request and the longest wait of a call.
_SECONDS_MAX = 3600.0
# The longest wait of the library.
_WAIT_SECONDS_MAX = 60.0


class Element(enum.IntEnum):
    """Element types of a layout."""

    F32 = 1
    F16 = 2
    BF16 = 3


class Role(enum.IntEnum):
    """What an agent does."""

    SOURCE = 1
    DESTINATION = 2


class EventKind(enum.IntEnum):
    """What has happened to a request."""

    MET = 1
    LANDED = 2
    FAILED = 3
    ENDED = 4


class State(enum.IntEnum):
    """The state of a request in its status word."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class LogLevel(enum.IntEnum):
    """Levels of log lines."""

    ERROR = 0
    WARN = 1
    INFO = 2
    DEBUG = 3


class ErrorCode(enum.IntEnum):
    """Why a call had no effect. The header describes each."""

    ARGUMENT = -1
    HANDLE = -2
    REQUEST = -3
    ROLE = -4
    FULL = -5
    TOKENS = -6
    PAGES = -7
    REPEATED = -8
    OPEN = -9
    DEAD = -10
    FORKED = -11
    SYSTEM = -12
    PANIC = -13
    BUSY = -14


class BatonError(Exception):
    """A call that had no effect."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = ErrorCode(code)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a request."""

    request: int
    room: int
    kind: EventKind
    cause: str | None
    """With `FAILED`: the reason."""
    payload: bytes | None
    """With `LANDED`, at a destination: the bytes of the source, filled up with zeros."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of an agent since its start."""

    open: int
    landed: int
    failed: int
    work_requests: int
    doorbells: int


def _text(write: Callable[[Any, int], int]) -> str:
    buffer = ctypes.create_string_buffer(1024)
    write(buffer, len(buffer))
    return buffer.value.decode(errors="replace")


def _checked(result: int) -> int:
    if result < 0:
        raise BatonError(result, _text(library.baton_last_error))
    return result


def _number(name: str, value: int, bits: int = 32) -> int:
    """The value. ctypes would cut off the bits of a larger one."""
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} is {value}, which is not a number of {bits} bits")
    return value


def _numbers(name: str, items: Sequence[int]) -> Any:
    try:
        numbers = array.array("I", iter(items))
    except OverflowError as error:
        raise ValueError(f"{name} has a number that is not one of 32 bits") from error
    return (ctypes.c_uint32 * len(numbers)).from_buffer(numbers)


def _seconds(name: str, seconds: float) -> float:
    if not seconds >= 0:
        raise ValueError(f"{name} is {seconds} seconds")
    return min(seconds, _SECONDS_MAX)


def _list(names: Iterable[str] | None) -> bytes | None:
    return None if names is None else ",".join(names).encode()


def cause_name(cause: int) -> str:
    """The name of a cause, as in metrics and logs."""
    return _text(lambda buffer, size: library.baton_cause_name(cause, buffer, size))


_log_callback = LogCallback()


def log_to(write: Callable[[LogLevel, str], None] | None, level: LogLevel = LogLevel.WARN) -> None:
    """Sends log lines of `level` and more severe ones to `write`, or to standard error.

    A thread of its own calls `write`. If `write` is slow, lines are left out. It must not call
    `log_to`. At the end of the interpreter, lines go to standard error again.
    """
    global _log_callback

    def call(level: int, line: bytes, _: int | None) -> None:
        if write is not None:
            write(LogLevel(level), line.decode(errors="replace"))

    callback = LogCallback() if write is None else LogCallback(call)
    _checked(library.baton_log(callback, None, level))
    # The library has the former callback no longer.
    _log_callback = callback


# After the end of the interpreter, a callback into Python ends its thread, and so the process.
# Finalizers run before this, so agents have ended.
atexit.register(library.baton_log, _log_callback, None, LogLevel.WARN)


class Region:
    """Memory for KV that peers on this host can map read-only.

    Without `free`, its memory is freed when the region and its views are dropped.
    """

    def __init__(self, size: int) -> None:
        handle = ctypes.c_uint64()
        _checked(library.baton_region_new(_number("size", size, 64), ctypes.byref(handle)))
        self._set(handle.value)
        self._finalizer = weakref.finalize(self, library.baton_region_free, handle.value)
        # Other objects can use the memory to the end of the process.
        self._finalizer.atexit = False

    @classmethod
    def adopt(cls, address: int, size: int, *, remap: bool = True) -> "Region":
        """A region of memory that the caller has allocated.

        With `remap`, its whole memory pages move onto a memory file, in place and with their
        content. A source with shm needs that. The memory is private, anonymous and writable, and
        no other adopted region has any of it.

        Nothing writes remapped memory during the call and during `free`, and no device has its
        pages: no `cudaHostRegister`, no `pin_memory`, no `ibv_reg_mr`. Both need as much free
        memory as the pages that are not zero. Processes that are forked in between share it.

        The memory must not be freed before the region. The region is not freed before `free`, also
        if the program drops it.
        """
        handle = ctypes.c_uint64()
        _checked(library.baton_region_adopt(
            _number("address", address, 64), _number("size", size, 64), remap,
            ctypes.byref(handle)))
        region = cls.__new__(cls)
        region._set(handle.value)
        # A free of itself could meet a thread that writes the memory.
        region._finalizer = None
        return region

    def _set(self, handle: int) -> None:
        self.handle = handle
        self._finalizer: Any
        base, length = ctypes.c_void_p(), ctypes.c_size_t()
        _checked(library.baton_region_base(
            self.handle, ctypes.byref(base), ctypes.byref(length)))
        self.base: int = base.value or 0
        self.size: int = length.value

    def memory(self) -> memoryview:
        """The bytes. The view must not be used after `free`."""
        whole: Any = (ctypes.c_uint8 * self.size).from_address(self.base)
        # The view keeps the region.
        whole.region = self
        return memoryview(whole).cast("B")

    def free(self) -> None:
        """Frees the memory. No agent uses it. After an error, the region is as before."""
        _checked(library.baton_region_free(self.handle))
        if self._finalizer is not None:
            self._finalizer.detach()


class Agent:
    """The transfer engine over one region, with threads of its own. Any thread can call it.

    Without `free`, it ends when the program drops it, or at the end of the interpreter. Its status
    table stays in memory until the process ends: 8 bytes for each slot.
    """

    def __init__(
        self,
        role: Role,
        region: Region,
        layout: Layout,
        kind: bytes,
        *,
        host: str | None = None,
        allow: Iterable[str] | None = None,
        transports: Iterable[str] | None = None,
        devices: Iterable[str] | None = None,
        key: bytes = b"",
        cpus: Sequence[int] = (),
        slots: int = 0,
        prompt_pages: int = 0,
        sessions: int = 0,
        lanes: int = 0,
        copy_threads: int = 0,
    ) -> None:
        """`kind` is a digest of everything that decides what the KV means, equal at both ends."""
        if len(kind) != KIND_BYTES:
            raise ValueError(f"kind has {len(kind)} bytes, not {KIND_BYTES}")
        config = Config(
            size=ctypes.sizeof(Config), role=role, region=region.handle, layout=layout,
            kind=(ctypes.c_uint8 * KIND_BYTES)(*kind), host=host.encode() if host else None,
            allow=_list(allow), transports=_list(transports), devices=_list(devices),
            key=key or None, key_bytes=len(key), cpus=_numbers("cpus", cpus), cpus_len=len(cpus),
            slots=slots, prompt_pages=prompt_pages, sessions=sessions, lanes=lanes,
            copy_threads=copy_threads)
        handle = ctypes.c_uint64()
        _checked(library.baton_agent_new(ctypes.byref(config), ctypes.byref(handle)))
        self.handle: int = handle.value
        self._finalizer = weakref.finalize(self, library.baton_agent_free, self.handle)
        self._region = region
        slots_out = ctypes.c_uint32()
        words = library.baton_status(self.handle, ctypes.byref(slots_out))
        table = (ctypes.c_uint64 * slots_out.value).from_address(words)
        self._status = memoryview(table).cast("B").cast("Q")
        self._events = (RawEvent * _EVENTS_PER_POLL)()
        self._lock = threading.Lock()

    def __enter__(self) -> "Agent":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._finalizer.alive:
            self.free()

    def free(self) -> None:
        """Ends the agent. Nothing uses the region after that.

        It waits for the agent's last messages, at most for a second, and for a copy that is
        running.
        """
        self._finalizer.detach()
        _checked(library.baton_agent_free(self.handle))

    @property
    def address(self) -> str:
        """The address of a source for its destinations."""
        return _text(lambda buffer, size: _checked(
            library.baton_address(self.handle, buffer, size)))

    def event_fd(self) -> int:
        """A descriptor that is readable while there are events. Do not close it.

        After `free`, its number can be that of another file.
        """
        return _checked(library.baton_event_fd(self.handle))

    def offer(self, room: int, ids: Sequence[int], within: float) -> int:
        """Offers the KV of a prompt, at a source.

        The request fails after `within` seconds, at most half an hour.
        """
        request = ctypes.c_uint64()
        _checked(library.baton_offer(
            self.handle, _number("room", room, 64), _numbers("ids", ids), len(ids),
            int(_seconds("within", within) * 1000), ctypes.byref(request)))
        return request.value

    def wish(self, room: int, source: str, ids: Sequence[int], within: float) -> int:
        """Asks a source for the KV of a prompt, at a destination."""
        request = ctypes.c_uint64()
        _checked(library.baton_wish(
            self.handle, _number("room", room, 64), source.encode(), _numbers("ids", ids),
            len(ids), int(_seconds("within", within) * 1000), ctypes.byref(request)))
        return request.value

    def lease(self, request: int, pages: Sequence[int], prefix: int = 0) -> None:
        """Leases pages to the transfer until `ENDED`; see `baton_lease` of the header."""
        _checked(library.baton_lease(
            self.handle, _number("request", request, 64), _number("prefix", prefix),
            _numbers("pages", pages), len(pages)))

    def compute(self, request: int, tokens: int) -> None:
        """The KV of the first `tokens` tokens is computed, at a source."""
        _checked(library.baton_compute(
            self.handle, _number("request", request, 64), _number("tokens", tokens)))

    def send_last(self, request: int, payload: bytes = b"") -> None:
        """Lets the last tokens leave, with these bytes, at a source."""
        _checked(library.baton_send_last(
            self.handle, _number("request", request, 64), payload, len(payload)))

    def cancel(self, request: int) -> None:
        """Ends a request, unless it has an outcome. Its events still come."""
        _checked(library.baton_cancel(self.handle, _number("request", request, 64)))

    def release(self, request: int) -> None:
        """Gives the slot of a request back, after `ENDED`."""
        _checked(library.baton_release(self.handle, _number("request", request, 64)))

    def poll(self) -> list[Event]:
        """The events that have come."""
        events: list[Event] = []
        with self._lock:
            while True:
                taken = _checked(library.baton_poll(self.handle, self._events, _EVENTS_PER_POLL))
                events += map(_event, self._events[:taken])
                if taken < _EVENTS_PER_POLL:
                    return events

    def wait(self, seconds: float) -> bool:
        """Waits until there are events, at most for a minute. False if the time is over. Handlers
        of signals run meanwhile."""
        until = time.monotonic() + min(_seconds("seconds", max(seconds, 0)), _WAIT_SECONDS_MAX)
        while True:
            left = max(until - time.monotonic(), 0)
            # A signal ends the call early.
            if _checked(library.baton_wait(self.handle, int(left * 1_000_000))):
                return True
            if time.monotonic() >= until:
                return False

    def state(self, request: int) -> State | None:
        """The state of a request, read from memory without a call. None after its release."""
        word = self._status[request & 0xFFFFFFFF]
        return State(word >> 37 & 7) if word >> 40 == request >> 32 else None

    def counters(self) -> Counters:
        """What the agent has done since its start."""
        raw = RawCounters(size=ctypes.sizeof(RawCounters))
        _checked(library.baton_counters(self.handle, ctypes.byref(raw)))
        return Counters(raw.open, raw.landed, raw.failed, raw.work_requests, raw.doorbells)


def _event(raw: RawEvent) -> Event:
    kind = EventKind(raw.kind)
    return Event(
        request=raw.request, room=raw.room, kind=kind,
        cause=cause_name(raw.cause) if kind is EventKind.FAILED else None,
        payload=bytes(raw.payload) if kind is EventKind.LANDED else None)
