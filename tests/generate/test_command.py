"""python -m tmoe.generate: every kind of folder, one prompt, many, a file of them, and a conversation."""

import io
import json
import shutil
import sys
from dataclasses import asdict

import pytest
import tokenizers
import torch
from corpora import bpe  # noqa: F401
from hf_tiny import load_step, saved

from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.data.chat.encoding import chat_prompt
from tmoe.data.tokenizer import ByteTokenizer, JsonTokenizer, tokenizer_files
from tmoe.generate import Engine, Sampling, command_line
from tmoe.generate.generation_config import sampling_of
from tmoe.generate.load import find, load
from tmoe.hf import import_hf
from tmoe.model.transformer import Transformer

CFG = ModelConfig(
    vocab=256,
    dim=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    rope=RopeConfig(max_seq=96),
    moe=MoEConfig(experts=2, top_k=1, ffn_dim=8, renormalize=False),
)
GREEDY = ["--temperature", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of two steps, the older one with other weights."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = Transformer(CFG)
    config = dict(model=asdict(CFG), train=dict(seq=40), data=dict(tokenizer="bytes"))
    info = dict(config=config, data=dict(tokenizer="bytes"))
    checkpoints = Checkpoints(folder / "checkpoints", keep=0, mode="sync", info=info)
    for step in (1, 2):
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.4)
        tensors = {f"model.{n}": t for n, t in model.state_dict().items()}
        checkpoints.save(step, tensors | {"optim.x": torch.zeros(2)}, dict(step=step, tokens=1), {})
    return folder


def answers(model: Transformer, prompts: list, n: int = 1, **how) -> list[str]:
    found = Engine(model, ByteTokenizer()).generate(prompts, n, Sampling(**how))
    return [sample.text for some in found for sample in some]


