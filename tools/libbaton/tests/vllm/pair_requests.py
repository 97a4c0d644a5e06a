"""Requests to a pair of vLLM servers, and what all checks expect of the answers."""
import json, socket, time

from behind import ask

TOPICS = ["the sea", "an old clock", "bread", "a railway station", "winter", "a lighthouse",
          "mathematics", "the moon", "a garden", "iron", "a violin", "the desert", "a library",
          "rain", "a mountain village", "glass", "a river", "salt", "the wind", "paper"]


def prompt(number, sentences=6):
    topic = TOPICS[number % len(TOPICS)]
    return " ".join(f"Here is part {part} of a short story about {topic} and number {number}."
                    for part in range(sentences)) + " It begins like this:"


def body_of(text, params=None, **more):
    body = {"model": "model", "prompt": text, "max_tokens": 12, "temperature": 0,
            "return_token_ids": True, "ignore_eos": True, **more}
    return body if params is None else {**body, "kv_transfer_params": params}


def post(server, text, params=None, headers={}, **more):
    return ask(server, "POST", "/v1/completions", body_of(text, params, **more), headers)


def ids_of(answer):
    return answer.json()["choices"][0]["token_ids"]


def prompt_ids(server, text):
    answer = ask(server, "POST", "/tokenize", {"model": "model", "prompt": text})
    return answer.json()["tokens"]


def prefilled(prefill, text, headers={}):
    """What prefill answers for decode."""
    answer = post(prefill, text, {"do_remote_decode": True}, headers, max_tokens=1)
    return answer.json()["kv_transfer_params"]


def expect_usage_zero(server, seconds):
    """Waits until a server keeps no KV. Returns how long that took."""
    began = time.monotonic()
    while server.metric("kv_cache_usage_perc") > 0:
        assert time.monotonic() < began + seconds, f"{server.name} still keeps KV"
        time.sleep(0.05)
    return time.monotonic() - began


def expect_healthy(*servers):
    for server in servers:
        assert ask(server, "GET", "/health").status == 200, server.name


def leave(server, text, params, seconds, **more):
    """A client that closes its connection after some time."""
    body = json.dumps(body_of(text, params, **more)).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                           b"content-type: application/json\r\n"
                           b"content-length: %d\r\n\r\n" % len(body) + body)
        time.sleep(seconds)
