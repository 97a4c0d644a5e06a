"""Figures of a pair with Baton and of a pair with NIXL, in turn. Only ratios mean something."""
import collections, concurrent.futures, contextlib, ctypes, json, mmap, os, signal, socket
import statistics, threading, time

from behind import check
from pair_requests import post, prefilled, prompt
from pair_servers import ALONE, DECODE, PREFILL

BATON, NIXL, EMPTY = "BatonConnector", "NixlConnector", "EmptyConnector"
LOADS = 12
# Of each server after a start.
TURNS = 4
# What the table promises.
STEP_MICROSECONDS, CPU_RATIO = 50, 1.03
LOAD_RATIO, COPY_RATIO, COPY_SECONDS, FAT_RATIO = 0.6, 1.15, 0.005, 0.6
SOCKETS_RATIO, TCP_RATIO = 1.35, 0.8
# As many bytes as 4,096 tokens in 16 bits. Prefill of those takes a minute here.
FAT_TOKENS, FAT_BYTES = 2048, 2048 * 28 * 2 * 8 * 128 * 4


def lines(pair, what):
    """What the timers have noted since the last call."""
    path = pair.folder / "timers.jsonl"
    found = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
    path.unlink(missing_ok=True)
    return [one for one in found if one["what"] == what]


def show(name, values, unit="ms", scale=1e3):
    words = " ".join(f"{value * scale:.2f}" for value in values)
    print(f"       {name:44} {words} {unit}", flush=True)


def spread(values):
    return max(values) - min(values)


# --- nothing is handed over ----------------------------------------------------------------------

def cpu_seconds(server):
    """Of all processes of a server."""
    total = 0
    for part in ("api", "engine", "worker"):
        with open(f"/proc/{server.pid_of(part)}/stat") as stat:
            words = stat.read().rsplit(")", 1)[1].split()
        total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def generate(server, streams=8, tokens=100):
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        for answer in pool.map(lambda number: post(server, prompt(number), max_tokens=tokens),
                               range(streams)):
            assert answer.status == 200
    return streams * tokens


class Turns:
    """Servers that run in turn, each with another connector. The others are stopped."""

    def __init__(self, pair, connectors):
        self.pair = pair
        self.seconds, self.steps = ([[] for _ in connectors] for _ in range(2))
        self.servers = pair.need(*(ALONE.but(
            name=f"alone{number}", role="kv_both", connector=one and f"Timed{one}",
            model="smollm2") for number, one in enumerate(connectors)))
        for server in self.servers:
            generate(server, tokens=20)
            server.signal(signal.SIGSTOP)

    def run(self):
        for server, seconds, steps in zip(self.servers, self.seconds, self.steps):
            server.signal(signal.SIGCONT)
            lines(self.pair, "steps")
            before = cpu_seconds(server)
            tokens = generate(server)
            seconds.append((cpu_seconds(server) - before) / tokens)
            server.signal(signal.SIGSTOP)
            found = lines(self.pair, "steps")
            if found:
                steps.append(per_step(found, "SCHEDULER") + per_step(found, "WORKER"))


@check
def a_connector_that_has_nothing_to_do_costs_little(pair):
    seconds = {name: [] for name in ("", EMPTY, BATON)}
    steps = {name: [] for name in seconds}
    for _ in range(pair.options.starts):
        turns = Turns(pair, seconds)
        for _ in range(TURNS):
            turns.run()
        pair.end()
        for name, values, calls in zip(seconds, turns.seconds, turns.steps):
            seconds[name] += values
            steps[name] += [sum(one.values()) for one in calls]
            if calls:
                show(f"calls of {name}", [], ", ".join(
                    f"{call} {each * 1e6:.0f} µs" for call, each in calls[-1].most_common(8)))
    for name in seconds:
        show(f"CPU time a token, {name or 'no connector'}", seconds[name])
        show(f"a step, {name or 'no connector'}", steps[name], "µs", 1e6)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    timers, step = (statistics.median(steps[name]) for name in (EMPTY, BATON))
    words = (f"{(step - timers) * 1e6:.0f} µs a step above {timers * 1e6:.0f} µs of the timers, "
             f"CPU time of no connector x {middle[BATON] / middle['']:.3f}, "
             f"of an empty one x {middle[BATON] / middle[EMPTY]:.3f}")
    assert step - timers <= STEP_MICROSECONDS / 1e6, words
    assert middle[BATON] <= CPU_RATIO * middle[""], words
    return words


