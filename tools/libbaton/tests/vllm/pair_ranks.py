"""Engines of two ranks. Each rank hands its heads over to the rank with the same number."""
from behind import check
from pair_requests import expect_usage_zero, ids_of, post, prefilled, prompt, prompt_ids
from pair_servers import DECODE, PREFILL


@check
def two_ranks_hand_over_to_two(pair):
    prefill, decode = pair.need(*(one.but(ranks=2) for one in (PREFILL, DECODE)))
    texts = [prompt(number, 2 + number) for number in range(12)]
    before, tokens = decode.loaded_tokens(), 0
    for text in texts:
        right = ids_of(post(prefill, text))
        assert ids_of(post(decode, text, prefilled(prefill, text))) == right, text
        tokens += len(prompt_ids(prefill, text))
    loaded = decode.loaded_tokens() - before
    assert not decode.failures(), decode.failures()
    # vLLM computes the last token of a prompt, and prompts on one topic begin alike.
    assert 0 < tokens - len(texts) - loaded < tokens / 4, (loaded, tokens)
    expect_usage_zero(prefill, PREFILL.keep_seconds + 10)
    return f"{loaded:.0f} of {tokens} tokens loaded"


@check
def a_load_fails_on_all_ranks_if_its_room_is_unknown(pair):
    prefill, decode = pair.need(*(one.but(ranks=2) for one in (PREFILL, DECODE)))
    text = prompt(40)
    params = {**prefilled(prefill, text), "bootstrap_room": 7}
    failed, loaded = decode.failures(), decode.loaded_tokens()
    assert ids_of(post(decode, text, params)) == ids_of(post(prefill, text))
    assert decode.loaded_tokens() == loaded
    found = {cause: count - failed.get(cause, 0) for cause, count in decode.failures().items()}
    assert found == {"deadline": 2}, found
    expect_usage_zero(prefill, PREFILL.keep_seconds + 10)
    # A reference of one rank is none for two.
    one = {**prefilled(prefill, text), "tp_size": 1}
    assert ids_of(post(decode, text, one)) == ids_of(post(prefill, text))
    assert decode.loaded_tokens() == loaded
