"""The bytes of decode's blocks are those of prefill's."""
import concurrent.futures, functools, json, random

from behind import check
from pair_requests import expect_usage_zero, post, prefilled, prompt
from pair_servers import DECODE, PREFILL

PROMPTS, THREADS = 100, 4
KEEP_SECONDS = 5


def text_of(number, chance):
    """A prompt that begins as some others do, at a random length."""
    shared = prompt(chance.randrange(4), 24)
    return f"{shared[:chance.randrange(len(shared))]}{number}{prompt(number, chance.randrange(8))}"


def notes(pair, what):
    path = pair.folder / f"{what}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return list(map(json.loads, lines))


def compared(computed, loaded):
    """Counts blocks by the result of the comparison. Blocks of a prefix were not loaded."""
    sums = {one["room"]: one["sums"] for one in computed}
    same = prefix = 0
    wrong = []
    for one in loaded:
        right = sums[one["room"]]
        prefix += one["prefix"]
        for block in range(one["prefix"], len(right)):
            if one["sums"][block] == right[block]:
                same += 1
            else:
                wrong.append((one["room"], block))
    return same, prefix, wrong


def checksums(pair, transport, block):
    setups = [one.but(connector="WitnessConnector", transports=transport, block=block,
                      keep_seconds=KEEP_SECONDS) for one in (PREFILL, DECODE)]
    prefill, decode = pair.need(*setups)
    notes(pair, "computed"), notes(pair, "loaded")
    chance = random.Random(f"{transport} {block}")
    texts = [text_of(number, chance) for number in range(PROMPTS)]

    def hand_over(text):
        params = prefilled(prefill, text)
        return post(decode, text, params, max_tokens=2).json()["usage"]["prompt_tokens"]

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        tokens = sum(pool.map(hand_over, texts))
    expect_usage_zero(prefill, KEEP_SECONDS + 5)
    computed, loaded = notes(pair, "computed"), notes(pair, "loaded")
    same, prefix, wrong = compared(computed, loaded)
    assert not wrong, f"{len(wrong)} blocks differ: {wrong[:5]}"
    assert len(loaded) == len(computed) == PROMPTS, (len(loaded), len(computed))
    assert prefix > 0, "no prompt began as another one"
    local = decode.metric("prompt_tokens_by_source_total", source="local_cache_hit")
    brought = decode.loaded_tokens()
    assert local == prefix * block and brought >= tokens - local - PROMPTS, (local, brought, tokens)
    return (f"{same} of {same} loaded blocks equal, {prefix} blocks were there; "
            f"{brought:.0f} of {tokens} tokens loaded, {local:.0f} local hits")


for size in (32, 128):
    for name in ("shm", "tcp"):
        run = functools.partial(checksums, transport=name, block=size)
        run.__name__ = f"blocks_of_{size}_have_prefills_checksums_over_{name}"
        check(run)
