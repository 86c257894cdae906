"""A file that would run code when unpickled, in each place that training loads from: it runs nothing.

One message names it. The offline tools' places are in test_tools.py, Hugging Face's in test_hf_write.py.
"""

from __future__ import annotations

import ast
import io
import os
import pickle
from pathlib import Path

import forked
import pytest
import torch
from runs import SMALL, begin, run
from steps import ROOT, Hostile, forge
from steps import step as step  # a fixture

from tmoe.checkpoint.checkpoints import read_manifest
from tmoe.data.convert import convert

FLAGS = [*SMALL, "--train.dtype", "fp32", "--steps", "1"]


def payload(kind: str, sentinel: Path) -> bytes:
    if kind == "pickle":
        return pickle.dumps(Hostile(sentinel))
    saved = io.BytesIO()
    torch.save({"w": Hostile(sentinel)}, saved)
    return saved.getvalue()


@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
@pytest.mark.parametrize("flag", ["--init", "--resume"])
def test_steps(gloo, tmp_path, flag, kind):
    gloo(1, run, [*FLAGS, "--out", str(tmp_path / "a")])
    step, sentinel = tmp_path / "a/checkpoints/step-1", tmp_path / "ran"
    argv = [*FLAGS, "--out", str(tmp_path / "b"), "--parallel.ep", "2", flag, str(step)]
    forge(step, ".metadata", payload(kind, sentinel))
    assert [code for code, _ in gloo(2, begin, argv)] == [0, 0]  # never opened
    name = "model.blocks.0.attention.o.weight"
    forge(step, read_manifest(step).tensors[name].chunks[0].file, payload(kind, sentinel), name)
    (code, said), (other, _) = gloo(2, begin, argv)
    assert code == other == 2 and "at byte" in said and "unreadable" in said and "Traceback" not in said
    (step / "manifest.json").write_bytes(payload(kind, sentinel))
    (code, said), (other, _) = gloo(2, begin, argv)
    assert code == other == 2 and "manifest.json: damaged" in said
    assert not sentinel.exists()
    pickle.loads(pickle.dumps(Hostile(sentinel)))
    assert sentinel.exists()  # the file was hostile


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json", "empty"])
def test_a_file_without_end_is_named_and_not_waited_for(step, tmp_path, name, kind):
    """A pipe waits for a writer, and /dev/zero never ends.

    Both are 0 bytes long, and the manifest may say so as well.
    """
    if name == "empty":
        forge(step, name, b"")
    (step / name).unlink()
    os.mkfifo(step / name) if kind == "pipe" else (step / name).symlink_to(kind)
    calls = [["verify", str(step)], ["reshard", str(step), str(tmp_path / "dst"), "--world", "2"]]
    calls += [["inspect", str(step), "--tensor", "model.w"]] if name != "empty" else []
    source = """if True:
        import sys
        from tmoe.checkpoint import tools as offline
        from tmoe.checkpoint.checkpoints import Checkpoints, Path
        for words in eval(sys.argv[2]):
            try:
                offline.main(words)
            except SystemExit as error:
                print("offline:", error)
        Checkpoints(Path(sys.argv[1]), keep=0, mode="sync", info={}).find("auto")"""
    # a process: what hangs in a thread ends with it
    done = forked.run(["-c", source, step.parent, repr(calls)])
    says = f"{name}: no regular file"
    assert done.stdout.count(says) >= (2 if name != "empty" else 1) and says in done.stderr, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize("place", ["shard", "shard's body", "tokenizer", "text", "jsonl"])
def test_data(gloo, tmp_path, place):
    hostile = payload("pickle", tmp_path / "ran")
    text = tmp_path / "a.txt"
    text.write_text("some words " * 500)
    convert((str(text),), out=tmp_path / "shards")
    path = tmp_path / "shards"
    more = []
    shard = next(path.glob("*.bin"))
    if place == "shard":
        shard.write_bytes(hostile)
    elif place == "shard's body":
        raw = shard.read_bytes()
        shard.write_bytes(raw[:-200] + (hostile * 10)[:200])
    elif place == "tokenizer":
        (tmp_path / "tokenizer.json").write_bytes(hostile)
        path = text
        more = ["--data.tokenizer", str(tmp_path / "tokenizer.json")]
    else:
        path = tmp_path / ("b.txt" if place == "text" else "b.jsonl")
        path.write_bytes(hostile * 200)
    argv = [
        *FLAGS,
        *more,
        "--out",
        str(tmp_path / "run"),
        "--data.path",
        str(path),
        "--data.val-fraction",
        "0.5",
    ]
    code, said = gloo(1, begin, argv)[0]
    assert "Traceback" not in said and not (tmp_path / "ran").exists()
    if place != "text":
        assert code == 2 and said.startswith("error: "), said


def test_no_module_can_unpickle_a_file():
    """torch.load only with weights_only=True.

    pickle is written for stock DCP, and for the workers of rewards, which read it from their trainer's pipe
    and run the file of rewards that the command names. Tests of a row and
    the program that they judge run in sandboxes. No other file is unpickled or run; numpy maps numbers.
    """
    allowed = {("pickle.dump", "dcp.py"), ("pickle.dumps", "pool.py")}
    allowed |= {("pickle.loads", "worker.py"), ("exec", "worker.py")}
    allowed |= {("exec", "judge.py"), ("exec", "program.py")}  # in the sandbox
    for path in [ROOT / "train.py", *sorted((ROOT / "tmoe").rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                runs = name in ("np.load", "numpy.load", "torch.hub.load", "marshal.loads", "eval", "exec")
                runs = runs or name.startswith("pickle.")
                assert not runs or (name, path.name) in allowed, (path, name)
                if name == "torch.load":
                    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                    assert keywords.get("weights_only") == "True", path
            if isinstance(node, ast.ImportFrom):
                assert node.module != "pickle", path
