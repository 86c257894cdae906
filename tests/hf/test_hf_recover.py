"""python -m tmoe.hf recover: stock DCP folders of one node and several, stacked experts, hostile files."""

from __future__ import annotations

import inspect
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import hf_tiny
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tiers import slow_but
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.checkpoint.stock import StockFolder
from tmoe.extras.recover import recover
from tmoe.hf.command_line import main

COLLECTIVES = "use_collectives" in inspect.signature(dcp.save).parameters


def save(rank: int, world: int, tensors: dict, folder: str, prefix: str, collectives: bool = True) -> None:
    """A stock checkpoint as a trainer writes it: each tensor in shards, with an optimizer and a step."""
    mesh = init_device_mesh("cpu", (world,))
    model = {
        name: DTensor.from_local(t.chunk(world)[rank], mesh, [Shard(0)]) if t.shape[0] % world == 0 else t
        for name, t in tensors.items()
    }
    moments = {name: model[name] * 0 for name in list(model)[:2]}
    state = {prefix: model, "optimizer": {"state": moments}, "step": 3} if prefix else model
    how = {} if collectives else {"use_collectives": False}
    dcp.save(state, checkpoint_id=folder, **how)
    dist.barrier()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    return hf_tiny.saved(tmp_path_factory.mktemp("mixtral"), "mixtral", torch.bfloat16, files=2)


@pytest.fixture(scope="module")
def granite(tmp_path_factory) -> Path:
    return hf_tiny.saved(tmp_path_factory.mktemp("granite"), "granitemoe", torch.bfloat16)


def test_of_two_ranks(gloo, tmp_path, mixtral):
    """Every tensor bit for bit, in the original's files, with its config and tokenizer."""
    wanted = hf_tiny.tensors_of(mixtral)
    gloo(2, save, wanted, str(tmp_path / "dcp"), "model")
    main(
        ["recover", str(tmp_path / "dcp"), str(tmp_path / "out"), str(mixtral)],
        recover="tmoe.extras.recover.recover",
    )
    hf_tiny.assert_bits(hf_tiny.tensors_of(tmp_path / "out"), wanted)
    assert hf_tiny.files_of(tmp_path / "out").keys() == hf_tiny.files_of(mixtral).keys()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (mixtral / name).read_bytes()
    ids = torch.arange(12)[None]
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        for folder in (tmp_path / "out", mixtral)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_each_node_on_its_own_disk(gloo, tmp_path, mixtral):
    """The files of both nodes in one folder are whole; those of one are refused, by name."""
    gloo(2, save, hf_tiny.tensors_of(mixtral), str(tmp_path / "dcp"), "model")
    away = tmp_path / "node1"
    away.mkdir()
    for file in (tmp_path / "dcp").glob("__1_*.distcp"):
        shutil.move(file, away)
    with pytest.raises(CheckpointError, match=r"not whole; where each node .*(\n.*)*__1_0.distcp: missing"):
        recover(tmp_path / "dcp", tmp_path / "out", mixtral)
    for file in away.iterdir():
        shutil.move(file, tmp_path / "dcp")
    recover(tmp_path / "dcp", tmp_path / "out", mixtral)
    hf_tiny.assert_bits(hf_tiny.tensors_of(tmp_path / "out"), hf_tiny.tensors_of(mixtral))


@pytest.mark.slow
@pytest.mark.skipif(not COLLECTIVES, reason="this torch has no use_collectives")
def test_descriptions_of_each_rank(gloo, tmp_path, mixtral):
    gloo(2, save, hf_tiny.tensors_of(mixtral), str(tmp_path / "dcp"), "", False)
    assert not (tmp_path / "dcp" / ".metadata").exists()
    recover(tmp_path / "dcp", tmp_path / "out", mixtral)
    hf_tiny.assert_bits(hf_tiny.tensors_of(tmp_path / "out"), hf_tiny.tensors_of(mixtral))
    (tmp_path / "dcp" / "__1.metadata").unlink()
    with pytest.raises(CheckpointError, match="do not cover it once each; if each rank wrote"):
        recover(tmp_path / "dcp", tmp_path / "again", mixtral)


def scattered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """fms's ScatterMoE: w1, w2, w3 [E, in, out] and the router, of Mixtral and of Granite."""
    out = dict(tensors)
    routers = [name for name in tensors if name.endswith((".gate.weight", ".router.layer.weight"))]
    for router in routers:
        module = router.removesuffix(".gate.weight").removesuffix(".router.layer.weight")
        out[f"{module}.router.weight"] = out.pop(router)
        if f"{module}.input_linear.weight" in tensors:
            w1, w3 = out.pop(f"{module}.input_linear.weight").chunk(2, dim=1)
            parts = dict(w1=w1, w3=w3, w2=out.pop(f"{module}.output_linear.weight"))
        else:
            number = sum(name.startswith(f"{module}.experts.") and ".w1." in name for name in tensors)
            parts = {
                part: torch.stack([out.pop(f"{module}.experts.{e}.{part}.weight") for e in range(number)])
                for part in ("w1", "w2", "w3")
            }
        out |= {f"{module}.{part}.weight": t.transpose(1, 2).contiguous() for part, t in parts.items()}
    return out


