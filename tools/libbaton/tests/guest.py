"""The library as a guest in the process of its caller. Each function is a check."""

import ctypes
import faulthandler
import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import _ctypes

from baton_kv import (
    Agent, BatonError, Element, ErrorCode, EventKind, Layout, LogLevel, Region, Role, State,
    _library, log_to)

PAGES, KIND = 16, bytes([5] * 32)
LAYOUT = Layout(pages=PAGES, page_size=4, layers=1, kv_heads=1, head_dim=2, element=Element.F32,
                token_stride=8, head_stride=8, kv_stride=32, layer_stride=64, page_stride=64)


def make(role, transport="shm", **more):
    region = Region(PAGES * 64)
    return region, Agent(role, region, LAYOUT, KIND, transports=[transport], **more)


def refusal(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except BatonError as error:
        return error.code
    return None


def kinds(agent, request, last, seconds=20.0):
    """The events of a request up to the kind `last`."""
    seen, until = [], time.monotonic() + seconds
    while not seen or seen[-1] != last:
        assert time.monotonic() < until, seen
        agent.wait(0.1)
        seen += [event.kind for event in agent.poll() if event.request == request]
    return seen


def tasks(count):
    """Name, blocked signals, and CPUs of the library's threads, of which there are `count`."""
    until = time.monotonic() + 20
    while len(found := named_tasks()) != count:
        assert time.monotonic() < until, found
        time.sleep(0.01)
    return found


def named_tasks():
    found = []
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if fields["Name"] in ("baton-ctl", "move-0"):
            found.append((fields["Name"], int(fields["SigBlk"], 16), fields["Cpus_allowed_list"]))
    return sorted(found)


def check_calls_after_a_free_are_errors():
    region, agent = make(Role.SOURCE)
    assert refusal(region.free) is ErrorCode.BUSY
    request = agent.offer(3, [1, 2, 3], 20)
    assert refusal(agent.release, request) is ErrorCode.OPEN
    assert refusal(agent.wish, 3, "127.0.0.1:9", [1], 20) is ErrorCode.ROLE
    assert refusal(agent.offer, 1 << 63, [1], 20) is ErrorCode.ARGUMENT
    assert refusal(agent.lease, request, [PAGES]) is ErrorCode.PAGES
    assert refusal(agent.send_last, request, bytes(189)) is ErrorCode.ARGUMENT
    assert agent.state(request) is State.BOOTSTRAPPING
    agent.cancel(request)
    assert refusal(agent.cancel, request) is ErrorCode.REPEATED
    assert kinds(agent, request, EventKind.ENDED) == [EventKind.FAILED, EventKind.ENDED]
    assert agent.state(request) is State.FAILED
    agent.release(request)
    assert refusal(agent.cancel, request) is ErrorCode.REQUEST
    assert agent.counters().failed == 1
    agent.free()
    # The status words stay mapped.
    agent.state(request)
    for call in (agent.poll, agent.free, agent.event_fd, agent.counters):
        assert refusal(call) is ErrorCode.HANDLE
    region.free()
    assert refusal(region.free) is ErrorCode.HANDLE


def check_wrong_settings_are_errors():
    region = Region(PAGES * 64)
    new = lambda layout=LAYOUT, **more: refusal(Agent, Role.SOURCE, region, layout, KIND, **more)
    assert new(host="0.0.0.0") is ErrorCode.ARGUMENT
    assert new(allow=["10.0.0.0/8"]) is ErrorCode.ARGUMENT
    assert new(host="0.0.0.0", key=bytes(31)) is ErrorCode.ARGUMENT
    assert new(transports=["shm", "post"]) is ErrorCode.ARGUMENT
    assert new(lanes=33) is ErrorCode.ARGUMENT
    assert new(cpus=[5000]) is ErrorCode.SYSTEM
    assert new(host="203.0.113.7", key=bytes(32)) is ErrorCode.SYSTEM
    # Its destinations would connect to themselves.
    assert new(host="0.0.0.0", key=bytes(32)) is ErrorCode.ARGUMENT
    assert new(host="::", key=bytes(32)) is ErrorCode.ARGUMENT
    for names in ([], [""], ["tcp", "tcp"]):
        assert new(transports=names) is ErrorCode.ARGUMENT, names
    assert new(allow=[]) is ErrorCode.ARGUMENT
    assert new(transports=["rdma"], devices=[]) is ErrorCode.ARGUMENT
    assert new(cpus=[0] * 9000) is ErrorCode.ARGUMENT
    large = Layout.from_buffer_copy(LAYOUT)
    large.pages = 10 * PAGES * 4096
    assert new(large) is ErrorCode.ARGUMENT
    # Pages that overlap fit any memory. Their number must not cost memory.
    large.pages, large.page_stride = 0xFFFFFFFF, 0
    assert new(large) is ErrorCode.ARGUMENT
    region.free()


def check_numbers_that_do_not_fit_are_refused():
    def refuses(call, *arguments, **named):
        try:
            call(*arguments, **named)
        except ValueError:
            return True
        return False

    region, agent = make(Role.SOURCE)
    for room in (-1, 1 << 64):
        assert refuses(agent.offer, room, [1], 20), room
    for ids in ([-1], [1, 1 << 32]):
        assert refuses(agent.offer, 3, ids, 20), ids
    for within in (-1, float("nan")):
        assert refuses(agent.offer, 3, [1], within), within
    request = agent.offer(3, range(4), 4_294_968.0)
    time.sleep(1.2)
    assert agent.state(request) is State.BOOTSTRAPPING
    for wrong in (-1, 1 << 32):
        assert refuses(agent.lease, request, [0], wrong)
        assert refuses(agent.lease, request, [wrong])
        assert refuses(agent.compute, request, wrong)
        assert refuses(Agent, Role.SOURCE, region, LAYOUT, KIND, slots=wrong)
        assert refuses(Layout, pages=wrong)
    assert refuses(agent.cancel, request + (1 << 64))
    started = time.monotonic()
    assert not agent.wait(-1) and time.monotonic() < started + 1
    assert refuses(Region, -1)
    agent.cancel(request)
    assert agent.wait(float("inf"))
    agent.free()
    region.free()


def check_a_signal_runs_its_handler_and_ends_no_wait():
    region, agent = make(Role.SOURCE)
    seen = []
    former = signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    started = time.monotonic()
    assert not agent.wait(0.5)
    ended = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)
    assert ended >= started + 0.5, ended - started
    assert seen and seen[0] < ended, "no handler ran during the wait"
    agent.free()
    region.free()


