"""Requests that are valid, or that decode refuses: the same answers as those of one vLLM."""

from behind import check
from pair_requests import (
    expect_usage_zero, ids_of, post, prefilled, prompt, prompt_ids)
from pair_servers import ALONE, DECODE, PREFILL


def real(pair):
    """The setups with the real model."""
    model = "tiny" if pair.options.tiny else "smollm2"
    return [one.but(model=model) for one in (ALONE, PREFILL, DECODE)]


@check
def twenty_prompts_are_answered_as_by_one_vllm(pair):
    alone, *both = real(pair)
    alone, = pair.need(alone)
    texts = [prompt(number, 2 + number) for number in range(20)]
    right = [ids_of(post(alone, text)) for text in texts]
    prefill, decode = pair.need(*both)
    said = [ids_of(post(decode, text, prefilled(prefill, text))) for text in texts]
    wrong = [number for number in range(20) if said[number] != right[number]]
    assert not wrong, f"other answers to prompts {wrong}"
    return loaded_all(decode, sum(len(prompt_ids(prefill, text)) for text in texts), 20)


def loaded_all(decode, tokens, prompts):
    """Each token is loaded but local hits, and the last one of a prompt, which vLLM computes."""
    loaded = decode.loaded_tokens()
    local = decode.metric("prompt_tokens_by_source_total", source="local_cache_hit")
    computed = decode.metric("prompt_tokens_by_source_total", source="local_compute")
    assert loaded + local + computed == tokens, (loaded, local, computed, tokens)
    assert computed <= prompts, f"decode has computed {computed} tokens of {prompts} prompts"
    return f"{tokens} tokens: {loaded:.0f} loaded, {local:.0f} local hits"


@check
def prompts_with_a_known_start_are_loaded_in_part(pair):
    prefill, decode = pair.need(*real(pair)[1:])
    before = decode.loaded_tokens()
    text = prompt(3, 20)
    for end in (" One.", " Two.", " One."):
        params = prefilled(prefill, text + end)
        assert ids_of(post(decode, text + end, params)) == ids_of(post(prefill, text + end))
    loaded, tokens = decode.loaded_tokens() - before, len(prompt_ids(prefill, text + " One."))
    assert 0 < loaded < 2 * tokens
    return f"{loaded:.0f} tokens loaded for 3 prompts of {tokens}"


@check
def a_request_with_several_prompts_is_loaded_once(pair):
    """Each prompt is a request to vLLM, and all have the same parameters."""
    prefill, decode = pair.need(PREFILL, DECODE)
    text = prompt(70)
    before = decode.metric("baton_load_seconds_count")
    answer = post(decode, [text] * 3, prefilled(prefill, text))
    right = ids_of(post(prefill, text))
    assert all(one["token_ids"] == right for one in answer.json()["choices"])
    assert decode.metric("baton_load_seconds_count") == before + 1


@check
def a_request_that_decode_rejects_frees_its_kv(pair):
    prefill, decode = pair.need(PREFILL, DECODE)
    text = prompt(71)
    expect_usage_zero(prefill, PREFILL.keep_seconds + 10)
    answer = post(decode, text, prefilled(prefill, text), max_tokens=10**6)
    assert answer.status == 400, answer.status
    return f"after {expect_usage_zero(prefill, 3):.2f} s"