def per_step(found, role):
    """Seconds of a step in each call."""
    first, *_, last = [one for one in found if one["role"] == role]
    steps = 1e9 * (last["steps"] - first["steps"])
    return collections.Counter(
        {name: (ns - first["ns"].get(name, 0)) / steps for name, ns in last["ns"].items()})


@check
def remapped_memory_is_as_fast(pair):
    """Decode at 4k context, with memory that peers can map and without. Shown only."""
    words = []
    text = prompt(1, 80)[:4000]
    times = {"shm,tcp": [], "tcp": []}
    for _ in range(pair.options.starts):
        for transports, values in times.items():
            server, = pair.need(ALONE.but(
                role="kv_both", connector=BATON, model="fat", transports=transports, length=4200))
            post(server, text, max_tokens=1)
            began = time.monotonic()
            assert post(server, text, max_tokens=65).status == 200
            values.append((time.monotonic() - began) / 65)
    for transports, values in times.items():
        show(f"a token at 4k, {'remapped' if 'shm' in transports else 'as it was'}", values)
        words.append(f"{statistics.median(values) * 1e3:.2f} ms")
    return " and ".join(words)


# --- one load ------------------------------------------------------------------------------------

def loads(pair, connector, setup, texts, is_waiting, bare=None):
    """Times of some loads of a pair. `bare` runs once in the step of each load, before it."""
    prefill, decode = pair.need(
        PREFILL.but(connector=connector, **setup),
        DECODE.but(connector=f"Timed{connector}", policy="fail", **setup,
                   more=("--no-enable-prefix-caching",)))
    wait = pair.folder / "wait"
    wait.touch() if is_waiting else wait.unlink(missing_ok=True)
    for number, text in enumerate([texts[0], *texts]):
        if number == 1:
            # The first one has the handshake.
            lines(pair, "load")
        with beside(pair, bare):
            assert post(decode, text, prefilled(prefill, text), max_tokens=1).status == 200
    found = lines(pair, "load" if is_waiting else "alloc")
    wait.unlink(missing_ok=True)
    assert len(found) == len(texts), (len(found), len(texts))
    return found


@contextlib.contextmanager
def beside(pair, bare):
    """Runs `bare` while decode waits for it."""
    if bare is None:
        yield
        return
    turn = pair.folder / "turn"
    turn.touch()

    def run():
        until = time.monotonic() + 60
        while turn.read_text() != "taken":
            assert time.monotonic() < until, "no step takes the turn"
            time.sleep(0.001)
        bare.run()
        turn.unlink()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


def text_of_512_tokens(number):
    return [number, *range(1000, 1511)]


@check
def a_load_of_512_tokens_is_faster_than_by_nixl(pair):
    setup = {"model": "smollm2"}
    medians, whole, steps = ({BATON: [], NIXL: []} for _ in range(3))
    texts = [text_of_512_tokens(number) for number in range(LOADS)]
    for _ in range(pair.options.starts):
        for connector in (BATON, NIXL):
            found = loads(pair, connector, setup, texts, True)
            medians[connector].append(statistics.median(one["seconds"] for one in found))
            found = loads(pair, connector, setup, texts, False)
            whole[connector].append(statistics.median(one["seconds"] for one in found))
            steps[connector].append(statistics.mean(one["steps"] for one in found))
    for connector in (BATON, NIXL):
        show(f"load call to completion, {connector}", medians[connector])
        show(f"allocation to finished_recving, {connector}", whole[connector])
        show("in engine steps", steps[connector], "", 1)
    middle = {name: statistics.median(values) for name, values in medians.items()}
    ratio = middle[BATON] / middle[NIXL]
    ends = {name: statistics.median(values) for name, values in whole.items()}
    assert ratio <= LOAD_RATIO, f"{ratio:.2f} x NIXL"
    assert ends[BATON] <= ends[NIXL] + spread(whole[NIXL]), ends
    return (f"{ratio:.2f} x NIXL; whole {ends[BATON] * 1e3:.1f} ms, NIXL {ends[NIXL] * 1e3:.1f} ms "
            f"with spread {spread(whole[NIXL]) * 1e3:.1f} ms")