def test_a_run_is_its_last_whole_step(run, tmp_path, capsys):
    newest = load_step(run / "checkpoints" / "step-2")
    (want,) = answers(newest, ["def f("], temperature=0, max_tokens=34, min_tokens=34)
    for path in (run, run / "checkpoints", run / "checkpoints" / "step-2"):
        command_line.main([str(path), "def f(", *GREEDY, "--min-tokens", "34"])
        said = capsys.readouterr()
        # as many tokens as the sequences of 40 that it was trained on leave room for
        assert said.out == f"def f({want}\n"
        assert "34 tokens (length)" in said.err and "tokens/s" in said.err and "step-2" in said.err
    # a damaged newest step is passed over
    damaged = tmp_path / "run"
    shutil.copytree(run, damaged)
    file = next((damaged / "checkpoints" / "step-2").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert find(damaged).name == "step-1"


def test_several_answers_to_a_prompt(run, capsys):
    words = ["ab", "-n", "3", "--seed", "5", "--max-tokens", "6", "--temperature", "1", "--device", "cpu"]
    command_line.main([str(run), *words])
    said = capsys.readouterr()
    want = answers(load_step(run / "checkpoints" / "step-2"), ["ab"], 3, seed=5, max_tokens=6)
    assert said.out == "".join(f"ab{text}\n" for text in want)
    assert "--- 3 of 3" in said.err and "18 tokens" in said.err


def test_a_prompt_from_stdin_and_a_stop_text(run, capsys, monkeypatch):
    model = load_step(run / "checkpoints" / "step-2")
    (whole,) = answers(model, ["x\ny"], temperature=0, max_tokens=20)
    stop = whole[3]
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\ny"))
    command_line.main([str(run), *GREEDY, "--max-tokens", "20", "--stop", "never", "--stop", stop])
    said = capsys.readouterr()
    assert said.out == f"x\ny{whole.partition(stop)[0]}\n" and "(stop)" in said.err


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl", "prompts.json"])
def test_a_file_of_prompts(run, tmp_path, name):
    rows = [dict(prompt="one"), dict(prompt="zwei", number=7), dict(prompt="3")]
    lines = {
        "prompts.txt": "one\n\nzwei\n3\n",
        "prompts.jsonl": "\n".join(map(json.dumps, rows)),
        "prompts.json": json.dumps(rows),
    }
    (tmp_path / name).write_text(lines[name])
    out = tmp_path / "out.jsonl"
    words = ["--file", str(tmp_path / name), "--out", str(out), "-n", "2", "--max-tokens", "5"]
    command_line.main([str(run), *words, "--temperature", "1", "--device", "cpu", "--slots", "2"])
    found = [json.loads(line) for line in out.read_text().splitlines()]
    prompts = [row["prompt"] for row in rows]
    assert [(row["prompt"], row["sample"]) for row in found] == [(p, i) for p in prompts for i in (0, 1)]
    model = load_step(run / "checkpoints" / "step-2")
    assert [row["text"] for row in found] == answers(model, prompts, 2, max_tokens=5)
    assert all(row["tokens"] == 5 and row["logprob"] < 0 and row["finish"] == "length" for row in found)
    assert ("number" in found[2]) == (name != "prompts.txt")


def test_messages_are_a_conversation(run, tmp_path, capsys):
    messages = [dict(role="user", content="hi")]
    (tmp_path / "p.jsonl").write_text(json.dumps(dict(messages=messages)))
    command_line.main([str(run), "--file", str(tmp_path / "p.jsonl"), *GREEDY, "--max-tokens", "4"])
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    prompt = [int(i) for i in chat_prompt(messages, ByteTokenizer())]
    model = load_step(run / "checkpoints" / "step-2")
    assert [row["text"]] == answers(model, [prompt], temperature=0, max_tokens=4)
    command_line.main([str(run), "hi", "--chat", *GREEDY, "--max-tokens", "4"])
    assert capsys.readouterr().out == row["text"] + "\n"

    # what a row gives the template beside its messages
    (tmp_path / "mood.jinja").write_text(
        "{% for one in messages %}{{ one.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ mood }}{% if tools %}{{ tools | length }}{% endif %}{% endif %}"
    )
    given = dict(tools=[dict(name="f")] * 2, chat_template_kwargs=dict(mood="calm"), system="be")
    (tmp_path / "p.jsonl").write_text(json.dumps(dict(messages=messages) | given))
    template = ["--chat-template", str(tmp_path / "mood.jinja")]
    command_line.main(
        [str(run), "--file", str(tmp_path / "p.jsonl"), *template, *GREEDY, "--max-tokens", "4"]
    )
    said = capsys.readouterr()
    (row,) = map(json.loads, said.out.splitlines())
    assert [row["text"]] == answers(model, [list(b"be\0hi\0calm2")], temperature=0, max_tokens=4)
    # and what the template does not read of it
    left = f"left out by the chat template ({template[1]}): "
    assert said.err.count("left out") == 1 and f"{left}tools in 1 row\n" in said.err
    (tmp_path / "mood.jinja").write_text(
        "{% for one in messages %}{{ one.content }}{{ eos_token }}{% endfor %}"
    )
    command_line.main(
        [str(run), "--file", str(tmp_path / "p.jsonl"), *template, *GREEDY, "--max-tokens", "4"]
    )
    assert f"{left}chat_template_kwargs: mood in 1 row, tools in 1 row\n" in capsys.readouterr().err


def test_a_conversation_in_the_terminal(run, capsys, monkeypatch):
    typed = iter(["hi", "", "more", "/new", "hi", "x" * 99])

    def read(shown):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    command_line.main([str(run), "--chat", "--system", "s", *GREEDY, "--max-tokens", "4"])
    said = capsys.readouterr()
    model = load_step(run / "checkpoints" / "step-2")
    messages = [dict(role="system", content="s"), dict(role="user", content="hi")]
    prompt = [int(i) for i in chat_prompt(messages, ByteTokenizer())]
    (first,) = answers(model, [prompt], temperature=0, max_tokens=4)
    messages += [dict(role="assistant", content=first), dict(role="user", content="more")]
    prompt = [int(i) for i in chat_prompt(messages, ByteTokenizer())]
    (second,) = answers(model, [prompt], temperature=0, max_tokens=4)
    assert said.out == f"{first}{second}{first}\n"
    assert said.err.count("tokens/s") == 3 and "model.rope.max_seq=96" in said.err


def test_lines_of_a_pipe_are_messages(run, capsys, monkeypatch):
    """Each with the conversation before it, as one by one; /new begins another, /quit ends all."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nmore\n/help\n/new\nhi\n/quit\nnever\n"))
    command_line.main([str(run), "--chat", *GREEDY, "--max-tokens", "4"])
    said = capsys.readouterr()
    model = load_step(run / "checkpoints" / "step-2")
    messages: list = []
    want = []
    for text in ("hi", "more"):
        messages.append(dict(role="user", content=text))
        prompt = [int(i) for i in chat_prompt(messages, ByteTokenizer())]
        want += answers(model, [prompt], temperature=0, max_tokens=4)
        messages.append(dict(role="assistant", content=want[-1]))
    assert said.out == f"{want[0]}\n{want[1]}\n{want[0]}\n"
    assert said.err.count("tokens/s") == 3 and said.err.count(command_line.HELP) == 1
    assert "conversations are written by plain built-in template" in said.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n" + "x" * 99))
    with pytest.raises(SystemExit) as end:
        command_line.main([str(run), "--chat", *GREEDY, "--max-tokens", "4"])
    assert str(end.value).startswith("error: stdin: line 2: ")
    monkeypatch.setattr(sys, "stdin", io.StringIO("/quitt\n"))
    with pytest.raises(SystemExit) as end:
        command_line.main([str(run), "--chat", *GREEDY, "--max-tokens", "4"])
    assert "stdin: line 1: /quitt: no such command; valid: /new, /help, /quit" in str(end.value)
    assert command_line.no_command("/system be kind").startswith("/system: no such command")
    assert not any(map(command_line.no_command, ("/usr/bin is a folder", "1/2", "//", "/", "/2")))
    with pytest.raises(SystemExit) as end:
        command_line.main([str(run), "--chat", "-n", "2"])
    assert "-n=2: a conversation has one answer" in str(end.value)


def test_bytes_of_a_pipe(run, capsys, monkeypatch):
    """A byte order mark is no part of a message; other bytes than text, and no line at all, are named."""

    def asked(raw: bytes, errors: str, *words: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), "utf-8", errors))
        command_line.main([str(run), *words, *GREEDY, "--max-tokens", "4"])
        return capsys.readouterr().out

    assert asked(b"\xef\xbb\xbfhi\n", "strict", "--chat") == asked(b"hi", "strict", "--chat")
    assert asked(b"\xef\xbb\xbfa\nb", "strict").startswith("a\nb")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    command_line.main([str(run), "--chat", *GREEDY])
    assert capsys.readouterr().err.endswith("stdin holds no message\n")
    for errors in ("strict", "surrogateescape"):
        for words in (["--chat"], []):
            with pytest.raises(SystemExit) as end:
                asked(b"hi \xff\n", errors, *words)
            assert str(end.value).startswith("error: stdin: not UTF-8: "), end.value


@pytest.mark.filterwarnings("ignore:.*script")
def test_a_hugging_face_folder_and_its_import(tmp_path, bpe, monkeypatch):  # noqa: F811
    """Its tokenizer, the tokens it begins texts with, the ids that end answers, its own sampling."""
    import hf_tiny
    from transformers import LlamaConfig

    sizes = hf_tiny.SIZES | dict(vocab_size=320)
    monkeypatch.setitem(hf_tiny.MODELS, "llama", lambda: LlamaConfig(**sizes))
    folder = saved(tmp_path / "hf", "llama")
    made = tokenizers.Tokenizer.from_file(str(bpe))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    made.save(str(folder / "tokenizer.json"))
    generation = dict(eos_token_id=[2, 5], do_sample=True, temperature=0.6, top_k=7)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    import_hf(folder, tmp_path / "step")
    tokenizer = JsonTokenizer(tokenizer_files(str(folder)))
    for path in (folder, tmp_path / "step"):
        loaded = load(path, device="cpu")
        assert loaded.begin == (0,) and set(loaded.eos) == {0, 2, 5} and loaded.seq is None
        assert sampling_of(loaded.generation) == dict(temperature=0.6, top_k=7)
        engine = loaded.engine()
        ids = [0, *tokenizer.encode("router token").tolist()]
        assert engine.ids_of(0, "router token") == ids
        (got,) = engine.generate(["router token"], 1, Sampling(temperature=0, max_tokens=8))[0]
        theirs = hf_tiny.make("llama")
        theirs.generation_config.eos_token_id = [0, 2, 5]
        want = theirs.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
        assert got.ids.tolist() == want.tolist()
        flags = command_line.Flags(path, top_k=3)
        assert flags.sampling(loaded) == Sampling(temperature=0.6, top_k=3, max_tokens=256)


def test_what_cannot_be_done_is_one_message(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "there").touch()
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    rows = [dict(prompt="a"), dict(messages=[dict(role="user", content="b")])]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "none.txt").write_text("\n")
    (tmp_path / "blank.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    (tmp_path / "role.jsonl").write_text('{"messages": [{"role": "x", "content": "a"}]}')
    (tmp_path / "tools.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}], "tools": 5}')
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for words, names in (
        (["nowhere", "x"], "nowhere: no such folder; valid: a run folder, a step folder"),
        ([str(tmp_path / "empty"), "x"], "must be a run folder, a step folder or a Hugging Face folder"),
        ([str(run)], "give a prompt"),
        ([str(run), "x", "--file", "y"], "a prompt and --file: give one of them"),
        ([str(run), "x", "--out", "y"], "--out=y: needs --file"),
        ([str(run), "--file", "y", "--out", str(tmp_path / "there")], "is there already; name a new file"),
        ([str(run), "--file", str(tmp_path / "bad.jsonl")], "bad.jsonl:2: must be"),
        ([str(run), "--file", str(tmp_path / "mixed.jsonl")], "need --chat"),
        ([str(run), "--file", str(tmp_path / "none.txt")], "holds no prompt"),
        ([str(run), "x", "--top-p", "2"], "--top-p=2.0: must be above 0 and at most 1"),
        ([str(run), "x" * 97], "97 tokens, but model.rope.max_seq=96"),
        ([str(run), "x", "--tokenizer", "nofile"], "--tokenizer=nofile: no such file"),
        ([str(run), "x", "-n", "0"], "-n=0: must be at least 1"),
        ([str(run), "x", "--max-tokens", "0"], "--max-tokens=0: must be at least 1"),
        ([str(run), "x", "--device", "tpu"], "--device=tpu: valid here: cpu"),
        ([str(run), "x", "--device", "cuda:99"], "--device=cuda:99: valid here: cpu"),
        (
            [str(run), "x", "--chat", "--chat-template", "nofile"],
            "error: --chat-template=nofile: no such file",
        ),
        ([str(run), "--file", str(tmp_path / "blank.jsonl")], "blank.jsonl: prompt 2: prompts[1]: is empty"),
        ([str(run), "--file", str(tmp_path / "role.jsonl")], "role.jsonl: prompt 1: messages[0]: role 'x'"),
        (
            [str(run), "--file", str(tmp_path / "tools.jsonl")],
            "tools.jsonl: prompt 1: row: tools: must be a list",
        ),
    ):
        with pytest.raises(SystemExit) as end:
            command_line.main(words)
        assert names in str(end.value) and str(end.value).startswith("error: ")