def check_wrong_pointers_have_no_effect():
    library, place = _library.library, (ctypes.c_uint64 * 4)()
    odd = ctypes.cast(ctypes.addressof(place) + 4, ctypes.POINTER(ctypes.c_uint64))
    config = ctypes.cast(ctypes.addressof(place) + 1, ctypes.POINTER(_library.Config))
    memory = ctypes.create_string_buffer(64)
    address = (ctypes.addressof(memory) + 7) // 8 * 8
    for out in (None, odd):
        for _ in range(70):
            assert library.baton_region_new(4096, out) == ErrorCode.ARGUMENT
            assert library.baton_region_adopt(address, 8, 0, out) == ErrorCode.ARGUMENT
    assert library.baton_agent_new(config, place) == ErrorCode.ARGUMENT
    region, agent = make(Role.SOURCE)
    events = ctypes.cast(ctypes.addressof(place) + 4, ctypes.POINTER(_library.RawEvent))
    assert library.baton_poll(agent.handle, events, 1) == ErrorCode.ARGUMENT
    agent.free()
    region.free()


def check_a_file_limit_is_an_error():
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, former[1]))
    assert refusal(Region, 2 << 20) is ErrorCode.SYSTEM
    Region(1 << 20).free()
    resource.setrlimit(resource.RLIMIT_FSIZE, former)