# --- 470 MB --------------------------------------------------------------------------------------

class Copy:
    """A bare copy of as many bytes, from and into memory that is in use."""

    def __init__(self):
        self.seconds = []
        self.maps = [mmap.mmap(-1, FAT_BYTES) for _ in range(2)]
        self.at = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in self.maps]
        self.copy()

    def copy(self):
        ctypes.memmove(*self.at, FAT_BYTES)

    def run(self):
        began = time.monotonic()
        self.copy()
        self.seconds.append(time.monotonic() - began)

    def end(self):
        pass


class Sockets:
    """As many bytes through bare sockets, by two processes."""

    def __init__(self, lanes=2):
        self.seconds = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.child = os.fork()
        if self.child == 0:
            try:
                send_all(listener.getsockname(), lanes)
            finally:
                os._exit(0)
        self.ends = [listener.accept()[0] for _ in range(lanes)]
        self.buffers = [memoryview(bytearray(FAT_BYTES // lanes)) for _ in self.ends]
        self.copy()

    def copy(self):
        threads = [threading.Thread(target=receive, args=one)
                   for one in zip(self.ends, self.buffers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run = Copy.run

    def end(self):
        for one in self.ends:
            one.close()
        os.waitpid(self.child, 0)


def receive(end, buffer):
    end.sendall(b"!")
    while buffer:
        buffer = buffer[end.recv_into(buffer):]


def send_all(address, lanes):
    data = bytearray(FAT_BYTES // lanes)

    def lane():
        with socket.create_connection(address) as end:
            while end.recv(1):
                end.sendall(data)

    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fat(pair, transports, environment, kind):
    """Medians: loads by Baton and by NIXL, the bare way beside engines, and without any engine."""
    text = [number % 250 for number in range(FAT_TOKENS)]
    setup = {"model": "fat", "length": FAT_TOKENS + 64, "transports": transports,
             "environment": environment}
    medians, bares, idle = {BATON: [], NIXL: []}, [], []
    for _ in range(pair.options.starts):
        for connector, values in medians.items():
            bare = kind()
            found = loads(pair, connector, setup, [text] * 6, True, bare)
            values.append(statistics.median(one["seconds"] for one in found))
            bares.append(statistics.median(bare.seconds))
            pair.end()
            bare.seconds.clear()
            for _ in range(5):
                bare.run()
            idle.append(statistics.median(bare.seconds))
            bare.end()
    name = kind.__name__.lower()
    for words, values in (*medians.items(), (f"bare {name}", bares), (f"{name}, idle", idle)):
        show(f"{FAT_BYTES / 1e6:.0f} MB over {transports}, {words}", values)
    return [statistics.median(one) for one in (medians[BATON], medians[NIXL], bares, idle)]


def compare(medians):
    ours, nixl, bare, idle = medians
    return (f"{ours / bare:.2f} x the bare way beside engines, {ours / idle:.2f} x without any, "
            f"{ours / nixl:.2f} x NIXL")


@check
def a_load_of_470_mb_over_shm(pair):
    ours, nixl, bare, _ = medians = fat(pair, "shm", (), Copy)
    assert ours <= COPY_RATIO * bare + COPY_SECONDS and ours <= FAT_RATIO * nixl, compare(medians)
    return compare(medians)


@check
def a_load_of_470_mb_over_tcp(pair):
    ours, nixl, bare, _ = medians = fat(pair, "tcp", (("UCX_TLS", "tcp"),), Sockets)
    assert ours <= SOCKETS_RATIO * bare and ours <= TCP_RATIO * nixl, compare(medians)
    return compare(medians)
