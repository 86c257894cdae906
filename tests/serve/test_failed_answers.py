"""An answer whose logits are not finite ends with an error in OpenAI's form, and all other answers finish.

next: tests/lib/served.py
"""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import served
from served import TEXT, alone, body

from tmoe.generate.load import load

GOOD = "abc", "def g", "x"
WHY = "the answer failed: log-prob nan: the model's logits are not finite"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The engine of a model that has no fault."""
    return load(served.tiny_run(tmp_path_factory.mktemp("whole") / "tiny"), device="cpu").engine(4)


@pytest.fixture(scope="module")
def broken(whole):
    """A token that the answer to "def f(" has in its middle, and no other answer here has."""
    others = {i for prompt in GOOD for i in texts_of(whole, prompt).ids.tolist()}
    ids = texts_of(whole, "def f(").ids.tolist()
    others |= {*b"".join(map(str.encode, GOOD)), *b"def f(", *ids[:3]}
    return next(i for i in ids[3:-1] if i < 128 and i not in others)


@pytest.fixture(scope="module")
def port(broken, tmp_path_factory):
    folder = served.tiny_run(tmp_path_factory.mktemp("broken") / "tiny", broken)
    with served.server(folder, tmp_path_factory.mktemp("log") / "log", slots=8) as found:
        yield found.port
        served.settled(found.port)


def texts_of(engine, prompt):
    return alone(engine, prompt, max_tokens=12, temperature=0.8, seed=3)[0]


def test_a_failed_answer_is_an_error_and_others_finish(port, whole, broken):
    """A token of its prompt is broken, or one of the answer."""
    asks = [body(prompt) for prompt in GOOD] + [body([97, broken, 98]), body("def f(")]
    streams = [ask | dict(stream=True) for ask in asks]
    with ThreadPoolExecutor(len(asks)) as pool:
        replies = list(pool.map(lambda ask: served.post(port, TEXT, ask), asks + streams))
    for ask, reply, stream in zip(asks, replies[: len(asks)], replies[len(asks) :], strict=True):
        if ask["prompt"] in GOOD:
            want = texts_of(whole, ask["prompt"])
            (choice,) = reply.json["choices"]
            assert (choice["text"], choice["finish_reason"]) == (want.text, want.finish)
            assert stream.events[-1] is None and said(stream)[0] == want.text
            continue
        error = dict(message=f"choices[0]: {WHY}", type="server_error", param=None, code=None)
        assert (reply.status, reply.json) == (500, dict(error=error))
        assert stream.status == 200 and stream.events[-1] == dict(error=error)
        made = texts_of(whole, "def f(").ids.tolist()
        made = bytes(made[: made.index(broken) + 1]) if ask["prompt"] == "def f(" else b""
        before = made.decode("utf-8", "replace")
        assert said(stream).get(0, "") == before
        assert all(c["finish_reason"] is None for e in stream.events[:-1] for c in e["choices"])


def said(reply) -> dict[int, str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    for event in reply.events:
        for choice in (event or {}).get("choices", ()):
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_one_of_several_answers_fails(port, whole, broken):
    """The other answers of a stream end whole, with everything that can be asked."""
    prompts = [[*b"abc"], [97, broken], [*b"x"]]
    ask = body(prompts, logprobs=3, tmoe=dict(routes=True))
    reply = served.post(port, TEXT, ask | dict(stream=True))
    found, ends = said(reply), {}
    for event in reply.events[:-1]:
        ends |= {c["index"]: c["finish_reason"] for c in event["choices"] if c["finish_reason"]}
    want = {i: texts_of(whole, prompt) for i, prompt in ((0, "abc"), (2, "x"))}
    assert {i: found[i] for i in want} == {i: sample.text for i, sample in want.items()}
    assert ends == {i: sample.finish for i, sample in want.items()} and not found.get(1)
    assert reply.events[-1]["error"]["message"] == f"choices[1]: {WHY}"
    echoed = served.post(port, TEXT, ask | dict(echo=True))
    assert echoed.status == 500 and echoed.json["error"] == reply.events[-1]["error"]
    scored = served.post(port, TEXT, body([97, broken, 98], echo=True, logprobs=1, max_tokens=0))
    assert scored.status == 500 and json.loads(scored.body)["error"]["message"] == f"choices[0]: {WHY}"


def test_the_package_raises_its_errors(port, broken):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
        ask = dict(model="tiny", prompt="def f(", max_tokens=12, temperature=0.8, seed=3)
        with pytest.raises(openai.InternalServerError, match="logits are not finite"):
            client.completions.create(**ask)
        chunks = []
        with pytest.raises(openai.APIError, match="logits are not finite"):
            chunks.extend(served.typed(chunk) for chunk in client.completions.create(**ask, stream=True))
