"""Which tokens of a conversation are trained: golden masks of stock templates, and transformers' own."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from chat_tokenizers import SPECIAL, TEMPLATES, chat_tokenizer, shown

from tmoe.data.chat.conversations import Conversation, Plain
from tmoe.data.chat.encoding import Encoder, chat_prompt, encode, turn_end, turn_ends
from tmoe.data.chat.template import ChatTemplate, load_template
from tmoe.data.tokenizer import ByteTokenizer, DataError, JsonTokenizer


def said(role: str, content: str | None, **more) -> dict:
    return dict(role=role, content=content, **more)


def thinking(thought: str) -> dict:
    return dict(reasoning_content=thought, thinking=thought)


CALL = dict(type="function", function=dict(name="look", arguments=dict(at="Paris")))
TEXT_CALL = dict(type="function", function=dict(name="look", arguments='{"at": "Paris"}'))
NO_ARGUMENTS = dict(type="function", function=dict(name="look", arguments={}))
LOOK = dict(type="function", function=dict(name="look", description="Looks.", parameters={}))

CHAT = [
    said("system", "Be brief."),
    said("user", "Capital of France?"),
    said("assistant", "Paris."),
    said("user", "Again?"),
    said("assistant", "Paris!"),
]
THOUGHTS = [
    said("user", "Capital?"),
    said("assistant", "Paris.", **thinking("Easy.")),
    said("user", "Again?"),
    said("assistant", "Paris!", **thinking("Same.")),
]
TOOLS = [
    said("user", "Capital?"),
    said("assistant", "", tool_calls=[CALL], **thinking("Look it up.")),
    said("tool", "found"),
    said("assistant", "Paris.", **thinking("Found.")),
]
TEXT_TOOLS = [
    TOOLS[0],
    said("assistant", None, tool_calls=[TEXT_CALL]),
    TOOLS[2],
    said("assistant", "Paris."),
]

HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: 2025-01-01\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
)
TOLD = HARMONY + "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"

GOLDEN = [
    (
        "chatml",
        CHAT,
        [
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital of France?<|im_end|>\n"
            "<|im_start|>assistant\n⟦Paris.<|im_end|>⟧\n<|im_start|>user\nAgain?<|im_end|>\n"
            "<|im_start|>assistant\n⟦Paris!<|im_end|>⟧"
        ],
    ),
    # Thoughts of earlier turns are dropped: one sequence a turn. Without thoughts, what the generation prompt
    # supplies for thinking switched off is no part of the turn.
    (
        "qwen3",
        CHAT,
        [
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital of France?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Paris.<|im_end|>⟧",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital of France?<|im_end|>\n"
            "<|im_start|>assistant\nParis.<|im_end|>\n<|im_start|>user\nAgain?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Paris!<|im_end|>⟧",
        ],
    ),
    (
        "qwen3",
        THOUGHTS,
        [
            "<|im_start|>user\nCapital?<|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nEasy.\n</think>\n\nParis.<|im_end|>⟧",
            "<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n"
            "<|im_start|>user\nAgain?<|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nSame.\n</think>\n\nParis!<|im_end|>⟧",
        ],
    ),
    # Within one question thoughts stay, so its turns are one sequence.
    (
        "qwen3",
        TOOLS,
        [
            "<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nLook it up.\n</think>\n\n"
            '<tool_call>\n{"name": "look", "arguments": {"at": "Paris"}}\n</tool_call><|im_end|>⟧\n'
            "<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\nFound.\n</think>\n\nParis.<|im_end|>⟧"
        ],
    ),
    (
        "llama3",
        CHAT,
        [
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nCapital of France?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Paris.<|eot_id|>⟧"
            "<|start_header_id|>user<|end_header_id|>\n\nAgain?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Paris!<|eot_id|>⟧"
        ],
    ),
    (
        "mistral",
        CHAT,
        [
            "<s> [INST] Be brief.\n\nCapital of France? [/INST]⟦ Paris.</s>⟧ [INST] Again? [/INST]"
            "⟦ Paris!</s>⟧"
        ],
    ),
    # Earlier turns end with another token than the last, and without its thoughts.
    (
        "gpt_oss",
        CHAT,
        [
            TOLD + "<|start|>user<|message|>Capital of France?<|end|>"
            "<|start|>assistant⟦<|channel|>final<|message|>Paris.<|return|>⟧",
            TOLD + "<|start|>user<|message|>Capital of France?<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Paris.<|end|><|start|>user<|message|>Again?<|end|>"
            "<|start|>assistant⟦<|channel|>final<|message|>Paris!<|return|>⟧",
        ],
    ),
    # A thought before a call is dropped once there is an answer; the answer was given behind it all the same.
    (
        "gpt_oss",
        TOOLS,
        [
            HARMONY + "<|start|>user<|message|>Capital?<|end|><|start|>assistant"
            "⟦<|channel|>analysis<|message|>Look it up.<|end|>"
            "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>"
            '{"at": "Paris"}<|call|>⟧<|start|>functions.look to=assistant<|channel|>commentary<|message|>'
            '"found"<|end|><|start|>assistant'
            "⟦<|channel|>analysis<|message|>Found.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Paris.<|return|>⟧"
        ],
    ),
    (
        "deepseek",
        CHAT,
        [
            "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Capital of France?<｜Assistant｜>"
            "⟦Paris.<｜end▁of▁sentence｜>⟧<｜User｜>Again?<｜Assistant｜>⟦Paris!<｜end▁of▁sentence｜>⟧"
        ],
    ),
    # The answer to a tool has no header of its own.
    (
        "deepseek",
        TEXT_TOOLS,
        [
            "<｜begin▁of▁sentence｜><｜User｜>Capital?<｜Assistant｜>⟦<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
            'function<｜tool▁sep｜>look\n```json\n{"at": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            "<｜end▁of▁sentence｜>⟧<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>found<｜tool▁output▁end｜>"
            "<｜tool▁outputs▁end｜>⟦Paris.<｜end▁of▁sentence｜>⟧"
        ],
    ),
]


@pytest.mark.parametrize(
    "name, messages, expected", GOLDEN, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(GOLDEN)]
)
def test_golden_masks(name, messages, expected):
    tokenizer = chat_tokenizer(name)
    (sequences,) = encode([Conversation(messages)], tokenizer)
    assert [shown(one, tokenizer) for one in sequences] == expected


def theirs(name: str) -> transformers.PreTrainedTokenizerFast:
    return theirs_of(tokenizers.Tokenizer.from_buffer(chat_tokenizer(name).files.raw), name)


def theirs_of(model: tokenizers.Tokenizer, name: str) -> transformers.PreTrainedTokenizerFast:
    bos, eos = SPECIAL[name][:2]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(),
        eos_token=eos,
        **({"bos_token": bos} if bos else {}),
    )


@pytest.mark.parametrize("name", SPECIAL)
def test_texts_and_ids_are_those_of_transformers(name):
    """Of every beginning of every conversation, with and without generation prompt and tools."""
    tokenizer = chat_tokenizer(name)
    template = load_template(tokenizer, now=True)
    other = theirs(name)
    chats = [CHAT, *([THOUGHTS, TOOLS] if name in ("qwen3", "gpt_oss") else [])]
    for messages in (chat[:n] for chat in chats for n in range(1, len(chat) + 1)):
        for prompt, tools in itertools.product((False, True), (None, [LOOK])):
            how = dict(tools=tools, add_generation_prompt=prompt)
            text = other.apply_chat_template(messages, tokenize=False, **how)
            assert template.render(messages, tools, prompt=prompt) == text
            if prompt:
                ids = other.apply_chat_template(messages, return_dict=True, **how)["input_ids"]
                assert chat_prompt(messages, tokenizer, template, tools).tolist() == ids


def test_a_generation_tag_is_taken_at_its_word():
    """Masks of transformers, whose mask is zero without the tag."""
    tokenizer = chat_tokenizer("chatml_generation")
    out = theirs("chatml_generation").apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    ((sequence,),) = encode([Conversation(CHAT)], tokenizer)
    n = len(sequence.ids)
    assert sequence.ids.tolist() == out["input_ids"][:n]
    assert sequence.trained.tolist() == [bool(one) for one in out["assistant_masks"][:n]]
    assert not any(out["assistant_masks"][n:])
    # the same as by prefixes
    (by_prefixes,) = encode([Conversation(CHAT)], chat_tokenizer("chatml"))[0]
    assert np.array_equal(by_prefixes.ids, sequence.ids)
    assert np.array_equal(by_prefixes.trained, sequence.trained)


STOCK = dict(qwen3="qwen3", llama3="llama3", gpt_oss="gptoss")


@pytest.mark.parametrize("name", STOCK)
def test_templates_here_are_the_published_ones(name):
    """Where trl is installed: the texts of the published templates that it ships."""
    trl = pytest.importorskip("trl")
    stock = Path(trl.__file__).parent / "chat_templates" / f"{STOCK[name]}.jinja"
    if not stock.exists():
        pytest.skip("this trl ships no such template")
    tokenizer = chat_tokenizer(name)
    mine, published = load_template(tokenizer), chat_tokenizer(name, stock.read_text())
    published = load_template(published)
    chats = [CHAT, *([THOUGHTS, TOOLS] if name in ("qwen3", "gpt_oss") else [])]
    for messages, prompt in itertools.product(chats, (False, True)):
        for n in range(1, len(messages) + 1):
            assert mine.render(messages[:n], prompt=prompt) == published.render(messages[:n], prompt=prompt)


# name of a published template, and what the answer "4." must train, where that is more than the answer and
# the token behind it
TRAINED = dict(
    gptoss="<|channel|>final<|message|>4.<|return|>",
    muse_glimmer=" to=user<|message|>4.<|eot|>",
    glm4moe="\n<think></think>\n4.<|user|>",
    phi3="4.<|end|>\n<|im_end|>",
    phi3_5="4.<|end|>\n<|im_end|>",
    qwen3_8="\n</think>\n\n4.<|im_end|>",
    deepseekv3="\n</think>\n\n4.<｜end▁of▁sentence｜>",
    deepseek_r1_distill="\n</think>\n\n4.<｜end▁of▁sentence｜>",
)
REFUSED = {"llava_next", "idefics3", "smolvlm"}


def test_published_templates_are_trained_or_refused():
    """All that trl ships: the answer and the token that ends it is trained, or the error says why not."""
    trl = pytest.importorskip("trl")
    found = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    names = {path.stem.removesuffix("_training") for path in found if path.stem.endswith("_training")}
    for path in (path for path in found if path.stem in names):
        text = path.read_text()
        tokenizer = chat_tokenizer("chatml", text)
        marks = set(re.findall(r"<[|｜][^<>'\"{}]*?[|｜]>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>", text))
        tokenizer._tokenizer.add_special_tokens(sorted(marks))
        raw = tokenizer._tokenizer.to_str().encode()
        tokenizer = type(tokenizer)(tokenizer.files._replace(raw=raw))
        chat = [said("user", "2+2?"), said("assistant", "4."), said("user", "Sure?"), said("assistant", "4.")]
        try:
            (sequences,) = encode([Conversation(chat)], tokenizer)
        except DataError:
            assert path.stem in REFUSED, path.stem
            continue
        spans = [span for one in sequences for span in re.findall("⟦(.*?)⟧", shown(one, tokenizer), re.S)]
        assert len(spans) == 2, path.stem
        wanted = TRAINED.get(path.stem, r"4.MARK")
        for span in spans[-1:]:
            assert re.fullmatch(re.escape(wanted).replace("MARK", r"(<[^<>]+>){1,2}"), span), (
                path.stem,
                span,
            )


# ---- plain texts, the built-in template ----


def test_the_built_in_template():
    tokenizer = ByteTokenizer()
    template = load_template(tokenizer)
    assert "built-in" in template.source
    ((sequence,),) = encode([Conversation(CHAT[:3])], tokenizer)
    assert shown(sequence, tokenizer) == (
        "system\nBe brief.\0\nuser\nCapital of France?\0\nassistant\n⟦Paris.\0⟧"
    )
    assert chat_prompt(CHAT[:2], tokenizer).tobytes() == sequence.ids[: -len(b"Paris.\0")].tobytes()
    assert turn_end(tokenizer) == tokenizer.eos == 0
    ((sequence,),) = encode([Conversation(TOOLS, tools=[LOOK])], tokenizer)
    text = shown(sequence, tokenizer)
    assert (
        text.startswith('tools\n[{"type": "function"') and "\0⟧\ntool\nfound\0\nassistant\n⟦<think>" in text
    )
    for name in SPECIAL:
        if name != "chatml_generation":
            assert turn_end(chat_tokenizer(name)) == chat_tokenizer(name).eos, name


GLM = (
    "[gMASK]{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}"
    "{% else %}{{ '<|assistant|>\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + '</tool_call>' }}{% endfor %}"
    "{% endif %}{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt }}"
)


def special_too(tokenizer: JsonTokenizer, *marks: str) -> JsonTokenizer:
    """The tokenizer with more special tokens."""
    model = tokenizers.Tokenizer.from_buffer(tokenizer.files.raw)
    model.add_special_tokens(list(marks))
    return JsonTokenizer(tokenizer.files._replace(raw=model.to_str().encode()))


def test_an_end_that_depends_on_what_follows():
    """GLM writes no end: an answer ends in the user's mark, a call in that of an observation.

    </tool_call> ends a part of a turn, special or not.
    """
    marks = ("<|user|>", "<|observation|>", "<|assistant|>", "<tool_call>", "</tool_call>")
    tokenizer = special_too(chat_tokenizer("chatml", GLM), *marks)
    assert [tokenizer.decode([one]) for one in turn_ends(tokenizer)] == ["<|user|>", "<|observation|>"]
    assert turn_end(tokenizer) == turn_ends(tokenizer)[0]
    chat = [TOOLS[0], said("assistant", "", tool_calls=[NO_ARGUMENTS]), TOOLS[2], said("assistant", "Paris.")]
    ((sequence,),) = encode([Conversation(chat)], tokenizer)
    spans = re.findall("⟦(.*?)⟧", shown(sequence, tokenizer))
    assert spans == ["<tool_call>look</tool_call><|observation|>", "Paris.<|user|>"]


def test_an_end_is_special():
    """A line break that {% generation %} holds ends nothing, and no end at all is refused."""
    stock = (TEMPLATES / "chatml_generation.jinja").read_text()
    broken = stock.replace("message.content + '<|im_end|>' -}}", "message.content + '<|im_end|>\n' -}}")
    tokenizer = chat_tokenizer("chatml_generation", broken)
    assert turn_ends(tokenizer) == (tokenizer.eos,)
    outside = stock.replace(" + '<|im_end|>' -}}\n{%- endgeneration", " -}}\n{%- endgeneration")
    outside = outside.replace("{{- '\\n' -}}", "{{- '<|im_end|>\\n' -}}")
    with pytest.raises(
        DataError, match=r"generation %} .*leaves out the token that ends the turn.*'Paris\.'"
    ):
        encode([Conversation(CHAT)], chat_tokenizer("chatml_generation", outside))


def test_characters_of_several_bytes():
    ((sequence,),) = encode([Conversation([said("user", "é€😀"), said("assistant", "ü😀")])], ByteTokenizer())
    assert shown(sequence, ByteTokenizer()) == "user\né€😀\0\nassistant\n⟦ü😀\0⟧"


def test_texts_without_template():
    tokenizer = chat_tokenizer("llama3")
    ((sequence,),) = encode([Plain("What is ", "the capital")], tokenizer)
    assert shown(sequence, tokenizer) == "What is ⟦the capital<|eot_id|>⟧"
    assert sequence.ids[:-1].tolist() == [
        *tokenizer.encode("What is ").tolist(),
        *tokenizer.encode("the capital").tolist(),
    ]  # and not " the", which is one token


def test_a_turn_that_begins_within_a_token():
    """Line breaks of header and answer would share a token; a model answers behind the header's own."""
    tokenizer = chat_tokenizer("chatml")
    assert len(tokenizer.encode("\n\n")) == 1
    ((sequence,),) = encode([Conversation([said("user", "a"), said("assistant", "\n\nParis")])], tokenizer)
    prompt = chat_prompt([said("user", "a")], tokenizer)
    assert np.array_equal(sequence.ids[: len(prompt)], prompt)
    assert not sequence.trained[: len(prompt)].any() and sequence.trained[len(prompt) :].all()


