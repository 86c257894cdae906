"""The tokenizer of the weights that a run starts from is the default for its data.

Data of another tokenizer are refused, on every road.

next: tmoe/hf/tokenizer_files.py
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import corpora
import pytest
from corpora import prose
from hf_tiny import SIZES, others_of, saved
from runs import SMALL

import train
from tmoe import hf
from tmoe.checkpoint import tools as offline
from tmoe.checkpoint.manifest import CheckpointError, read_manifest
from tmoe.cli.parse import parse
from tmoe.config.compare import build_config
from tmoe.data.convert import convert
from tmoe.data.tokenizer import load_tokenizer
from tmoe.hf.config import read_config
from tmoe.hf.tokenizer_files import carried_by
from tmoe.run import process as runtime

bpe = corpora.bpe  # a fixture


def runs(rank: int, world: int, argvs: list[list[str]], model: str) -> list[tuple[int, str, str]]:
    """For each command line: exit code, what was said on stderr, the tokenizer of its training data."""
    results = []
    for argv in argvs:
        cfg = replace(parse(argv, "", rank=rank, world=world), model=build_config(json.loads(model)))
        trainer = None
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                trainer = train.Trainer(cfg, runtime.start(cfg.seed))
                with trainer.metrics:
                    trainer.train()
                code = 0
            except SystemExit as error:
                code = error.code
        results.append((code, said.getvalue(), trainer.data.fingerprint if trainer else ""))
    return results


@pytest.fixture
def start(tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """A Hugging Face folder with a tokenizer, another tokenizer, and data.

    The data are texts, rows, and shards of both tokenizers and of bytes.
    """
    monkeypatch.setitem(SIZES, "vocab_size", 300)
    hf_dir = saved(tmp_path / "hf", "qwen3_moe")
    shutil.copy(bpe, hf_dir / "tokenizer.json")
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text(json.dumps(json.loads(bpe.read_text()), indent=1))
    text, rows = tmp_path / "text", tmp_path / "rows.jsonl"
    text.mkdir()
    for n in range(4):
        (text / f"{n}.txt").write_text(prose(n, 800))
    rows.write_text("".join(json.dumps(dict(text=prose(n, 300))) + "\n" for n in range(10)))
    for name, tokenizer in (("right", str(hf_dir)), ("wrong", str(other)), ("bytes", "bytes")):
        convert((str(text),), out=tmp_path / name, tokenizer=tokenizer)
    flags = [
        *SMALL,
        "--train.dtype",
        "fp32",
        "--steps",
        "1",
        "--train.batch",
        "2",
        "--data.val-fraction",
        "0.5",
    ]
    model = json.dumps(asdict(read_config(json.loads((hf_dir / "config.json").read_text()))))
    return dict(flags=flags, hf=hf_dir, model=model, is_=load_tokenizer(str(hf_dir)).fingerprint, at=tmp_path)


@pytest.mark.slow
def test_data_are_read_with_the_tokenizer_of_the_start_or_refused(gloo, start: dict):
    """On two ranks, from a Hugging Face folder and from an imported step.

    The data are text, rows, shards and mixtures.
    """
    at, flags, mine = start["at"], start["flags"], start["is_"]
    hf.import_hf(start["hf"], at / "step")
    offline.main(["reshard", str(at / "step"), str(at / "weights"), "--world", "1", "--only", "model"])
    good = [["text"], ["rows.jsonl"], ["right"], ["right", "text"]]
    bad = [["wrong"], ["bytes"], ["text", "wrong"]]
    for init in ("hf", "step"):
        begin = [*flags, "--init", str(at / init), "--parallel.ep", "2"]
        argvs = [[*begin, "--data.path", *(str(at / name) for name in names)] for names in (*good, *bad)]
        argvs.append([*argvs[0], "--data.tokenizer", str(at / "other")])
        argvs.append([*argvs[0], "--data.tokenizer", "bytes"])
        argvs.append([*argvs[0], "--data.tokenizer", str(at / "hf")])
        argvs.append([*argvs[0], "--data.tokenizer", str(at / "other"), "--data.new-tokenizer"])
        argvs = [[*argv, "--out", str(at / f"{init}-{n}")] for n, argv in enumerate(argvs)]
        first, second = gloo(2, runs, argvs, start["model"])
        assert (
            [code for code, _, _ in first] == [code for code, _, _ in second] == [0] * 4 + [2] * 5 + [0] * 2
        )
        for code, said, _ in first:
            if code:
                assert f"the weights of {at / init}" in said and mine in said and "Traceback" not in said
                assert "--data.new-tokenizer" in said and len(said.splitlines()) == 1
        assert [fingerprint for _, _, fingerprint in (*first[:4], first[-2])] == [mine] * 5
        assert first[-1][2] not in (mine, "")
    begin = [*flags, "--init", str(at / "weights"), "--out", str(at / "x"), "--data.path"]
    argvs = [[*begin, str(at / "right")], [*begin, str(at / "text"), "--resume", "none"]]
    found = gloo(1, runs, argvs, start["model"])[0]
    assert [code for code, _, _ in found] == [0, 2]
    assert f"text: of tokenizer bytes; the weights of {at / 'weights'} are of {mine}" in found[1][1]
    assert "name that tokenizer with --data.tokenizer" in found[1][1]


def test_a_run_that_goes_on_and_its_later_steps_keep_the_tokenizer(gloo, start: dict):
    at, flags, mine = start["at"], start["flags"], start["is_"]
    here = [*flags, "--out", str(at / "a"), "--data.path", str(at / "text")]
    begun = [*here, "--init", str(at / "hf")]
    on = [*here, "--steps", "2"]  # without --init
    step = at / "a/checkpoints/step-2"
    more = [*flags, "--out", str(at / "b"), "--init", str(step), "--data.path", str(at / "text")]
    wrong = [*flags, "--out", str(at / "c"), "--init", str(step), "--data.path", str(at / "bytes")]
    resumed = [*here, "--steps", "3", "--data.tokenizer", str(at / "other")]
    found = gloo(1, runs, [begun, on, more, wrong, resumed], start["model"])[0]
    assert [(code, tokenizer) for code, _, tokenizer in found] == [(0, mine)] * 3 + [(2, "")] * 2, found
    assert f"the weights of {step}" in found[3][1] and "--data.tokenizer=" in found[4][1]
    assert read_manifest(step).info["data"]["tokenizer"] == mine
    assert carried_by(step).files.raw == (at / "hf/tokenizer.json").read_bytes()
    (at / "hf").rename(at / "away")
    assert carried_by(step)[1:3] == (mine, None)


def test_an_export_has_the_tokenizer_of_the_run_or_none(gloo, start: dict):
    at, flags = start["at"], start["flags"]
    common = [*flags, "--init", str(at / "hf"), "--data.path", str(at / "text"), "--out"]
    new = ["--data.tokenizer", str(at / "other"), "--data.new-tokenizer"]
    found = gloo(1, runs, [[*common, str(at / "a")], [*common, str(at / "b"), *new]], start["model"])[0]
    assert [code for code, _, _ in found] == [0, 0]
    hf.export_hf(at / "a/checkpoints/step-1", at / "a-back")
    assert others_of(at / "a-back") == others_of(at / "hf")
    step = at / "b/checkpoints/step-1"
    for like in (None, at / "hf"):
        with pytest.raises(
            CheckpointError,
            match=r"trained on data of tokenizer sha256:\w+; tokenizer\.json of the original is sha256",
        ):
            hf.export_hf(step, at / "b-back", like=like)
    shutil.copytree(at / "hf", at / "copy")
    shutil.copy(at / "other/tokenizer.json", at / "copy/tokenizer.json")
    hf.export_hf(step, at / "b-back", like=at / "copy")
    assert others_of(at / "b-back") == others_of(at / "copy")


def test_a_start_whose_tokenizer_cannot_be_read_is_refused(gloo, start: dict):
    at = start["at"]
    argv = [*start["flags"], "--init", str(start["hf"]), "--data.path", str(start["at"] / "text")]
    (start["hf"] / "tokenizer.json").write_text('{"model": {"type": "of tomorrow"}}')
    (start["hf"] / "tokenizer.json").rename(start["hf"] / "kept")
    argvs = [[*argv, "--out", str(at / "none")]]
    code, said, fingerprint = gloo(1, runs, argvs, start["model"])[0][0]
    assert (code, fingerprint) == (0, "bytes"), said
    (start["hf"] / "kept").rename(start["hf"] / "tokenizer.json")
    ((code, said, _),) = gloo(1, runs, [[*argv, "--out", str(at / "new")]], start["model"])[0]
    assert (
        code == 2
        and "hf/tokenizer.json: not a Hugging Face tokenizer.json" in said
        and "--data.tokenizer" in said
    )
