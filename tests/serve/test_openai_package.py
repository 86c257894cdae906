"""The openai package, sync and async: all that it asks is answered, and its own types accept every chunk.

next: tests/lib/served.py
"""

import asyncio

import openai
import pytest
import served
from served import alone, typed

from tmoe.generate.load import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served.tiny_run(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def port(folder, tmp_path_factory):
    with served.server(folder, tmp_path_factory.mktemp("log") / "log", slots=16) as found:
        yield found.port
        served.settled(found.port)


@pytest.fixture(scope="module")
def engine(folder):
    return load(folder, device="cpu").engine(4)


def joined(chunks) -> list[str]:
    """The text of each choice of a stream of the package; each chunk is checked by its type."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in typed(chunk).choices:
            added = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (added or "")
    return [texts[i] for i in sorted(texts)]


HOW = dict(model="tiny", prompt="def f(", max_tokens=12, temperature=0.8, seed=3)
CHATS = dict(model="tiny", messages=[dict(role="user", content="hi")], max_tokens=5, seed=1)


def test_the_package(port, engine):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
        assert typed(client.models.list().data[0]).id == typed(client.models.retrieve("tiny")).id == "tiny"
        want = [s.text for s in alone(engine, "def f(", 2, max_tokens=12, temperature=0.8, seed=3)]
        whole = typed(client.completions.create(**HOW, n=2, logprobs=2))
        assert [choice.text for choice in whole.choices] == want
        shown = whole.choices[0].logprobs
        assert 2 <= max(map(len, shown.top_logprobs)) <= 3  # several tokens may have one text
        assert all(token in top for token, top in zip(shown.tokens, shown.top_logprobs, strict=True))
        assert joined(client.completions.create(**HOW, n=2, stream=True)) == want
        echoed = typed(client.completions.create(**HOW, echo=True, logprobs=1)).choices[0]
        assert echoed.text == f"def f({want[0]}" and echoed.logprobs.token_logprobs[0] is None
        more = dict(logprobs=True, top_logprobs=2, n=2)
        chat = typed(client.chat.completions.create(**CHATS, **more))
        assert len(chat.choices[1].logprobs.content[0].top_logprobs) == 2
        chunks = list(
            client.chat.completions.create(
                **CHATS, **more, stream=True, stream_options=dict(include_usage=True)
            )
        )
        assert joined(chunks) == [choice.message.content for choice in chat.choices]
        assert chunks[-1].usage.to_dict() == chat.usage.to_dict() and not chunks[-1].choices
        assert all(chunk.usage is None for chunk in chunks[:-1])
        streamed = [c for chunk in chunks for choice in chunk.choices for c in choice.logprobs.content]
        known = [c for choice in chat.choices for c in choice.logprobs.content]
        shown = [sorted((c.token, c.logprob) for c in found) for found in (streamed, known)]
        assert shown[0] == shown[1]
        routed = client.chat.completions.create(**CHATS, extra_body=dict(tmoe=dict(routes=True)))
        assert len(routed.choices[0].tmoe["routes"]) == routed.usage.completion_tokens
        more = dict(extra_headers={"x-request-id": "mine"})
        raw = client.chat.completions.with_raw_response.create(**CHATS, **more)
        assert raw.headers["x-request-id"] == "mine"


def test_errors_of_the_package(port):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**HOW, n=0)
        assert refused.value.param == "n" and refused.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**CHATS, reasoning_effort="low")
        assert (refused.value.param, refused.value.code) == ("reasoning_effort", "unknown_parameter")
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**CHATS | dict(max_tokens=600))
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(**CHATS | dict(model="other"))
        assert missing.value.code == "model_not_found"
        for call in (
            lambda: client.embeddings.create(model="tiny", input="a"),
            lambda: client.responses.create(model="tiny", input="a"),
        ):
            with pytest.raises(openai.NotFoundError) as missing:
                call()
            assert "/v1/chat/completions" in missing.value.message


def test_the_async_package(port, engine):
    async def ask():
        at = dict(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
        async with openai.AsyncOpenAI(**at) as client:
            how = HOW | dict(prompt="a")
            asked = (client.completions.create(**how | dict(seed=i)) for i in range(4))
            found = [typed(one).choices[0].text for one in await asyncio.gather(*asked)]
            stream = await client.completions.create(**how | dict(seed=0), stream=True)
            text = joined([chunk async for chunk in stream])
            chat = await client.chat.completions.create(**CHATS, stream=True)
            said = joined([chunk async for chunk in chat])
            return found, text, said, typed(await client.chat.completions.create(**CHATS))

    texts, streamed, said, chat = asyncio.run(ask())
    want = [alone(engine, "a", max_tokens=12, temperature=0.8, seed=i)[0].text for i in range(4)]
    assert texts == want and streamed == want[:1] and said == [chat.choices[0].message.content]