def check_errors_have_the_names_of_python():
    name = lambda number: _library.library.baton_error_name(number).decode()
    for code in ErrorCode:
        assert name(code) == code.name.lower()
    assert {name(number) for number in range(-64, -len(ErrorCode))} == {"unknown"}
    assert name(0) == name(7) == "none"


def check_a_forked_child_can_call_nothing():
    region, agent = make(Role.SOURCE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            codes = {refusal(call) for call in (agent.poll, agent.free, region.free)}
            codes.add(refusal(Region, 4096))
            code = 0 if codes == {ErrorCode.FORKED} else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    request = agent.offer(3, [1], 20)
    agent.cancel(request)
    kinds(agent, request, EventKind.ENDED)
    agent.free()
    region.free()


def check_threads_get_no_signals_and_have_cpus_of_their_own():
    every = os.sched_getaffinity(0)
    first = min(every)
    os.sched_setaffinity(0, [first])
    region, agent = make(Role.SOURCE)
    names, blocked, cpus = zip(*tasks(2))
    assert names == ("baton-ctl", "move-0"), names
    # The handlers of the process report a fault of a thread.
    assert not any(mask >> (signal.SIGSEGV - 1) & 1 for mask in blocked), blocked
    assert all(mask >> (signal.SIGPIPE - 1) & 1 for mask in blocked), blocked
    assert all(mask >> (signal.SIGTERM - 1) & 1 for mask in blocked), blocked
    assert len(every) == 1 or all(cpu != str(first) for cpu in cpus), cpus
    agent.free()
    tasks(0)
    agent = Agent(Role.SOURCE, region, LAYOUT, KIND, cpus=[max(every)])
    assert all(cpu == str(max(every)) for _, _, cpu in tasks(2)), tasks(2)
    agent.free()
    region.free()
    os.sched_setaffinity(0, every)


PEER = """
import sys, time
from guest import *
region, agent = make(Role.DESTINATION, "tcp")
request = agent.wish(4, sys.argv[1], list(range(40)), 60)
agent.lease(request, list(range(10)))
kinds(agent, request, EventKind.MET)
print("met", flush=True)
time.sleep(60)
"""


def check_a_peer_that_dies_ends_neither_the_process_nor_the_agent():
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL
    region, agent = make(Role.SOURCE, "tcp")
    request = agent.offer(4, list(range(40)), 60)
    agent.lease(request, list(range(10)))
    peer = subprocess.Popen([sys.executable, "-c", PEER, agent.address], stdout=subprocess.PIPE)
    assert peer.stdout.readline() == b"met\n"
    kinds(agent, request, EventKind.MET)
    peer.kill()
    for tokens in range(1, 41):
        agent.compute(request, tokens)
    assert kinds(agent, request, EventKind.ENDED) == [EventKind.FAILED, EventKind.ENDED]
    agent.release(request)
    peer.wait()
    agent.free()
    region.free()


def check_log_lines_go_to_a_callback_that_delays_no_transfer():
    lines, is_over = [], threading.Event()

    def write(level, line):
        is_over.wait()
        lines.append((level, line))

    log_to(write, LogLevel.INFO)
    source_region, source = make(Role.SOURCE)
    region, agent = make(Role.DESTINATION)
    request = agent.wish(4, source.address, [1, 2], 20)
    agent.lease(request, [0])
    offered = source.offer(4, [1, 2], 20)
    source.lease(offered, [0])
    source.compute(offered, 2)
    source.send_last(offered)
    assert EventKind.LANDED in kinds(agent, request, EventKind.ENDED)
    for one, memory in ((agent, region), (source, source_region)):
        one.free()
        memory.free()
    assert not lines
    is_over.set()
    log_to(None)
    chosen = [line for level, line in lines if "transport=shm" in line and level == LogLevel.INFO]
    assert len(chosen) == 2, lines


BLOCK = 4 << 20
LARGE = Layout(pages=PAGES, page_size=1, layers=1, kv_heads=1, head_dim=BLOCK // 4,
               element=Element.F16, page_stride=BLOCK, layer_stride=PAGES * BLOCK,
               kv_stride=BLOCK // 2, head_stride=BLOCK, token_stride=BLOCK)
HASTY = """
from guest import *
region = Region(PAGES * BLOCK)
agent = Agent(Role.SOURCE, region, LARGE, KIND, transports=["tcp"])
print(agent.address, flush=True)
ids = list(range(PAGES))
request = agent.offer(1, ids, 20)
agent.lease(request, ids)
agent.compute(request, PAGES)
agent.send_last(request)
assert EventKind.LANDED in kinds(agent, request, EventKind.ENDED)
agent.free()
"""


def check_a_source_that_ends_early_loses_no_bytes():
    """Its last bytes are still on their way when its own request has ended."""
    for _ in range(4):
        source = subprocess.Popen([sys.executable, "-c", HASTY], stdout=subprocess.PIPE, text=True)
        address = source.stdout.readline().strip()
        region = Region(PAGES * BLOCK)
        with Agent(Role.DESTINATION, region, LARGE, KIND, transports=["tcp"]) as agent:
            request = agent.wish(1, address, list(range(PAGES)), 20)
            agent.lease(request, list(range(PAGES)))
            assert EventKind.LANDED in kinds(agent, request, EventKind.ENDED)
        region.free()
        assert source.wait() == 0


def check_threads_call_at_the_same_time():
    region, agent = make(Role.SOURCE, slots=64)
    ended, lock = set(), threading.Lock()

    def run(first):
        for room in range(first, first + 50):
            request = None
            while request is None:
                try:
                    request = agent.offer(room, [1, 2, 3], 20)
                except BatonError as error:
                    assert error.code is ErrorCode.FULL
                    time.sleep(0.001)
            agent.cancel(request)

    def drain():
        while len(ended) < 200:
            agent.wait(0.05)
            for event in agent.poll():
                if event.kind is EventKind.ENDED:
                    agent.release(event.request)
                    with lock:
                        assert event.room not in ended
                        ended.add(event.room)

    threads = [threading.Thread(target=run, args=(first,)) for first in (0, 50, 100, 150)]
    threads += [threading.Thread(target=drain) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == set(range(200))
    agent.free()
    region.free()


def check_memory_of_the_caller_is_handed_over_in_place():
    """The memory begins and ends inside memory pages. Bytes beside it stay as they are."""
    pages, page = 9, 4 * 2 * 4 * 170
    layout = Layout(pages=pages, page_size=4, layers=1, kv_heads=1, head_dim=170,
                    element=Element.F32, token_stride=680, head_stride=680, kv_stride=2720,
                    layer_stride=5440, page_stride=page)
    size = pages * page
    for remap, transport in ((True, "shm"), (True, "tcp"), (False, "tcp")):
        blocks = [ctypes.create_string_buffer(size + 4096) for _ in range(2)]
        starts = [(ctypes.addressof(block) + 15) // 8 * 8 for block in blocks]
        for block, byte in zip(blocks, (1, 2)):
            ctypes.memset(block, byte, len(block))
        content = bytes(number % 253 for number in range(size))
        ctypes.memmove(starts[0], content, size)
        regions = [Region.adopt(starts[0], size, remap=remap), Region.adopt(starts[1], size)]
        with (
            Agent(Role.SOURCE, regions[0], layout, KIND, transports=[transport]) as source,
            Agent(Role.DESTINATION, regions[1], layout, KIND, transports=[transport]) as to,
        ):
            ids, order = list(range(4 * pages)), list(range(pages))
            wished = to.wish(9, source.address, ids, 20)
            to.lease(wished, order)
            offered = source.offer(9, ids, 20)
            source.lease(offered, order)
            # What is written after the adoption is handed over.
            ctypes.memset(starts[0] + size - 100, 77, 100)
            content = content[:-100] + bytes([77] * 100)
            source.compute(offered, len(ids))
            source.send_last(offered)
            assert EventKind.LANDED in kinds(to, wished, EventKind.ENDED), transport
            kinds(source, offered, EventKind.ENDED)
        for region in regions:
            region.free()
        for block, start, byte in zip(blocks, starts, (1, 2)):
            whole, before = bytes(block), start - ctypes.addressof(block)
            assert whole[before:before + size] == content, (remap, transport)
            assert set(whole[:before] + whole[before + size:]) == {byte}, (remap, transport)
    borrowed = Region.adopt(starts[0], size, remap=False)
    assert refusal(Agent, Role.SOURCE, borrowed, layout, KIND) is ErrorCode.SYSTEM
    assert refusal(Region.adopt, starts[0] + 1, size) is ErrorCode.ARGUMENT
    borrowed.free()


def check_memory_that_cannot_move_is_refused():
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(base, 1, 4 * page)
    region = Region.adopt(base, 4 * page)
    ctypes.memset(base, 9, 4 * page)
    for remap in (True, False):
        assert refusal(Region.adopt, base + page, page, remap=remap) is ErrorCode.ARGUMENT
    # Private memory cannot be had. The region stays, and the call can be repeated.
    former = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 16, former[1]))
    refused = refusal(region.free)
    resource.setrlimit(resource.RLIMIT_DATA, former)
    assert refused is ErrorCode.SYSTEM
    assert Path("/proc/self/maps").read_text().count("baton-adopted") == 1
    agent = Agent(Role.SOURCE, region, LAYOUT, KIND, transports=["shm"])
    assert refusal(region.free) is ErrorCode.BUSY
    agent.free()
    region.free()
    assert "baton-adopted" not in Path("/proc/self/maps").read_text()
    assert ctypes.string_at(base, 4 * page) == bytes([9]) * 4 * page
    # Another process would keep the former pages.
    shared = mmap.mmap(-1, 4 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    assert refusal(Region.adopt, base, 4 * page) is ErrorCode.ARGUMENT
    Region.adopt(base, 4 * page, remap=False).free()


def check_what_the_program_drops_is_freed():
    region, agent = make(Role.SOURCE)
    tasks(2)
    view = region.memory()
    del region, agent
    gc.collect()
    tasks(0)
    # A view keeps the memory.
    view[:] = bytes(len(view))
    assert "memfd:baton-kv" in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert "memfd:baton-kv" not in Path("/proc/self/maps").read_text()
    region, agent = make(Role.SOURCE)
    try:
        with agent:
            agent.free()
            raise KeyError
    except KeyError:
        pass
    region.free()


EXIT = """
from guest import *
lines = []
log_to(lambda level, line: lines.append(line), LogLevel.DEBUG)
region, agent = make(Role.SOURCE, "tcp")
memory = ctypes.create_string_buffer(8192)
adopted = Region.adopt((ctypes.addressof(memory) + 7) // 8 * 8, 8000)
host, port = agent.address.split(":")
peer = subprocess.Popen([sys.executable, "-c", f'''
import socket, time
until = time.monotonic() + 10
try:
    while time.monotonic() < until:
        with socket.create_connection(("{host}", {port})) as peer:
            peer.send(b"x" * 80)
except OSError:
    pass
'''])
while len(lines) < 10:
    time.sleep(0.01)

class Slow:
    def __del__(self):
        time.sleep(0.3)

slow = Slow()
"""


def check_a_program_can_exit_with_an_agent():
    ended = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stderr, ended


def check_the_code_stays_when_the_library_is_closed():
    region, agent = make(Role.SOURCE)
    address = ctypes.cast(_library.library.baton_abi, ctypes.c_void_p).value
    _ctypes.dlclose(_library.library._handle)
    assert ctypes.CFUNCTYPE(ctypes.c_uint32)(address)() == _library.ABI
    agent.free()
    region.free()


def main():
    checks = [(name, check) for name, check in globals().items() if name.startswith("check_")]
    for name, check in checks:
        check()
        print(name)
    print(len(checks), "checks passed")


if __name__ == "__main__":
    # Python ignores the signal, most programs do not.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    faulthandler.dump_traceback_later(120, exit=True)
    main()
