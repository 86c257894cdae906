"""What wrote a run's conversations is in its steps and exports: template, special tokens, ends, opening.

next: tmoe/hf/chat.py
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import corpora
import pytest
import tokenizers
from chat_tokenizers import chat_tokenizer
from corpora import prose
from hf_tiny import SIZES, others_of, saved
from runs import SMALL
from transformers import AutoTokenizer

import train
from tmoe import hf
from tmoe.checkpoint import tools as offline
from tmoe.checkpoint.manifest import CheckpointError, Manifest, read_manifest, write_manifest
from tmoe.cli.parse import parse
from tmoe.config.run import DataConfig
from tmoe.data.chat.encoding import chat_prompt
from tmoe.data.chat.format import TOOLS_FILE, ChatFormat, templates_in
from tmoe.data.chat.template import BUILT_IN, load_template
from tmoe.data.chat.template_choice import choose_template, format_of
from tmoe.data.convert import convert
from tmoe.data.dataset import _choose_tokenizer
from tmoe.data.tokenizer import DataError, JsonTokenizer, TokenizerFiles, load_tokenizer
from tmoe.generate.load import load
from tmoe.hf.chat import with_chat
from tmoe.hf.tokenizer_files import carried_by
from tmoe.run import process as runtime

bpe = corpora.bpe  # a fixture

MINE = (
    "{% for m in messages %}{{ m.role + ' says\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant says\n' }}{% endif %}"
)
TALK = [dict(role="user", content="q"), dict(role="assistant", content="a")]
BY_MINE = "user says\nq<|im_end|>\nassistant says\na<|im_end|>\n"
SHORT = """--no-compile --log.no-progress --log.no-report --train.seq 64 --train.batch 2 --steps 1
    --train.eval-every 0 --train.eval-batches 1 --optim.warmup 1 --data.val-fraction 0.2
    --train.dtype fp32""".split()


def trained(rank: int, world: int, argvs: list[list[str]]) -> list[tuple[int, str]]:
    """For each command line of train.py: exit code, and what was said."""
    found = []
    for argv in argvs:
        cfg = parse(argv, "", rank=rank, world=world)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                trainer = train.Trainer(cfg, runtime.start(cfg.seed))
                with trainer.metrics:
                    trainer.train()
                code = 0
            except SystemExit as error:
                code = error.code
        found.append((code, said.getvalue()))
    return found


def text_by_transformers(folder: Path, **how) -> str:
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK, tokenize=False, **how)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder with a template of its own, whose answers end at id 5, and rows for each task."""
    monkeypatch.setitem(SIZES, "vocab_size", 330)
    folder = saved(tmp_path / "base", "qwen3_moe")
    files = chat_tokenizer("chatml").files
    (folder / "tokenizer.json").write_bytes(files.raw)
    settings = dict(eos_token="<|im_start|>", tokenizer_class="PreTrainedTokenizerFast", chat_template="old")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_bytes(files.template)
    generation = dict(eos_token_id=[5], do_sample=True, temperature=0.5, repetition_penalty=1.1)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    user = [[dict(role="user", content=f"q{n}")] for n in range(20)]
    rows = dict(
        chat=[dict(messages=[*one, dict(role="assistant", content="a")]) for one in user],
        pairs=[dict(prompt=one, chosen=[TALK[1]], rejected=[dict(TALK[1], content="b")]) for one in user],
        prompts=[dict(prompt=one, answer="a") for one in user],
    )
    for name, some in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    (tmp_path / "mine.jinja").write_text(MINE)
    (tmp_path / "other.jinja").write_text(MINE.replace("says", "writes"))
    return folder


