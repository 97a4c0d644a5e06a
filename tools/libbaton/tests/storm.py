"""A storm of the library: two sources and a destination hand over, are killed and stand still.

    python storm.py SECONDS [--transports shm,tcp] [--seed N] [--cancel-within S] [--early]

Each process fills the pages that it gets back with a guard, and checks the guard before it uses
them again. A destination checks all bytes of what has landed. `--early` plants a mistake: the
processes use pages again when they cancel, without waiting for `ENDED`. Then the storm must fail.
Requests are cancelled within S seconds of their start, of MET or of the begin of their transfer:
about the time that a hand-over takes.
Prints the outcomes; status 1 if a byte is wrong, or a request has no end.
"""

import argparse
import hashlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from baton_kv import (
    Agent, BatonError, Element, ErrorCode, EventKind, Layout, LogLevel, Region, Role, State,
    log_to)

PAGES, LAYERS, BLOCK, TOKENS_MAX, SLOTS = 96, 2, 128 << 10, 24, 12
SECONDS = 5.0
END_SECONDS = 15.0
# Most attempts that one process has at a time, and the time between two of them.
OPEN_MAX, PAUSE = 20, 0.004
KILL_SECONDS, STOP_SECONDS = 2.5, 1.5
START_SECONDS = 120.0
# From when on the time of a cancel counts. The first one cancels at once.
CANCELS = ["transfer", "met", "met", "start"]


