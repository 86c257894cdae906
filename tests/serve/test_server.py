"""A server on loopback: answers equal the engine's; bad bodies and foreign pages are refused.

next: tests/lib/served.py
"""

import json

import numpy as np
import pytest
import served
from served import CHAT, TEXT, alone, body

from tmoe.generate.load import load
from tmoe.generate.sampler import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served.tiny_run(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with served.server(folder, tmp_path_factory.mktemp("log") / "log", slots=16, waiting=1000) as found:
        yield found


@pytest.fixture
def port(server):
    yield server.port
    served.settled(server.port)


@pytest.fixture(scope="module")
def engine(folder):
    return load(folder, device="cpu").engine(4)


def test_answers_are_the_engines(port, engine):
    want = alone(engine, "def f(", 2, max_tokens=12, temperature=0.8, seed=3)
    found = served.post(port, TEXT, body(n=2)).json
    assert [c["text"] for c in found["choices"]] == [s.text for s in want]
    assert [c["finish_reason"] for c in found["choices"]] == [s.finish for s in want]
    made = sum(len(s.ids) for s in want)
    usage = dict(prompt_tokens=6, completion_tokens=made, total_tokens=6 + made)
    assert usage.items() <= found["usage"].items()
    reply = served.post(port, TEXT, body(n=2, stream=True, stream_options=dict(include_usage=True)))
    assert reply.headers["content-type"].startswith("text/event-stream") and reply.events[-1] is None
    texts = ["", ""]
    for event in reply.events[:-2]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [s.text for s in want]
    assert reply.events[-2]["choices"] == [] and usage.items() <= reply.events[-2]["usage"].items()


def test_several_prompts_ids_and_stop_texts(port, engine):
    prompts = ["abc", "x"]
    found = served.post(port, TEXT, body(prompts)).json["choices"]
    want = [alone(engine, p, max_tokens=12, temperature=0.8, seed=3)[0] for p in prompts]
    assert [c["text"] for c in found] == [s.text for s in want]
    ids = served.post(port, TEXT, body([[97, 98, 99], [120]])).json["choices"]
    assert [c["text"] for c in ids] == [s.text for s in want]
    text = want[0].text
    stop = text[5:7]
    cut = served.post(port, TEXT, body("abc", stop=[stop])).json["choices"][0]
    assert cut["text"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"


def test_echo_with_logprobs_of_the_prompt(port, engine):
    """A harness of evaluation scores texts in this way."""
    asked = body([97, 98, 99], echo=True, logprobs=1, max_tokens=1, temperature=0)
    found = served.post(port, TEXT, asked).json["choices"][0]
    own, tops = found["logprobs"]["token_logprobs"], found["logprobs"]["top_logprobs"]
    assert found["text"].startswith("abc") and found["logprobs"]["tokens"][:3] == ["a", "b", "c"]
    assert own[0] is None and tops[0] is None and len(own) == len(tops) == 4
    greedy = alone(engine, [97, 98, 99], max_tokens=1, temperature=0)[0]
    assert own[3] == pytest.approx(float(greedy.logprobs[0]), abs=1e-5)
    assert own[3] == max(tops[3].values())  # as floats: so a harness knows that the token is greedy
    for top, text, logprob in zip(tops[1:3], "bc", own[1:3], strict=True):  # the token itself is the last one
        assert [*top.items()][-1] == (text, logprob) and len(top) <= 2
    assert any(len(top) == 2 for top in tops[1:3])
    short = served.post(port, TEXT, asked | dict(prompt=["a", "ab", "é漢a"])).json["choices"]
    offsets = [choice["logprobs"]["text_offset"] for choice in short]
    # the bytes of a character have its place
    assert offsets == [[0, 1], [0, 1, 2], [0, 0, 1, 1, 1, 2, 3]]
    assert short[0]["logprobs"]["tokens"][0] == "a" and short[0]["logprobs"]["token_logprobs"][0] is None
    silent = served.post(port, TEXT, asked | dict(max_tokens=0)).json
    assert silent["choices"][0]["logprobs"]["token_logprobs"] == own[:3]
    assert silent["choices"][0]["text"] == "abc" and silent["usage"]["completion_tokens"] == 0


def test_chat_with_logprobs_and_routes(port, folder):
    asked = dict(messages=[dict(role="user", content="hi")], max_tokens=5, temperature=0, logprobs=True)
    asked |= dict(top_logprobs=3, tmoe=dict(routes=True))
    found = served.post(port, CHAT, asked).json
    assert found["object"] == "chat.completion" and found["model"] == "tiny"
    choice = found["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == found["usage"]["completion_tokens"] == len(choice["tmoe"]["routes"])
    assert all(len(token["top_logprobs"]) == 3 for token in content)
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in content)
    assert all(expert in (0, 1) for token in choice["tmoe"]["routes"] for layer in token for expert in layer)
    parts = dict(
        messages=[dict(role="user", content=[dict(type="text", text="h"), dict(type="text", text="i")])]
    )
    again = served.post(port, CHAT, asked | parts | dict(stream=True)).events
    said = "".join(e["choices"][0]["delta"].get("content") or "" for e in again if e)
    assert said == choice["message"]["content"]
    assert again[0]["choices"][0]["delta"]["role"] == "assistant"


BAD = {
    "no JSON": b"{",
    "array": b"[]",
    "not UTF-8": b'{"prompt": "\xff"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "unknown field": b'{"prompt": "a", "colour": 1}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "true as number": b'{"prompt": "a", "n": true}',
    "infinite": b'{"prompt": "a", "temperature": 1e999}',
    "too long": json.dumps(dict(prompt="a" * 9000)).encode(),
    "empty prompt": b'{"prompt": ""}',
    "no prompt": b"{}",
    "id out of range": b'{"prompt": [99999]}',
    "too large": b'{"prompt": "' + b"a" * (5 * 2**20) + b'"}',
    "deep": b"[" * 200000,
    "penalty": b'{"prompt": "a", "frequency_penalty": 1}',
    "five stops": b'{"prompt": "a", "stop": ["1", "2", "3", "4", "5"]}',
    "another model": b'{"prompt": "a", "model": "gpt-4"}',
    "huge number": b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
    "id of 2 words": b'{"prompt": [1, "a"]}',
    "empty stop": b'{"prompt": "a", "stop": ""}',
    "switch as text": b'{"prompt": "a", "stream": "yes"}',
    "switch as number": b'{"prompt": "a", "stream": 1}',
    "cold": b'{"prompt": "a", "temperature": 1e-30}',
    "top_p of 0": b'{"prompt": "a", "top_p": 0}',
    "min above max": b'{"prompt": "a", "max_tokens": 1, "min_tokens": 2}',
    "tools": b'{"messages": [{"role": "user", "content": "a"}], "tools": [1]}',
    "tool_choice": b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}',
    "picture": b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    "no role": b'{"messages": [{"content": "a"}]}',
    "variable": b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": 1}}',
    "no body": b"",
    "infinite within": b'{"messages": [{"role": "user", "content": "a"}], "tools": [1e999]}',
    "switch as 0.0": b'{"prompt": "a", "stream": 0.0}',
    "huge temperature": b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}",
    "ids as false": b'{"prompt": "a", "stop_token_ids": false}',
    "id of a stop": b'{"prompt": "a", "stop_token_ids": [256]}',
    "prompt as number": b'{"prompt": 7}',
    "prompt as switches": b'{"prompt": [true, false]}',
    "no prompts": b'{"prompt": []}',
    "ids too deep": b'{"prompt": [[[1]]]}',
    "an empty one": b'{"prompt": ["a", ""]}',
    "negative id": b'{"prompt": [-1]}',
    "129 prompts": json.dumps(dict(prompt=["a"] * 129)).encode(),
    "answers above all room": json.dumps(dict(prompt=["a"] * 9, n=128)).encode(),
    "deep within": b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}",
    "n of 0": b'{"prompt": "a", "n": 0}',
    "n of 129": b'{"prompt": "a", "n": 129}',
    "n of 1.5": b'{"prompt": "a", "n": 1.5}',
    "no tokens": b'{"prompt": "a", "max_tokens": 0}',
    "negative tokens": b'{"prompt": "a", "max_tokens": -1}',
    "more than max_len": b'{"prompt": "a", "max_tokens": 512}',
    "min_p": b'{"prompt": "a", "min_p": 2}',
    "repetition penalty": b'{"prompt": "a", "repetition_penalty": 0}',
    "seed as text": b'{"prompt": "a", "seed": "1"}',
    "seed of 65 bits": b'{"prompt": "a", "seed": 9223372036854775808}',
    "21 logprobs": b'{"prompt": "a", "logprobs": 21}',
    "logprobs as switch": b'{"prompt": "a", "logprobs": true}',
    "echo with logprobs in a stream": b'{"prompt": "a", "echo": true, "logprobs": 1, "stream": true}',
    "options without a stream": b'{"prompt": "a", "stream_options": {"include_usage": true}}',
    "unknown option": b'{"prompt": "a", "stream": true, "stream_options": {"usage": true}}',
    "unknown extension": b'{"prompt": "a", "tmoe": {"route": true}}',
    "bias": b'{"prompt": "a", "logit_bias": {"1": 5}}',
    "best_of": b'{"prompt": "a", "best_of": 2}',
    "suffix": b'{"prompt": "a", "suffix": "b"}',
    "model as number": b'{"prompt": "a", "model": 1}',
    "no messages": b'{"messages": []}',
    "messages as text": b'{"messages": "a"}',
    "content as number": b'{"messages": [{"role": "user", "content": 1}]}',
    "role as number": b'{"messages": [{"role": 1, "content": "a"}]}',
    "a call as number": b'{"messages": [{"role": "user", "content": "a"}, '
    b'{"role": "assistant", "tool_calls": [1]}]}',
    "JSON asked for": b'{"messages": [{"role": "user", "content": "a"}], "response_format": '
    b'{"type": "json_object"}}',
    "alternatives alone": b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}',
    "two limits": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, '
    b'"max_completion_tokens": 2}',
    "variable of the call": b'{"messages": [{"role": "user", "content": "a"}], '
    b'"chat_template_kwargs": {"self": 1}}',
    "a field twice": b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}',
    "messages too deep": b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", '
    b'"tool_calls": [{"function": {"name": "f", "arguments": {"a": ' + b"[" * 800 + b"]" * 800 + b"}}}]}]}",
    "variables as list": b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": []}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_refused_in_openais_form(port, name):
    path = CHAT if b'"messages"' in BAD[name] else TEXT
    reply = served.post(port, path, BAD[name])
    want = {"too large": 413, "another model": 404}.get(name, 400)
    assert reply.status == want, reply
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert "Error" not in error["message"] and "render()" not in error["message"]


