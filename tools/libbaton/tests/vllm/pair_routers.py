"""The pair behind vllm-router 0.1.17, and behind Baton's router."""
import contextlib, pathlib, subprocess, sys

from behind import CACHE, ROOT, Process, ask, check, free_port
from pair_requests import body_of, expect_usage_zero, ids_of, post, prompt
from pair_servers import DECODE, PREFILL

ROUTER = "0.1.17"
PROMPTS = 20


def vllm_router(prefill, decode):
    venv = CACHE / f"vllm-router-{ROUTER}"
    subprocess.run([ROOT / "tools/venv", venv.name, f"vllm-router=={ROUTER}"], check=True,
                   stdout=sys.stderr)
    return [venv / "bin/vllm-router", "--vllm-pd-disaggregation", "--host", "127.0.0.1",
            "--policy", "round_robin", "--prometheus-port", free_port(),
            "--health-check-interval-secs", 1,
            "--prefill", f"http://127.0.0.1:{prefill.port}",
            "--decode", f"http://127.0.0.1:{decode.port}"], "/readiness"


def baton_router(prefill, decode):
    built = [ROOT / "target" / profile / "baton" for profile in ("release", "debug")]
    baton = next((path for path in built if path.exists()), None)
    assert baton, "baton is not built: cargo build --release"
    return [baton, "router", "--host", "127.0.0.1", "--flow", "prefill-first",
            "--prefill", f"http://127.0.0.1:{prefill.port}", "none",
            "--decode", f"http://127.0.0.1:{decode.port}"], "/readiness"


@contextlib.contextmanager
def started(pair, make, prefill, decode):
    command, path = make(prefill, decode)
    port = free_port()
    router = Process(make.__name__, [*command, "--port", port], port, pair.folder)
    router.start()
    try:
        yield router.await_status(path)
    finally:
        router.end()


def hand_over_behind(pair, make):
    prefill, decode = pair.need(PREFILL, DECODE)
    base = {"vllm_router": 6000, "baton_router": 6100}[make.__name__]
    with started(pair, make, prefill, decode) as router:
        loaded, loads = decode.loaded_tokens(), decode.metric("baton_load_seconds_count")
        tokens = 0
        for number in range(base, base + PROMPTS):
            answer = post(router, prompt(number))
            assert ids_of(answer) == ids_of(post(prefill, prompt(number))), number
            tokens += answer.json()["usage"]["prompt_tokens"]
        chat = {"model": "model", "max_tokens": 12, "temperature": 0, "ignore_eos": True,
                "messages": [{"role": "user", "content": prompt(base + 70)}]}
        said = ask(router, "POST", "/v1/chat/completions", chat).json()["choices"][0]
        right = ask(prefill, "POST", "/v1/chat/completions", chat).json()["choices"][0]
        assert said["message"]["content"] == right["message"]["content"]
        streamed = ask(router, "POST", "/v1/completions",
                       body_of(prompt(base + 80), stream=True)).events()
        text = "".join(one["choices"][0]["text"] for one in streamed if one["choices"])
        assert text == post(prefill, prompt(base + 80)).json()["choices"][0]["text"]
    brought = decode.loaded_tokens() - loaded
    count = decode.metric("baton_load_seconds_count") - loads
    assert count == PROMPTS + 2, f"{count} loads of {PROMPTS + 2}"
    # The first block is known, and the last token is computed.
    assert brought >= tokens - PROMPTS * (DECODE.block + 1), (brought, tokens)
    assert not decode.failures(), decode.failures()
    expect_usage_zero(prefill, 3)
    return f"{count:.0f} of {PROMPTS + 2} prompts loaded, {brought:.0f} tokens"


@check
def behind_vllm_router(pair):
    return hand_over_behind(pair, vllm_router)


@check
def behind_batons_router(pair):
    return hand_over_behind(pair, baton_router)