def layout() -> Layout:
    """A page of one token: a block for each layer, of two halves."""
    return Layout(
        pages=PAGES, page_size=1, layers=LAYERS, kv_heads=1, head_dim=BLOCK // 4,
        element=Element.F16, page_stride=LAYERS * BLOCK, layer_stride=BLOCK,
        kv_stride=BLOCK // 2, head_stride=BLOCK, token_stride=BLOCK)


def pattern(*words: object) -> bytes:
    """The bytes of a page."""
    digest = hashlib.sha256(repr(words).encode()).digest()
    return digest * (LAYERS * BLOCK // len(digest))


class Memory:
    """The pages of a process."""

    def __init__(self) -> None:
        self.region = Region(PAGES * LAYERS * BLOCK)
        self.bytes = self.region.memory()
        self.guards: dict[int, bytes] = {}
        self.count = 0
        self.give_back(range(PAGES))

    def write(self, page: int, data: bytes) -> None:
        self.bytes[page * LAYERS * BLOCK:(page + 1) * LAYERS * BLOCK] = data

    def holds(self, page: int, data: bytes) -> bool:
        return self.bytes[page * LAYERS * BLOCK:(page + 1) * LAYERS * BLOCK] == data

    def take(self, count: int) -> list[int] | None:
        if len(self.guards) < count:
            return None
        pages = random.sample(sorted(self.guards), count)
        for page in pages:
            self.check(page)
            del self.guards[page]
        return pages

    def give_back(self, pages: Any) -> None:
        for page in pages:
            self.count += 1
            self.guards[page] = pattern("guard", os.getpid(), self.count)
            self.write(page, self.guards[page])

    def check(self, page: int) -> None:
        if not self.holds(page, self.guards[page]):
            tell(wrong=f"page {page} was written while it was free")
            self.write(page, self.guards[page])

    def check_all(self) -> None:
        for page in self.guards:
            self.check(page)


def tell(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class Engine:
    """The engine of a process: it follows the orders on its standard input."""

    def __init__(self, role: Role, transports: list[str], is_early: bool) -> None:
        self.role, self.is_early = role, is_early
        log_to(None, LogLevel.ERROR)
        self.memory = Memory()
        self.agent = Agent(role, self.memory.region, layout(), bytes(32), transports=transports,
                           slots=SLOTS, prompt_pages=TOKENS_MAX)
        self.open: dict[int, dict[str, Any]] = {}
        self.waiting: list[dict[str, Any]] = []
        tell(address=self.agent.address if role is Role.SOURCE else "")

    def run(self) -> None:
        buffer, is_over = b"", False
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self.agent.event_fd(), select.POLLIN)
        while not (is_over and not self.open and not self.waiting):
            for descriptor, _ in poll.poll(1):
                if descriptor == 0:
                    data = os.read(0, 1 << 16)
                    is_over |= not data
                    if not data:
                        poll.unregister(0)
                    *lines, buffer = (buffer + data).split(b"\n")
                    self.waiting += map(json.loads, lines)
            self.turn()
        self.memory.check_all()
        self.agent.free()
        self.memory.give_back([page for page in range(PAGES) if page not in self.memory.guards])
        time.sleep(0.5)
        self.memory.check_all()
        tell(closed=True)

    def turn(self) -> None:
        now = time.monotonic()
        for event in self.agent.poll():
            self.take(event, now)
        self.waiting = [attempt for attempt in self.waiting if not self.begin(attempt, now)]
        for request, attempt in list(self.open.items()):
            self.advance(request, attempt, now)

    def begin(self, attempt: dict[str, Any], now: float) -> bool:
        pages = self.memory.take(attempt["tokens"])
        if pages is None:
            return False
        ids = [attempt["room"] & 0xFFFF_FFFF] * attempt["tokens"]
        try:
            if self.role is Role.SOURCE:
                request = self.agent.offer(attempt["room"], ids, SECONDS)
            else:
                request = self.agent.wish(attempt["room"], attempt["address"], ids, SECONDS)
        except BatonError as error:
            self.memory.give_back(pages)
            if error.code is not ErrorCode.FULL:
                raise
            return False
        cancel_at = now + attempt["cancel"] if attempt["since"] == "start" else 1e9
        attempt |= {"pages": pages, "began": now, "computed": 0, "landed": False, "end": None,
                    "early": False, "cancel_at": cancel_at}
        if self.role is Role.DESTINATION:
            self.agent.lease(request, pages)
        self.open[request] = attempt
        return True

    def advance(self, request: int, attempt: dict[str, Any], now: float) -> None:
        tokens, pages = attempt["tokens"], attempt["pages"]
        if attempt["end"] is None and now > attempt["began"] + SECONDS + END_SECONDS:
            tell(wrong=f"{attempt['room']} has no outcome in time")
            attempt["end"] = now
        if attempt["end"] is not None:
            return
        is_moving = self.agent.state(request) is State.TRANSFERRING
        if is_moving and attempt["since"] == "transfer" and not attempt["early"]:
            attempt["cancel_at"] = now + attempt["cancel"]
            attempt["since"] = ""
        if now >= attempt["cancel_at"]:
            attempt["cancel_at"] = 1e9
            self.agent.cancel(request)
            if self.is_early:
                self.memory.give_back(pages)
                attempt["early"] = True
            return
        if self.role is Role.SOURCE and attempt["computed"] < tokens and not attempt["early"]:
            until = min(tokens, attempt["computed"] + attempt["chunk"])
            self.agent.lease(request, pages[attempt["computed"]:until])
            for token in range(attempt["computed"], until):
                self.memory.write(pages[token], pattern(attempt["room"], token))
            attempt["computed"] = until
            self.agent.compute(request, until)
            if until == tokens:
                self.agent.send_last(request, str(attempt["room"]).encode())

    def take(self, event: Any, now: float) -> None:
        attempt = self.open[event.request]
        if event.kind is EventKind.MET and attempt["since"] == "met":
            attempt["cancel_at"] = now + attempt["cancel"]
        if event.kind is EventKind.LANDED:
            attempt["landed"], attempt["end"] = True, now
            payload = (event.payload or b"").rstrip(b"\0")
            if self.role is Role.DESTINATION and payload != str(attempt["room"]).encode():
                tell(wrong=f"{attempt['room']} has the payload {payload!r}")
        elif event.kind is EventKind.FAILED:
            attempt["end"], attempt["cause"] = now, event.cause
        elif event.kind is EventKind.ENDED:
            if attempt["landed"] and self.role is Role.DESTINATION and not attempt["early"]:
                for token, page in enumerate(attempt["pages"]):
                    if not self.memory.holds(page, pattern(attempt["room"], token)):
                        tell(wrong=f"{attempt['room']} has landed with other bytes")
                        break
            if not attempt["early"]:
                self.memory.give_back(attempt["pages"])
            self.agent.release(event.request)
            del self.open[event.request]
            tell(room=attempt["room"], outcome=attempt.get("cause", "landed"))


class Child:
    """A process of the storm, which is started again when it has been killed."""

    def __init__(self, role: str, words: list[str], take: Any) -> None:
        self.role, self.words, self.take = role, words, take
        self.start()

    def start(self) -> None:
        self.address: str | None = None
        self.open = 0
        self.process = subprocess.Popen(
            [sys.executable, "-B", __file__, f"--role={self.role}", *self.words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.reader = threading.Thread(target=self.read, args=(self.process,), daemon=True)
        self.reader.start()

    def read(self, process: Any) -> None:
        for line in process.stdout:
            fields = json.loads(line)
            if "address" in fields:
                self.address = fields["address"]
            else:
                self.take(self, fields)

    def order(self, attempt: dict[str, Any]) -> None:
        self.open += 1
        try:
            self.process.stdin.write(json.dumps(attempt).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass


class Storm:
    """The attempts, and what becomes of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.outcomes: dict[str, int] = {}
        self.wrong: list[str] = []
        self.closed = 0
        self.cancel_within = arguments.cancel_within
        words = ["1", f"--transports={arguments.transports}"]
        words += ["--early"] if arguments.early else []
        roles = ("source", "source", "destination")
        self.children = [Child(role, words, self.take) for role in roles]

    def take(self, child: Child, fields: dict[str, Any]) -> None:
        if "wrong" in fields:
            self.wrong.append(fields["wrong"])
        elif "closed" in fields:
            self.closed += 1
        else:
            child.open -= 1
            name = f"{child.role} {fields['outcome']}"
            self.outcomes[name] = self.outcomes.get(name, 0) + 1

    def hurt(self, dice: random.Random) -> None:
        """Kills a process, or lets it stand still."""
        child = dice.choice(self.children)
        if dice.random() < 0.5:
            child.process.kill()
            child.process.wait()
            child.start()
            return
        child.process.send_signal(signal.SIGSTOP)
        time.sleep(dice.uniform(0, STOP_SECONDS))
        child.process.send_signal(signal.SIGCONT)

    def is_up(self) -> bool:
        return all(child.address is not None for child in self.children)

    def run(self, seconds: float, dice: random.Random) -> None:
        begun = time.monotonic()
        while not self.is_up():
            assert time.monotonic() < begun + START_SECONDS, "a process does not start"
            time.sleep(PAUSE)
        until, hurts_at, room = time.monotonic() + seconds, time.monotonic() + KILL_SECONDS, 0
        *sources, destination = self.children
        while time.monotonic() < until:
            time.sleep(PAUSE)
            if not self.is_up():
                hurts_at = time.monotonic() + dice.uniform(0, 2 * KILL_SECONDS)
            elif time.monotonic() > hurts_at:
                self.hurt(dice)
                hurts_at = time.monotonic() + dice.uniform(0, 2 * KILL_SECONDS)
            source = dice.choice(sources)
            is_full = max(source.open, destination.open) >= OPEN_MAX
            if not source.address or destination.address is None or is_full:
                continue
            room += 1
            tokens = dice.choice([dice.randint(1, TOKENS_MAX), TOKENS_MAX])
            attempt = {"room": room, "tokens": tokens, "address": source.address,
                       "chunk": dice.randint(1, TOKENS_MAX)}
            for child in dice.sample([source, destination], 2):
                cancel = dice.uniform(0, self.cancel_within) if dice.random() < 0.5 else 1e9
                since = dice.choice(CANCELS)
                if since == "transfer" and cancel < 1e9:
                    cancel = 0
                child.order({**attempt, "cancel": cancel, "since": since})
        for child in self.children:
            child.process.stdin.close()
        for child in self.children:
            child.process.wait(120)
            child.reader.join(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cancel-within", type=float, default=0.004)
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--role", choices=["source", "destination"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        role = Role.SOURCE if arguments.role == "source" else Role.DESTINATION
        Engine(role, arguments.transports.split(","), arguments.early).run()
        return 0
    storm = Storm(arguments)
    storm.run(arguments.seconds, random.Random(arguments.seed))
    for name, count in sorted(storm.outcomes.items()):
        print(f"{count:7} {name}")
    for wrong in storm.wrong[:10]:
        print("wrong:", wrong)
    is_well = not storm.wrong and storm.closed == len(storm.children)
    print("well" if is_well else f"{len(storm.wrong)} wrong, {storm.closed} closed")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