def test_neutral_values_are_accepted(port):
    neutral = dict(frequency_penalty=0, presence_penalty=0.0, logit_bias={}, best_of=1, suffix=None, user="u")
    assert served.post(port, TEXT, body(**neutral)).status == 200


def test_who_may_ask(port):
    assert served.get(port, "/health").json == dict(status="ok")
    for host in ("evil.com", "localhost.evil.com", "127.0.0.1.evil.com:80", "[::1]evil.com", "localhost:x"):
        assert served.get(port, "/v1/models", host=host).status == 403
    for host in ("[::1]", "[::1]:80", "::1", f"LOCALHOST:{port}", "localhost:"):
        assert served.get(port, "/v1/models", host=host).status == 200
    # a whole URL, whose host counts
    for url, status in ((f"http://127.0.0.1:{port}/v1/models?a=b", 200), ("HTTP://localhost", 200)):
        assert served.get(port, url, host="evil.com").status == status
    assert served.get(port, "http://evil.com/v1/models").status == 403
    assert served.get(port, "/v1/models", origin="http://evil.com").status == 403
    assert served.get(port, "/v1/models", origin="http://localhost").status == 200
    assert served.post(port, TEXT, body(), content_type="text/plain").status == 415
    assert served.post(port, TEXT, body(), content_encoding="gzip").status == 415
    for path in ("/v1/responses", "/v1/embeddings"):
        for kind in ("application/json", "multipart/form-data"):
            reply = served.post(port, path, body(), content_type=kind)
            assert reply.status == 404 and "/v1/chat/completions" in reply.json["error"]["message"]
    assert served.post(port, "/v1/models", body(), content_type="text/plain").status == 405
    assert served.get(port, TEXT).status == 405
    counts = served.gauges(port)
    assert counts['tmoe_replies_total{status="403"}'] >= 4 and counts['tmoe_replies_total{status="415"}'] >= 1