def test_the_template_of_a_run_goes_where_its_weights_go(gloo, base: Path, tmp_path: Path, capsys):
    at = tmp_path
    sft = [*SHORT, "--task", "sft", "--data.path", str(at / "chat.jsonl")]
    pairs = [*SHORT, "--task", "preference", "--data.path", str(at / "pairs.jsonl")]
    grpo = [
        *SHORT,
        "--task",
        "grpo",
        "--data.path",
        str(at / "prompts.jsonl"),
        "--grpo.rewards",
        "length(8,4)",
    ]
    grpo += "--grpo.prompts 2 --grpo.group 2 --grpo.max-tokens 8".split()
    mine, other = (["--data.chat-template", str(at / f"{name}.jinja")] for name in ("mine", "other"))
    step = at / "a/checkpoints/step-1"
    argvs = [
        [*sft, *mine, "--init", str(base), "--out", str(at / "a")],
        [*sft, "--init", str(step), "--out", str(at / "b")],
        [*pairs, "--init", str(step), "--out", str(at / "c")],
        [*grpo, "--init", str(step), "--out", str(at / "d")],
        [*sft, *other, "--init", str(step), "--out", str(at / "e")],
        [*sft, *other, "--out", str(at / "a"), "--steps", "2", "--init", str(base)],
        [*sft, "--out", str(at / "a"), "--steps", "2", "--init", str(base)],
    ]
    found = gloo(1, trained, argvs)[0]
    assert [code for code, _ in found] == [0, 0, 0, 0, 0, 2, 0], [said[-300:] for _, said in found][3:]
    known = ": is used instead of the template of the weights"
    assert [known in said for _, said in found] == [True, *[False] * 3, True, False, False]
    assert f"--data.chat-template={at / 'other.jinja'}: is used" in found[4][1]
    assert "--data.chat-template" in found[5][1] and "--init" in found[5][1]
    assert "not followed: temperature=0.5, repetition_penalty=1.1: rollouts sample the policy" in found[3][1]
    for run in "abcd":
        chat = read_manifest(at / run / "checkpoints/step-1").info["chat"]
        assert (chat["template"], chat["tools"], chat["ends"]) == (MINE, None, [0, 5]), run
    assert "writes" in read_manifest(at / "e/checkpoints/step-1").info["chat"]["template"]

    # what answers: the run's template, and all ends
    loaded = load(step, device="cpu")
    prompt = loaded.tokenizer.decode(chat_prompt(TALK[:1], loaded.tokenizer))
    assert prompt == "user says\nq<|im_end|>\nassistant says\n"
    assert {*loaded.engine().eos} == {0, 1, 5} and loaded.begin == ()

    # what is written of it: resharded weights, a preference run
    offline.main(["reshard", str(step), str(at / "weights"), "--world", "2", "--only", "model"])
    offline.main(["average", str(step), str(at / "b/checkpoints/step-1"), str(at / "mean")])
    assert "conversations are written" not in capsys.readouterr().out
    offline.main(["average", str(step), str(at / "e/checkpoints/step-1"), str(at / "both")])
    assert f"conversations are written as in {step}; they differ in" in capsys.readouterr().out
    for name, one in dict(x=step, y=at / "c/checkpoints/step-1", z=at / "weights", m=at / "mean").items():
        hf.export_hf(one, at / name)
        assert text_by_transformers(at / name) == BY_MINE, name
        assert "chat_template" not in json.loads((at / name / "tokenizer_config.json").read_text())
        assert json.loads((at / name / "generation_config.json").read_text())["eos_token_id"] == [0, 5]
        assert carried_by(at / name).chat.template == MINE
    again = others_of(at / "x")
    hf.import_hf(at / "x", at / "import")
    hf.export_hf(at / "import", at / "back")
    assert others_of(at / "back") == again


