"""A tensor of torch as the memory of an agent: handed over in place, and torch's again after it.

Another thread writes tensors beside it meanwhile. Prints the allocator that torch has used.
"""

import pathlib
import sys
import threading

import torch

from baton_kv import Agent, Element, EventKind, Layout, Region, Role

PAGES, LAYERS, BLOCK = 512, 4, 1 << 15
KIND = bytes(32)
SECONDS = 20.0


def layout():
    """A page of one token: a block for each layer, of two halves."""
    return Layout(
        pages=PAGES, page_size=1, layers=LAYERS, kv_heads=1, head_dim=BLOCK // 4,
        element=Element.F16, page_stride=BLOCK, layer_stride=PAGES * BLOCK,
        kv_stride=BLOCK // 2, head_stride=BLOCK, token_stride=BLOCK)


def await_end(agent):
    kinds = []
    while EventKind.ENDED not in kinds:
        assert agent.wait(SECONDS), "no event"
        kinds += [event.kind for event in agent.poll()]
    assert EventKind.LANDED in kinds, kinds


def hand_over(tensors, transport):
    adopted = [Region.adopt(one.data_ptr(), one.nbytes, remap=transport == "shm" and at == 0)
               for at, one in enumerate(tensors)]
    with (
        Agent(Role.SOURCE, adopted[0], layout(), KIND, transports=[transport]) as source,
        Agent(Role.DESTINATION, adopted[1], layout(), KIND, transports=[transport]) as to,
    ):
        # Written through the same pointer, after the adoption.
        tensors[0].random_(-128, 127)
        ids, order = list(range(PAGES)), list(range(PAGES))
        wished = to.wish(1, source.address, ids, SECONDS)
        to.lease(wished, order)
        offered = source.offer(1, ids, SECONDS)
        source.lease(offered, order)
        source.compute(offered, PAGES)
        source.send_last(offered)
        await_end(to)
        await_end(source)
    for region in adopted:
        region.free()
    assert torch.equal(*tensors), transport
    assert "baton-adopted" not in pathlib.Path("/proc/self/maps").read_text()


def main():
    is_over = threading.Event()
    beside = [torch.zeros(size, dtype=torch.int8) for size in (3000, 70_000, 3 << 20)]

    def write():
        number = 0
        while not is_over.is_set():
            number = (number + 1) % 100
            for one in beside:
                one.fill_(number)
                assert int(one.min()) == int(one.max()) == number

    failures = []

    def run():
        try:
            write()
        except AssertionError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    for transport in ("shm", "tcp", "shm"):
        tensors = [torch.zeros(LAYERS * PAGES * BLOCK, dtype=torch.int8) for _ in range(2)]
        beside.append(torch.zeros(5000, dtype=torch.int8))
        hand_over(tensors, transport)
        # The memory goes back to the allocator, and to other tensors.
        del tensors
        again = torch.ones(LAYERS * PAGES * BLOCK, dtype=torch.int8)
        assert int(again.min()) == int(again.max()) == 1
    is_over.set()
    thread.join()
    assert not failures, "memory beside the tensor has changed"
    maps = pathlib.Path("/proc/self/maps").read_text()
    print("torch", torch.__version__, "over", "tcmalloc" if "tcmalloc" in maps else "glibc")


if __name__ == "__main__":
    sys.exit(main())
