"""`python -m baton_kv doctor`: checks that the library works on this host."""

import sys
import time

from . import Agent, BatonError, Element, EventKind, Layout, LogLevel, Region, Role, log_to
from ._library import ABI, path

_PAGES, _PAGE_SIZE, _TOKENS, _HEAD = 16, 16, 200, 64


def _layout() -> Layout:
    token = _HEAD * 4
    return Layout(
        pages=_PAGES, page_size=_PAGE_SIZE, layers=1, kv_heads=1, head_dim=_HEAD,
        element=Element.F32, token_stride=token, head_stride=token * _PAGE_SIZE,
        kv_stride=token * _PAGE_SIZE, layer_stride=2 * token * _PAGE_SIZE,
        page_stride=2 * token * _PAGE_SIZE)


def _await_end(agent: Agent, until: float) -> str:
    outcome = "nothing came"
    while time.monotonic() < until:
        agent.wait(0.2)
        for event in agent.poll():
            if event.kind is EventKind.LANDED:
                outcome = ""
            elif event.kind is EventKind.FAILED:
                outcome = f"it failed: {event.cause}"
            elif event.kind is EventKind.ENDED:
                agent.release(event.request)
                return outcome
    return outcome


def _try(transport: str) -> str:
    """Hands over one prompt inside this process. Returns what went wrong, or nothing."""
    size = _PAGES * _layout().page_stride
    regions = [Region(size), Region(size)]
    kind = bytes(range(32))
    try:
        with (
            Agent(Role.SOURCE, regions[0], _layout(), kind, transports=[transport]) as source,
            Agent(Role.DESTINATION, regions[1], _layout(), kind, transports=[transport]) as to,
        ):
            regions[0].memory()[:] = bytes(byte % 251 for byte in range(256)) * (size // 256)
            ids, pages = list(range(_TOKENS)), list(range(13))
            offered = source.offer(1, ids, 10)
            wished = to.wish(1, source.address, ids, 10)
            to.lease(wished, pages)
            source.lease(offered, pages)
            source.compute(offered, _TOKENS)
            source.send_last(offered)
            until = time.monotonic() + 10
            wrong = _await_end(to, until) or _await_end(source, until)
            # The last page is not full: its rest is not handed over.
            whole = 12 * _layout().page_stride
            if not wrong and regions[0].memory()[:whole] != regions[1].memory()[:whole]:
                wrong = "bytes differ"
            return wrong
    except BatonError as error:
        return str(error)
    finally:
        for region in regions:
            region.free()


def main() -> int:
    if sys.argv[1:] != ["doctor"]:
        print("usage: python -m baton_kv doctor", file=sys.stderr)
        return 2
    print(f"library {path()}, interface {ABI}")
    lines: list[str] = []
    log_to(lambda level, line: lines.append(line), LogLevel.INFO)
    failures = 0
    for transport in ("shm", "tcp", "rdma"):
        wrong = _try(transport)
        # A host without a NIC is no failure.
        failures += bool(wrong) and transport != "rdma"
        print(f"{transport:4}  {wrong or 'works'}")
    if failures:
        print("\n".join(lines), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
