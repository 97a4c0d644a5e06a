"""Times PyTorch's operations of Llama-3.1-8B's shapes on this GPU, in bf16: what kernels of our own
are compared with. Prints rows of a table in Markdown."""

import statistics

import torch
import torch.nn.functional as functional


def time_us(work, rounds=15):
    """The median time of `work(i)` in µs. Each round replays a graph of eight calls."""
    for i in range(3):
        work(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(8):
            work(i)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 8)
    return statistics.median(times)


def draw(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def time_products():
    a, b = draw(8192, 8192), draw(8192, 8192)
    us = time_us(lambda i: a @ b.t())
    rate = 2 * 8192**3 / us / 1e6
    print(f"| PyTorch {torch.__version__}: product 8192 x 8192 x 8192 | {rate:.0f} TFLOP/s |")
    shapes = {"q, k, v": (6144, 4096), "output": (4096, 4096), "gate, up": (28672, 4096),
              "down": (4096, 14336), "head": (128256, 4096)}
    for name, (outputs, inputs) in shapes.items():
        # More weights than the L2 cache holds, in turn.
        count = 1 if outputs > 100000 else 8
        weights = [draw(outputs, inputs) for _ in range(count)]
        cells = []
        for rows in (1, 8, 32, 64, 256, 2048):
            x = draw(rows, inputs)
            us = time_us(lambda i: functional.linear(x, weights[i % count]))
            cells.append(f"{us:.1f}")
        print(f"| PyTorch: {name} ({outputs} x {inputs}) for 1, 8, 32, 64, 256, 2048 rows | "
              f"{', '.join(cells)} us |")


def time_attention():
    for length in (2048, 8192):
        q, k, v = draw(1, 32, length, 128), draw(1, 8, length, 128), draw(1, 8, length, 128)
        us = time_us(lambda i: functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True))
        print(f"| PyTorch: causal attention of {length} tokens, 32 heads, 8 of KV | {us:.0f} us |")
    for rows, length in ((1, 1024), (1, 8192), (32, 1024), (256, 1024)):
        q = draw(rows, 32, 1, 128)
        caches = [(draw(rows, 8, length, 128), draw(rows, 8, length, 128)) for _ in range(4)]
        us = time_us(lambda i: functional.scaled_dot_product_attention(
            q, *caches[i % 4], enable_gqa=True))
        print(f"| PyTorch: attention of {rows} rows to {length} tokens | {us:.1f} us |")


with torch.inference_mode():
    time_products()
    time_attention()