def test_a_tokenizer_of_another_folder_brings_no_template(base: Path, tmp_path: Path):
    """The weights' own holds, and a line says so; a named file that is gone is an error that names theirs."""
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(base / "tokenizer.json", other)
    shutil.copy(base / "tokenizer_config.json", other)  # whose template is another
    carried = carried_by(base)
    theirs = (base / "chat_template.jinja").read_text()
    for cfg, notes in ((DataConfig(tokenizer=str(other)), 1), (DataConfig(), 0)):
        chosen = choose_template(cfg, _choose_tokenizer(cfg.tokenizer, carried), carried)
        assert chosen.template.text == theirs and len(chosen.notes) == notes
        assert not notes or f"--data.tokenizer={other}: the template there is not used" in chosen.notes[0]
    cfg = DataConfig(chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(DataError, match=r"none\.jinja: no such file; valid: .*base/chat_template\.jinja"):
        choose_template(cfg, _choose_tokenizer("auto", carried), carried)


def test_an_import_comes_back_as_it_was_and_keeps_its_template_without_files(base: Path, tmp_path: Path):
    hf.import_hf(base, tmp_path / "step")
    hf.export_hf(tmp_path / "step", tmp_path / "back")
    assert others_of(tmp_path / "back") == others_of(base)
    offline.main(
        ["reshard", str(tmp_path / "step"), str(tmp_path / "bare"), "--world", "1", "--only", "model"]
    )
    known = carried_by(tmp_path / "bare").chat
    assert known.template == (base / "chat_template.jinja").read_text() and known.ends == (5,)


def test_a_run_on_shards_is_finetuned_with_its_own_tokenizer_and_the_built_in_template(
    gloo, tmp_path: Path, bpe: Path
):
    at = tmp_path
    (at / "a.txt").write_text(prose(1, 3000))
    (at / "kept").mkdir()
    shutil.move(bpe, named := at / "kept" / "mine.json")
    convert((str(at / "a.txt"),), out=at / "shards", tokenizer=str(named))
    rows = [dict(messages=[dict(TALK[0], content=f"q{n}"), TALK[1]]) for n in range(20)]
    (at / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = [*SMALL, *"--steps 1 --train.batch 2 --model.vocab 300 --data.val-fraction 0.2".split()]
    step = at / "pre/checkpoints/step-1"
    argvs = [
        [*small, "--data.path", str(at / "shards"), "--out", str(at / "pre")],
        [*small, "--task", "sft", "--data.path", str(at / "chat.jsonl"), "--init", str(step)],
    ]
    argvs[1] += ["--out", str(at / "sft"), "--train.seq", "64"]
    found = gloo(1, trained, argvs)[0]
    assert [code for code, _ in found] == [0, 0], found
    assert BUILT_IN in found[1][1]
    hf.export_hf(at / "sft/checkpoints/step-1", at / "x")
    assert text_by_transformers(at / "x") == "user\nq<|endoftext|>\nassistant\na<|endoftext|>\n"
    (at / "shards").rename(at / "gone")
    assert carried_by(step).files is None


def manifest_of(chat: ChatFormat | dict) -> Manifest:
    told = chat.as_json() if isinstance(chat, ChatFormat) else chat
    return Manifest(1, 0, 1, 0, dict(chat=told), {}, {}, {})


def test_the_built_in_template_opens_with_bos_as_in_training(tmp_path: Path):
    """Also where no file names eos and bos: the export's settings say them."""
    files = chat_tokenizer("mistral").files
    made = tokenizers.Tokenizer.from_buffer(files.raw)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    raw = made.to_str().encode()
    tokenizer = JsonTokenizer(TokenizerFiles("t", raw, files.settings))
    template = load_template(tokenizer)
    chat = format_of(tokenizer, template, {"conversation"}, 1000)
    want = template.render(TALK)
    assert want == "<s>user\nq</s>\nassistant\na</s>\n" and template.source == BUILT_IN
    assert chat.opening == (made.token_to_id("<s>"),) and chat.ends == (tokenizer.eos,)
    given = {"tokenizer.json": lambda: raw, "config.json": lambda: b'{"model_type": "llama"}'}
    (tmp_path / "x").mkdir()
    found, notes = with_chat(Path("step-1"), manifest_of(chat), given, tmp_path / "x")
    for name, read in found.items():
        (tmp_path / "x" / name).write_bytes(read())
    assert text_by_transformers(tmp_path / "x") == want
    assert json.loads(found["generation_config.json"]())["eos_token_id"] == tokenizer.eos
    assert len(notes) == 3 and "bos_token '<s>'" in notes[1] and "eos_token '</s>'" in notes[1]


def test_a_template_for_tools_is_exported_beside_the_other(tmp_path: Path):
    files = chat_tokenizer("chatml").files
    chat = ChatFormat("plain", "with tools", {"eos_token": "<|im_end|>"}, (0,))
    given = {"tokenizer.json": lambda: files.raw, "tokenizer_config.json": lambda: files.settings}
    given |= {"chat_template.jinja": lambda: b"old", "config.json": lambda: b'{"model_type": "llama"}'}
    (tmp_path / "x").mkdir()
    found, notes = with_chat(Path("step-1"), manifest_of(chat), given, tmp_path / "x")
    for name, read in found.items():
        (tmp_path / "x" / name).write_bytes(read())
    assert "chat_template.jinja" not in found and "the original's is replaced" in notes[0]
    assert text_by_transformers(tmp_path / "x") == "plain"
    assert text_by_transformers(tmp_path / "x", tools=[dict(type="function")]) == "with tools"
    assert templates_in({name: read() for name, read in found.items()}) == ("plain", "with tools")
    # and it is read where transformers 5 saves it
    AutoTokenizer.from_pretrained(tmp_path / "x").save_pretrained(tmp_path / "y")
    assert (tmp_path / "y" / TOOLS_FILE).read_text() == "with tools"
    template = load_template(load_tokenizer(str(tmp_path / "y")))
    assert (template.text, template.tools) == ("plain", "with tools")
    (tmp_path / "y" / "config.json").write_text('{"model_type": "llama"}')
    assert carried_by(tmp_path / "y").chat[:2] == ("plain", "with tools")


def test_a_malformed_format_is_named(tmp_path: Path):
    (tmp_path / "step-1").mkdir()
    bad = dict(template=3, tools=None, special={}, ends=[-1], opening=None)
    write_manifest(tmp_path / "step-1", replace(manifest_of(bad), saved_ns=1))
    with pytest.raises(CheckpointError, match=r"manifest\.json: chat: malformed: template, ends"):
        carried_by(tmp_path / "step-1")
