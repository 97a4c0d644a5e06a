"""Engines of two ranks. Each rank hands its heads over to the rank with the same number."""
from behind import check
from pair_requests import expect_usage_zero, ids_of, post, prefilled, prompt, prompt_ids
from pair_servers import DECODE, PREFILL

PROMPTS = 12


@check
def two_ranks_hand_over_to_two(pair):
    prefill, decode = pair.need(*(one.but(ranks=2) for one in (PREFILL, DECODE)))
    counts = []
    for text in [prompt(number, 2 + number) for number in range(PROMPTS)]:
        right, before = ids_of(post(prefill, text)), decode.loaded_tokens()
        assert ids_of(post(decode, text, prefilled(prefill, text))) == right, text
        counts.append((decode.loaded_tokens() - before, len(prompt_ids(prefill, text))))
    expect_usage_zero(prefill, PREFILL.keep_seconds + 10)
    # Four workers spin on two CPUs here. A rank that is silent for 2 seconds is lost.
    whole = [loaded for loaded, tokens in counts if loaded > tokens / 2]
    assert len(whole) >= PROMPTS / 2, (counts, decode.failures())
    return f"{len(whole)} of {PROMPTS} prompts loaded, failures {decode.failures()}"


@check
def a_load_fails_on_all_ranks_if_its_room_is_unknown(pair):
    prefill, decode = pair.need(*(one.but(ranks=2) for one in (PREFILL, DECODE)))
    text = prompt(40)
    params = {**prefilled(prefill, text), "bootstrap_room": 7}
    failed, loaded = decode.failures(), decode.loaded_tokens()
    assert ids_of(post(decode, text, params)) == ids_of(post(prefill, text))
    assert decode.loaded_tokens() == loaded
    found = {cause: count - failed.get(cause, 0) for cause, count in decode.failures().items()
             if count > failed.get(cause, 0)}
    assert found == {"deadline": 2}, found
    expect_usage_zero(prefill, PREFILL.keep_seconds + 10)
    # A reference of one rank is none for two.
    one = {**prefilled(prefill, text), "tp_size": 1}
    assert ids_of(post(decode, text, one)) == ids_of(post(prefill, text))
    assert decode.loaded_tokens() == loaded
