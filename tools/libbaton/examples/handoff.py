"""Hands the KV of a prompt from one process to another, as `handoff.c` does.

    python handoff.py source                 prints the address of the source, serves one prompt
    python handoff.py destination ADDRESS    asks for the KV of the prompt, and checks each byte

A program in C can be at the other end.
"""

import sys
from collections.abc import Iterator

from baton_kv import Agent, BatonError, Element, EventKind, Layout, Region, Role

TOKENS, LAYERS, HEAD, PAGES, ROOM, SECONDS = 100, 2, 4, 64, 7, 20.0
HEAD_BYTES = 4 * HEAD


def layout_of(role: Role) -> Layout:
    """The source keeps KV layer by layer, the destination page by page."""
    layout = Layout(pages=PAGES, layers=LAYERS, kv_heads=1, head_dim=HEAD, element=Element.F32,
                    head_stride=HEAD_BYTES)
    if role is Role.SOURCE:
        layout.page_size = 16
        layout.kv_stride = HEAD_BYTES
        layout.token_stride = 2 * HEAD_BYTES
        layout.page_stride = layout.page_size * layout.token_stride
        layout.layer_stride = PAGES * layout.page_stride
    else:
        layout.page_size = 8
        layout.token_stride = HEAD_BYTES
        layout.kv_stride = layout.page_size * HEAD_BYTES
        layout.layer_stride = 2 * layout.kv_stride
        layout.page_stride = LAYERS * layout.layer_stride
    return layout


def values(layout: Layout, tokens: range) -> Iterator[tuple[int, float]]:
    """Places in the memory, in elements, and the values there. The pages are 1, 2, 3 and so on."""
    for token in tokens:
        page, within = divmod(token, layout.page_size)
        for layer in range(LAYERS):
            for kv in range(2):
                at = ((1 + page) * layout.page_stride + layer * layout.layer_stride
                      + kv * layout.kv_stride + within * layout.token_stride)
                for element in range(HEAD):
                    value = token * 1000 + layer * 100 + kv * 10 + element
                    yield at // 4 + element, float(value)


def await_end(agent: Agent) -> bytes | None:
    """Waits for the end of the request. Returns the payload if its KV is handed over."""
    payload = None
    while True:
        agent.wait(1.0)
        for event in agent.poll():
            if event.kind is EventKind.LANDED:
                payload = event.payload
            elif event.kind is EventKind.FAILED:
                print("the KV is not handed over:", event.cause, file=sys.stderr)
            elif event.kind is EventKind.ENDED:
                agent.release(event.request)
                return payload


def serve(agent: Agent, memory: memoryview, layout: Layout) -> bool:
    print(agent.address, flush=True)
    request = agent.offer(ROOM, range(TOKENS), SECONDS)
    # The engine computes in chunks, and allocates pages for each.
    leased = 0
    for start in range(0, TOKENS, 32):
        end = min(start + 32, TOKENS)
        wanted = -(-end // layout.page_size)
        agent.lease(request, range(1 + leased, 1 + wanted))
        leased = wanted
        for at, value in values(layout, range(start, end)):
            memory[at] = value
        agent.compute(request, end)
    agent.send_last(request, b"first token: 42")
    return await_end(agent) is not None


def fetch(agent: Agent, memory: memoryview, layout: Layout, source: str) -> bool:
    request = agent.wish(ROOM, source, range(TOKENS), SECONDS)
    agent.lease(request, range(1, 1 + -(-TOKENS // layout.page_size)))
    payload = await_end(agent)
    if payload is None:
        return False
    wrong = sum(memory[at] != value for at, value in values(layout, range(TOKENS)))
    print(f"{wrong} wrong values; {payload.rstrip(bytes(1)).decode()}")
    return wrong == 0


def main() -> int:
    match sys.argv[1:]:
        case ["source"]:
            role, source = Role.SOURCE, ""
        case ["destination", source]:
            role = Role.DESTINATION
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    layout = layout_of(role)
    region = Region(PAGES * layout.page_size * LAYERS * 2 * HEAD_BYTES)
    memory = region.memory().cast("f")
    try:
        # A real engine makes `kind` of its model: a hash, for example.
        with Agent(role, region, layout, kind=bytes([1] * 32)) as agent:
            if role is Role.SOURCE:
                is_handed_over = serve(agent, memory, layout)
            else:
                is_handed_over = fetch(agent, memory, layout, source)
    except BatonError as error:
        print(error, file=sys.stderr)
        return 1
    region.free()
    return 0 if is_handed_over else 1


if __name__ == "__main__":
    sys.exit(main())
