"""Export and import, killed anywhere or given a full or lying disk: the folder is whole and right, or absent.

The same command finishes it.

next: tmoe/hf/write.py
"""

import errno
import fcntl
import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from hf_tiny import files_of, saved

from benchmarks.inject import die_at, flip
from tmoe.checkpoint import dcp as shards
from tmoe.checkpoint.checkpoints import CheckpointError, read_manifest, verify
from tmoe.checkpoint.rewrite import work_folder
from tmoe.hf import command_line as hf
from tmoe.hf import export_hf, import_hf
from tmoe.hf import write as hf_write

NAME = "qwen3_moe, leading dense"


def run(*words: object) -> None:
    hf.main([str(word) for word in words])


def refused(*words: object) -> str:
    with pytest.raises(SystemExit) as end:
        run(*words)
    assert end.value.code, "an error"
    return str(end.value)


@pytest.fixture
def step(tmp_path) -> Path:
    import_hf(saved(tmp_path / "hf", NAME, torch.bfloat16, files=4), tmp_path / "step")
    return tmp_path / "step"


def whole(done: Path) -> bool:
    """A kill may come between making this file and writing it."""
    return done.exists() and done.read_text().endswith("}")


def killed_everywhere(dst: Path, stride: int, words: list) -> int:
    """Runs the command with a kill at every `stride`-th write, sync and rename, then again.

    Returns how often finished files were kept.
    """
    resumed = 0
    for count in range(1, 10_000, stride):
        killed = die_at(count, lambda: run(*words))
        if not dst.exists():
            kept = {
                p: p.stat().st_ino
                for p in work_folder(dst).rglob("*")
                if p.suffix in (".safetensors", ".distcp")
            }
            finished = {p.name for p in kept if whole(p.with_name(f"{p.name}.done")) or not verify(p.parent)}
            run(*words)
            again = {p.name: p.stat().st_ino for p in dst.iterdir()}
            same = {p.name for p, inode in kept.items() if again[p.name] == inode}
            assert finished <= same, "a finished file was written a second time"
            resumed += bool(finished)
        yield
        assert not work_folder(dst).exists()
        shutil.rmtree(dst)
        if not killed:
            break
    assert resumed > 3 and count > 8 * stride


def test_config_json_is_written_last(step, tmp_path, monkeypatch):
    """A killed export would else load: without tokenizer, and without generation_config.json."""
    write, names = hf_write._write_small, []

    def noted(path, content):
        names.append(path.name)
        write(path, content)

    monkeypatch.setattr(hf_write, "_write_small", noted)
    run("export", step, tmp_path / "back")
    small = [name for name in names if not name.endswith(".done")]
    assert small[-1] == "config.json" and len(small) > 2


def test_a_killed_export_goes_on_and_is_the_original(step, tmp_path):
    want = files_of(tmp_path / "hf")
    for _ in killed_everywhere(tmp_path / "back", 9, ["export", step, tmp_path / "back"]):
        assert files_of(tmp_path / "back") == want