def test_what_is_not_http_is_refused_in_openais_form(port):
    for raw in (b"hello\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n\r\n"):  # the second has no Host
        with served.connect(port) as link:
            link.sendall(raw)
            reply = served.receive(link)
        assert reply.status == 400 and reply.json["error"]["type"] == "invalid_request_error"


def test_a_refused_request_with_a_large_body_gets_its_reply(port):
    large = b'{"prompt": "' + b"a" * 3_000_000 + b'"}'
    assert served.post(port, TEXT, large, content_type="text/plain").status == 415
    assert served.post(port, TEXT, large, origin="http://evil.com").status == 403
    assert served.post(port, "/v1/embeddings", large).status == 404


def test_seeds(port):
    """Equal seeds give equal texts, also modulo 2^31; requests without one differ."""
    asked = body(max_tokens=40, temperature=1.5)
    texts = [
        served.post(port, TEXT, asked | dict(seed=seed)).json["choices"][0]["text"]
        for seed in (5, 5 + 2**31, 5 - 2**31, 5 + 2**62, 6, None, None)
    ]
    assert len({*texts[:4]}) == 1 and len({*texts}) == 4


def test_bytes_of_tokens(port):
    """Tokens of a byte tokenizer are bytes, which may be no characters."""
    asked = dict(messages=[dict(role="user", content="hi")], max_tokens=40, seed=1, temperature=1.9)
    reply = served.post(port, CHAT, asked | dict(logprobs=True, top_logprobs=1)).json["choices"][0]
    tokens = reply["logprobs"]["content"]
    raw = b"".join(bytes(token["bytes"]) for token in tokens)
    assert raw.decode("utf-8", "replace").startswith(reply["message"]["content"])
    assert any(token["bytes"][0] > 127 and token["token"] == "\ufffd" for token in tokens)