def test_a_tokenizer_that_puts_a_blank_before_every_text():
    """SentencePiece's way, of Llama 2 and Mixtral: a prompt's end, encoded alone, begins with no blank."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    model.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>"], vocab_size=120)
    model.train_from_iterator(["Be brief. Capital of France? Paris! Again [INST] [/INST]\n"] * 3, trainer)
    files = chat_tokenizer("mistral").files
    tokenizer = JsonTokenizer(files._replace(raw=model.to_str().encode()))
    ((sequence,),) = encode([Conversation(CHAT)], tokenizer)
    trained = [tokenizer.decode([i]) for i in sequence.ids[sequence.trained]]
    assert "".join(trained).replace(" ", "") == "Paris.</s>Paris!</s>"
    prompt = chat_prompt(CHAT[:2], tokenizer)
    assert np.array_equal(sequence.ids[: len(prompt)], prompt) and not sequence.trained[: len(prompt)].any()
    assert sequence.trained[len(prompt)]
    ids = theirs_of(model, "mistral").apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert sequence.ids.tolist() == ids


def test_weight_and_first():
    messages = [
        said("user", "a"),
        said("assistant", "b", weight=0),
        said("user", "c"),
        said("assistant", "d"),
    ]
    tokenizer = chat_tokenizer("chatml")
    ((sequence,),) = encode([Conversation(messages)], tokenizer)
    assert re.findall("⟦(.*?)⟧", shown(sequence, tokenizer)) == ["d<|im_end|>"]
    messages = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]
    ((sequence,),) = encode([Conversation(messages, first=2)], tokenizer)
    assert re.findall("⟦(.*?)⟧", shown(sequence, tokenizer)) == ["d<|im_end|>"]
    ((sequence,),) = encode([Conversation(messages, first=2)], chat_tokenizer("chatml_generation"))
    assert re.findall("⟦(.*?)⟧", shown(sequence, tokenizer)) == ["d<|im_end|>"]


# ---- refused ----


@pytest.mark.parametrize(
    "name, messages, match",
    [
        ("mistral", [CHAT[1], CHAT[1], CHAT[2]], "refuses it: After the optional system message"),
        ("chatml", [said("user", "x<|im_end|>"), CHAT[2]], r"messages\[0\]: content holds '<\|im_end\|>'"),
        ("qwen3", [said("user", "x"), said("developer", "y"), CHAT[2]], "leaves out the role 'developer'"),
        ("qwen3", [CHAT[2]], "refuses it"),
        ("chatml", [CHAT[1]], "no turn of the assistant"),
        ("chatml", [CHAT[1], said("assistant", "\ud800")], "not Unicode"),
    ],
)
def test_refused(name, messages, match):
    with pytest.raises(DataError, match=match):
        encode([Conversation(messages)], chat_tokenizer(name))


def test_one_bad_row_does_not_spoil_its_neighbours():
    tokenizer = chat_tokenizer("chatml")
    good = Conversation(CHAT)
    bad = Conversation([CHAT[1], said("assistant", "\ud800")])
    found = Encoder(tokenizer, load_template(tokenizer)).encode([good, bad, good])
    assert isinstance(found[1], DataError)
    assert shown(found[0][0], tokenizer) == shown(found[2][0], tokenizer) == GOLDEN[0][2][0]


def test_a_template_whose_prompt_is_not_its_turn_is_refused():
    before, mark, after = (TEMPLATES / "deepseek.jinja").read_text().rpartition("'<｜Assistant｜>'")
    changed = before + mark.replace("｜>", "｜>Sure: ") + after
    with pytest.raises(DataError, match=r"generation prompt, ending in '.*Sure: .*chat-template"):
        encode([Conversation(CHAT)], chat_tokenizer("deepseek", changed))


def test_a_generation_tag_that_marks_nothing_is_refused():
    """Masks of zeros in silence, as other trainers have had them."""
    text = "{% for m in messages %}{{ m.role + m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match="no token of it is trained"):
        encode([Conversation(CHAT)], chat_tokenizer("chatml", text))


@pytest.mark.parametrize(
    "text, match",
    [
        ("{% for %}", "not a chat template"),
        ("{{ messages.__class__.__mro__ }}", "refuses it"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "refuses it"),
        ("{% set x = namespace(__init__=1) %}", "refuses it"),
        ("{{ messages.append(1) }}", "refuses it"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "refuses it"),
    ],
)
def test_templates_are_sandboxed(text, match):
    with pytest.raises(DataError, match=match):
        encode([Conversation(CHAT)], chat_tokenizer("chatml", text))


def test_loop_controls_and_layout():
    text = (
        "{% for m in messages %}\n    {% if m.role == 'system' %}\n        {% continue %}\n    {% endif %}\n"
        "{{ m | tojson(indent=1) }}{% endfor %}{{ strftime_now('%Y') }}"
    )
    got = ChatTemplate(text, "here", {}).render(CHAT[:2])
    assert got == '{\n "role": "user",\n "content": "Capital of France?"\n}2025'


def test_templates_by_name(tmp_path):
    tokenizer = chat_tokenizer("chatml")
    named = [dict(name="default", template="D{{ eos_token }}"), dict(name="tool_use", template="T")]
    settings = json.dumps(dict(eos_token="<|im_end|>", chat_template=named)).encode()
    tokenizer = type(tokenizer)(tokenizer.files._replace(settings=settings, template=None))
    template = load_template(tokenizer)
    assert template.render(CHAT) == "D<|im_end|>" and template.render(CHAT, [LOOK]) == "T"
    path = tmp_path / "mine.jinja"
    path.write_text("mine")
    assert load_template(tokenizer, str(path)).render(CHAT) == "mine"
    with pytest.raises(DataError, match=r"--data.chat-template=.*no such file"):
        load_template(tokenizer, str(tmp_path / "none.jinja"))


def test_prompts_to_generate_from():
    tokenizer = chat_tokenizer("qwen3")
    asked = CHAT[1:2]
    plain, silent = (
        tokenizer.decode(chat_prompt(asked, tokenizer, **how)) for how in ({}, dict(enable_thinking=False))
    )
    assert plain == "<|im_start|>user\nCapital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert silent == plain + "<think>\n\n</think>\n\n"
    with pytest.raises(DataError, match=r"messages\[0\]: role 'critic'"):
        chat_prompt([said("critic", "a")], tokenizer)
    with pytest.raises(DataError, match=r"messages\[0\]: content holds '<\|im_end\|>'"):
        chat_prompt([said("user", "a<|im_end|>")], tokenizer)
    with pytest.raises(DataError, match="refuses it: After the optional"):
        chat_prompt([said("assistant", "a")], chat_tokenizer("mistral"))