@pytest.mark.parametrize("name", slow_but(["granite"], ["mixtral", "granite"]))
def test_of_fms(gloo, tmp_path, request, name):
    """The folder of its trainer has pytorch_model_fsdp_0; experts are stacked and transposed."""
    original = request.getfixturevalue(name)
    wanted = hf_tiny.tensors_of(original)
    gloo(2, save, scattered(wanted), str(tmp_path / "checkpoint-9" / "pytorch_model_fsdp_0"), "model")
    gloo(1, save, {"state": torch.ones(3)}, str(tmp_path / "checkpoint-9" / "optimizer_0"), "optimizer")
    recover(tmp_path / "checkpoint-9", tmp_path / "out", original)
    hf_tiny.assert_bits(hf_tiny.tensors_of(tmp_path / "out"), wanted)


@pytest.mark.parametrize("name, model", [("mixtral", "mixtral"), ("granite", "granitemoe")])
def test_of_transformers(tmp_path, request, name, model):
    """A model's own state, whose names and stacks are those of transformers 5; fp32 stays fp32."""
    original = request.getfixturevalue(name)
    state = hf_tiny.make(model).state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    recover(tmp_path / "dcp", tmp_path / "out", original)
    found = hf_tiny.tensors_of(tmp_path / "out")
    assert {t.dtype for t in found.values()} == {torch.float32}
    hf_tiny.assert_bits({n: t.bfloat16() for n, t in found.items()}, hf_tiny.tensors_of(original))


def test_a_renamed_root_and_experts_without_a_gate(tmp_path):
    """Nemotron-H in transformers' names."""
    original = hf_tiny.saved(tmp_path / "hf", "nemotron_h")
    state = hf_tiny.make("nemotron_h").state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    recover(tmp_path / "dcp", tmp_path / "out", original)
    hf_tiny.assert_bits(hf_tiny.tensors_of(tmp_path / "out"), hf_tiny.tensors_of(original))