@pytest.mark.slow
def test_a_killed_import_goes_on_and_is_the_original(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SMALL", 4000)  # several groups
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    hf_dir = saved(tmp_path / "hf", NAME, torch.bfloat16, files=2)
    for i, _ in enumerate(killed_everywhere(tmp_path / "step", 61, ["import", hf_dir, tmp_path / "step"])):
        assert verify(tmp_path / "step") == []
        export_hf(tmp_path / "step", tmp_path / f"back-{i}")
        assert files_of(tmp_path / f"back-{i}") == files_of(hf_dir)


def test_what_another_export_left_is_not_used(step, tmp_path):
    for count in range(20, 400, 5):
        die_at(count, lambda: run("export", step, tmp_path / "back", "--dtype", "fp32"))
        if list((tmp_path / "back.partial").glob("*.done")):
            break
    run("export", step, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "hf")


@pytest.mark.parametrize(
    "name", ["notes.txt", "config.json", "model.safetensors.index.json/", "group-0/manifest.json"]
)
def test_nobody_elses_file_is_removed(step, tmp_path, name):
    """Not even one with the name of one of the small files.

    (Where the files that would be written first are missing.)
    """
    path = tmp_path / "back.partial" / name
    (path if name[-1] == "/" else path.parent).mkdir(parents=True)
    if not path.is_dir():
        path.write_text("a life's work")
    before = sorted(tmp_path.rglob("*"))
    for more in ([], ["--dry-run"]):
        said = refused("export", step, tmp_path / "back", *more)
        assert f"back.partial: holds {name.split('/')[0]}" in said and said.endswith(
            "or name another folder"
        ), said
    if name != "group-0/manifest.json":  # an import keeps whole groups, and continues after the last one
        (tmp_path / "back.partial").rename(tmp_path / "new.partial")
        before = sorted(tmp_path.rglob("*"))
        assert f"holds {name}, which this" in refused("import", tmp_path / "hf", tmp_path / "new")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_does_not_read_back_is_not_published(step, tmp_path, monkeypatch):
    real = hf_write._read_back

    def lying_disk(plan, work):
        victim = sorted(work.glob("*.safetensors"))[1]
        flip(victim, victim.stat().st_size - 3)
        real(plan, work)

    monkeypatch.setattr(hf_write, "_read_back", lying_disk)
    message = refused("export", step, tmp_path / "back")
    assert (
        "00002-of-" in message and "does not read back" in message and "the same command continues" in message
    )
    assert not (tmp_path / "back").exists()
    monkeypatch.undo()
    run("export", step, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "hf")


def full_disk(rank: int, world: int, step: Path, dst: Path) -> str:
    # python ignores SIGXFSZ: writes fail
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    return refused("export", step, dst)


def test_a_full_disk_is_named(gloo, step, tmp_path):
    message = gloo(1, full_disk, step, tmp_path / "back")[0]
    assert f"[Errno {errno.EFBIG}]" in message and "back.partial/model-0000" in message
    assert not (tmp_path / "back").exists()
    run("export", step, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "hf")


def test_too_little_space_a_dry_run_and_two_at_once(step, tmp_path, monkeypatch, capsys):
    before = set(tmp_path.rglob("*"))
    words = ["export", step, tmp_path / "a/back"]
    run(*words, "--dry-run")
    assert "nothing written" in capsys.readouterr().out
    with monkeypatch.context() as little:
        little.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 1234))
        assert "(1234) free" in refused(*words)
    assert set(tmp_path.rglob("*")) == before
    work = work_folder(tmp_path / "a/back")
    work.mkdir(parents=True)
    lock = os.open(work, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "another process is writing it" in refused(*words)
    os.close(lock)
    run(*words)
    assert "exists already" in refused(*words)


def test_a_damaged_step_is_named_and_nothing_is_published(step, tmp_path):
    chunk = read_manifest(step).tensors["model.blocks.1.moe.experts.down"].chunks[0]
    shard = step / chunk.file
    flip(shard, chunk.at + chunk.size // 2)
    assert f"{shard} at byte" in refused("export", step, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(CheckpointError, match="damaged"):
        os.truncate(shard, 5)
        export_hf(step, tmp_path / "back")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "config.json"])
def test_hostile_folders_run_nothing(tmp_path, name):
    """Weights that are pickles are not opened.

    A pickle under another name is neither a safetensors file nor JSON.
    """

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    hf_dir = saved(tmp_path / "hf", NAME)
    if name.endswith(".bin"):
        (hf_dir / "model.safetensors").unlink()
        (hf_dir / "pytorch_model.bin.index.json").write_text(
            json.dumps(dict(weight_map={"model.norm.weight": name}))
        )
    (hf_dir / name).write_bytes(pickle.dumps(Hostile()))
    message = refused("import", hf_dir, tmp_path / "step")
    assert "model.safetensors" in message or "config.json" in message
    assert not (tmp_path / "ran").exists() and not (tmp_path / "step").exists()