def test_stop_tokens_and_least_tokens(port, engine):
    want = alone(engine, "def f(", max_tokens=12, temperature=0.8, seed=3)[0]
    ids = want.ids.tolist()
    stop = ids[4]
    first = ids.index(stop)
    reply = served.post(port, TEXT, body(stop_token_ids=[stop])).json
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == first + 1
    longer = served.post(port, TEXT, body(stop_token_ids=[stop], min_tokens=first + 2)).json
    assert longer["usage"]["completion_tokens"] > first + 1


def test_echo_in_a_stream_and_several_answers(port, engine):
    want = alone(engine, "abc", 2, max_tokens=4, temperature=0.8, seed=3)
    asked = body(["abc", "abc"], n=2, max_tokens=4, echo=True, stream=True)
    texts = [""] * 4
    for event in served.post(port, TEXT, asked).events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [f"abc{s.text}" for s in want] * 2


def test_routes_of_a_stream(port):
    asked = dict(
        messages=[dict(role="user", content="hi")], max_tokens=6, temperature=0, tmoe=dict(routes=True)
    )
    whole = served.post(port, CHAT, asked).json["choices"][0]["tmoe"]
    routes, weights = [], []
    for event in served.post(port, CHAT, asked | dict(stream=True)).events[:-1]:
        for choice in event["choices"]:
            routes += choice["tmoe"]["routes"]
            weights += choice["tmoe"]["weights"]
    assert dict(routes=routes, weights=weights) == whole and len(routes) == 6
    assert all(0 < w <= 1 for token in weights for layer in token for w in layer)


def test_routes_of_a_prompt(port, engine):
    """The engine gives the same ones. The second request takes a page of 128 tokens from the first."""
    prompts, how = [[*range(50, 200), *range(60)], [7]], dict(max_tokens=2, temperature=0)
    want, shortest = engine.generate(prompts, 1, Sampling(**how), routes=True)
    assert want[0].prompt_routes is not None and shortest[0].prompt_routes is None
    asked = body(prompts, **how, tmoe=dict(prompt_routes=True))
    for cached in (0, 128):
        found = served.post(port, TEXT, asked).json
        first, second = (choice["tmoe"] for choice in found["choices"])
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert first["prompt_routes"] == want[0].prompt_routes.transpose(0, 1).tolist()
        assert np.shape(first["prompt_weights"]) == np.shape(first["prompt_routes"]) == (209, 1, 1)
        assert first["prompt_tokens"][15:18] == ["A", "B", "C"] and len(first["prompt_tokens"]) == 210
        assert second == dict(prompt_tokens=["\x07"], prompt_routes=[], prompt_weights=[])
    refused = served.post(port, TEXT, asked | dict(stream=True))
    assert refused.status == 400 and "stream" in refused.json["error"]["message"]