def test_blocks_of_further_tokens_are_the_originals(tmp_path, mixtral):
    """transformers does not load them: mtp of Qwen3-Next, and the blocks after the last of DeepSeek-V3."""
    original = shutil.copytree(mixtral, tmp_path / "hf")
    more = {"mtp.fc.weight": torch.randn(3, 2).bfloat16(), "model.layers.2.eh_proj.weight": torch.randn(2, 4)}
    save_file(more, original / "further.safetensors", {"format": "pt"})
    index = json.loads((original / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(more, "further.safetensors")
    (original / "model.safetensors.index.json").write_text(json.dumps(index))
    dcp.save({"model": hf_tiny.tensors_of(mixtral)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    recover(tmp_path / "dcp", tmp_path / "out", original)
    hf_tiny.assert_bits(hf_tiny.tensors_of(tmp_path / "out"), hf_tiny.tensors_of(original))


def test_what_is_missing_or_another_is_named(tmp_path, granite):
    tensors = hf_tiny.tensors_of(granite)
    router = next(name for name in tensors if "router" in name)
    norm = next(name for name in tensors if "layernorm" in name)
    wrong = {name: t for name, t in tensors.items() if name != router}
    wrong |= {norm: torch.zeros(3), "model.layers.7.new.weight": torch.zeros(2)}
    dcp.save({"model": wrong}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError) as raised:
        recover(tmp_path / "dcp", tmp_path / "out", granite)
    said = str(raised.value)
    assert f"{router}: missing in" in said and f"{norm}: shape (3,)" in said
    assert "model.layers.7.new.weight: " in said and "has no such tensor" in said
    assert not (tmp_path / "out").exists()


def test_other_folders_are_refused_with_the_road(tmp_path, granite):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"a step folder of tmoe; python -m tmoe.hf export"):
        recover(tmp_path / "step", tmp_path / "out", granite)
    (tmp_path / "mcore").mkdir()
    (tmp_path / "mcore" / "metadata.json").write_text(json.dumps(dict(sharded_backend="torch_dist")))
    with pytest.raises(CheckpointError, match=r"of Megatron; python -m tmoe.migrate import megatron"):
        recover(tmp_path / "mcore", tmp_path / "out", granite)
    with pytest.raises(CheckpointError, match=r".metadata: missing; .* is no DCP folder"):
        recover(tmp_path / "nothing", tmp_path / "out", granite)
    adapters = {"model.layers.0.q_proj.lora_A.default.weight": torch.ones(2)}
    dcp.save(adapters, checkpoint_id=tmp_path / "lora", no_dist=True)
    with pytest.raises(CheckpointError, match=r"holds adapters \(model.layers.0.q_proj.lora_A"):
        recover(tmp_path / "lora", tmp_path / "out", granite)


# ---- hostile files ----


class Touch:
    """A pickle that makes a file when it is loaded by a trusting reader."""

    def __init__(self, call, *args) -> None:
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


@pytest.fixture
def small(tmp_path) -> Path:
    dcp.save({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def described(folder: Path):
    return pickle.loads((folder / ".metadata").read_bytes())


CALLS = {
    "system": (os.system, "touch {}"),
    "eval": (eval, "open('{}', 'w')"),
    "open": (open, "{}", "w"),
    "getattr": (getattr, "{}", "upper"),
    "load": (torch.load, "{}"),
    "loads": (pickle.loads, b"x"),
    "storage": (torch.storage._load_from_bytes, b"x"),
    "import": (__import__, "os"),
}


@pytest.mark.parametrize("where", ["whole", "planner_data", "key", "dtype"])
@pytest.mark.parametrize("name", CALLS)
def test_a_hostile_pickle_is_refused(small, tmp_path, name, where):
    """Nothing that it names is called, wherever in the description it stands."""
    made = tmp_path / "made"
    call, *args = CALLS[name]
    evil = Touch(call, *(a.format(made) if isinstance(a, str) else a for a in args))
    told = described(small)
    if where == "planner_data":
        told.planner_data = evil
    elif where == "key":
        told.state_dict_metadata["a"].properties = evil
    elif where == "dtype":
        told.state_dict_metadata["b"].size = evil
    (small / ".metadata").write_bytes(pickle.dumps(evil if where == "whole" else told))
    with pytest.raises(CheckpointError, match=r"refers to .*, which no checkpoint needs: refused"):
        StockFolder(small)
    assert not made.exists()


@pytest.mark.parametrize(
    "raw", [b"", b"\x80", b"not a pickle", b"\x80\x04N.", b"\x80\x04]." * 3, b"(" * 5000]
)
def test_what_is_no_description(small, raw):
    (small / ".metadata").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r".metadata: malformed: "):
        StockFolder(small)


def test_every_cut_of_a_description(small):
    raw = (small / ".metadata").read_bytes()
    for end in range(0, len(raw), 7):
        (small / ".metadata").write_bytes(raw[:end])
        with pytest.raises(CheckpointError, match=r"malformed: |refers to "):
            StockFolder(small)


@pytest.mark.parametrize("path", ["../dcp/__0_0.distcp", "/etc/passwd", "", "..", 7])
def test_paths_stay_in_the_folder(small, path):
    told = described(small)
    for info in told.storage_data.values():
        info.relative_path = path
    (small / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(CheckpointError, match=r"which is no name of a file in the folder"):
        StockFolder(small)


def test_sizes_are_checked(small):
    def damaged(change) -> None:
        told = described(small)
        change(told)
        (small / ".metadata").write_bytes(pickle.dumps(told))

    raw = (small / ".metadata").read_bytes()
    for change, words in (
        (
            lambda told: setattr(told.state_dict_metadata["a"], "size", torch.Size([7])),
            "do not cover it once",
        ),
        (lambda told: setattr(told.state_dict_metadata["a"], "size", (-1,)), "are no sizes"),
        (lambda told: setattr(told.state_dict_metadata["a"], "size", ("x",)), "are no sizes"),
        (
            lambda told: told.state_dict_metadata["b"].chunks.append(told.state_dict_metadata["b"].chunks[0]),
            "cover",
        ),
        (lambda told: told.storage_data.clear(), "nothing says where its part"),
    ):
        damaged(change)
        with pytest.raises(CheckpointError, match=words):
            StockFolder(small)
        (small / ".metadata").write_bytes(raw)


def test_a_damaged_shard_is_named(small):
    (shard,) = small.glob("*.distcp")
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-20])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: . at byte \d+: truncated"):
        [StockFolder(small).read(name) for name in "ab"]
    shard.write_bytes(bytes(len(raw)))
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: a at byte \d+: damaged"):
        StockFolder(small).read("a")
    # Another tensor in its place, and a pickle that would run.
    info = next(v for k, v in described(small).storage_data.items() if k.fqn == "a")
    for value, words in (
        (torch.zeros(6, dtype=torch.int32), "holds torch.int32"),
        (Touch(os.system, "true"), "dam"),
    ):
        written = io.BytesIO()
        torch.save(value, written)
        content = written.getvalue()
        told = described(small)
        for key, place in told.storage_data.items():
            if key.fqn == "a":
                place.offset, place.length = len(raw), len(content)
        changed = small.with_name("changed")
        shutil.copytree(small, changed, dirs_exist_ok=True)
        (changed / ".metadata").write_bytes(pickle.dumps(told))
        (changed / shard.name).write_bytes(raw + content)
        with pytest.raises(CheckpointError, match=words):
            StockFolder(changed).read("a")
    assert info.length > 0
