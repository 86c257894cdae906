"""Shapes that benchmarks/moe_layer.py and shapes.py accept, bytes of the yardstick, and the file written."""

import argparse
import json
import sys

import pytest
import torch

from benchmarks import adapter_kernels, moe_layer, shapes
from tmoe.ops.launch.kernel_launch import compile_only


def test_five_numbers_are_a_shape_and_others_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(moe_layer, "ALL", dict(moe_layer.ALL))
    assert moe_layer.shape("olmoe-512") == "olmoe-512"
    name = moe_layer.shape("64,96,32,6,2")
    assert moe_layer.ALL[name] == (64, 96, 32, 6, 2)
    for wrong in ("olmo", "64,96,32,6", "64,96,32,6,7", "64,0,32,6,2", "64,96,32,6,two"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{wrong}' is neither of qwen3"):
            moe_layer.shape(wrong)
        assert wrong not in moe_layer.ALL


def test_launches_of_adapters_are_named_once_and_all_sizes_are_tried():
    """On meta tensors: what benchmarks/adapter_kernels.py times is launched, with each of the sizes."""
    found = {}
    with compile_only("cuda:90", lambda name, key, compile: found.setdefault(name, set()).add(key)):
        adapter_kernels.launched("qwen3-4096")
        layer = adapter_kernels.Layer(moe_layer.ALL["qwen3-4096"], "meta")
        for choices in layer.choices():
            said = [adapter_kernels.words(size) for size in choices.sizes]
            assert choices.kernel in layer.calls and len(set(said)) == len(said), choices.kernel
    tried = "narrow_kernel", "narrow_and_factor_kernel", "factor_kernel", "specialised", "add_low_rank_kernel"
    assert set(tried) <= set(found)
    assert all(len(found[name]) >= 15 for name in tried[:4])


def test_weights_once_moves_the_bytes_of_the_experts_that_have_tokens():
    logits = torch.full((5, 8), -1.0)
    logits[:, 2] = logits[:3, 4] = logits[3:, 7] = 1.0  # three experts of eight
    gate_up = torch.empty(8, 24, 10, dtype=torch.bfloat16)
    down = torch.empty(8, 10, 12, dtype=torch.bfloat16)
    copied = moe_layer.weights_once(logits, 2, gate_up, down)()
    assert 2 * copied.nbytes == 3 * (24 * 10 + 10 * 12) * 2


def test_models_are_written_as_they_were_measured(monkeypatch, tmp_path, capsys):
    """With the GPU's part replaced: what is compiled first, compared, printed and kept."""
    compiled = []
    monkeypatch.setattr(shapes, "require_gpu", lambda parser: None)
    monkeypatch.setattr(shapes, "make", lambda shape, device: moe_layer.make(shape, "cpu", torch.float32))
    monkeypatch.setattr(shapes, "precompile", lambda arch, traces, processes: compiled.extend(traces))
    monkeypatch.setattr(
        shapes, "time_all", lambda fns, rounds, begin: [float(fn() is not None) for fn in fns]
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    grouped = shapes.rivals.CONTESTANTS["tmoe"]  # torch._grouped_mm's gradients want a GPU
    monkeypatch.setitem(shapes.rivals.CONTESTANTS, "grouped_mm", grouped)
    monkeypatch.setitem(shapes.MODELS, "tiny", (16, 8, 4, 2))
    monkeypatch.setitem(shapes.MODELS, "too large", (16384, 65536, 64, 2))
    out = tmp_path / "shapes.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["shapes", "tiny", "too large", "--tokens", "5", "7", "--json", str(out)]
    )
    shapes.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["model"], line["shape"]) for line in lines] == [("tiny", [T, 16, 8, 4, 2]) for T in (5, 7)]
    assert all(line["tmoe"] == line["grouped_mm"] == [1, 1] and line["apart"] == 0 for line in lines)
    out = capsys.readouterr().out
    assert len(compiled) == 4 and out.count("1.00x") == 4
    assert "too large at T=5: left out, it takes more than 110 GB" in out
    monkeypatch.setattr(sys, "argv", ["shapes", "dbrxx"])
    with pytest.raises(SystemExit):
        shapes.main()
    assert "model 'dbrxx': valid are granite-1b" in capsys.readouterr().err


def test_a_rival_that_raises_without_a_word_is_left_out_by_name(monkeypatch):
    """The next one is still timed; one whose memory gives out after its check is left out as well."""

    def enter(who, *given):
        if who == "bare":
            raise NotImplementedError
        return (lambda *inputs: None, [], None), {}

    def out_of_memory(forward):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore words")

    shape = (8, 16, 8, 4, 2)
    make = moe_layer.make
    monkeypatch.setitem(moe_layer.ALL, "small", shape)
    monkeypatch.setattr(moe_layer, "make", lambda shape, device: make(shape, "cpu", torch.float32))
    monkeypatch.setattr(moe_layer.rivals, "enter", enter)
    monkeypatch.setattr(moe_layer, "kept", out_of_memory)
    monkeypatch.setattr(moe_layer, "Bench", lambda shape, device: None)
    monkeypatch.setattr(moe_layer, "host_ms", lambda call: 0.1)
    monkeypatch.setattr(moe_layer, "time_all", lambda fns, begin: [1.0] * len(fns))
    found = moe_layer.measure("small", ["bare", "large"])
    assert found["missing"] == {
        "bare": "NotImplementedError: ",
        "large": "OutOfMemoryError: CUDA out of memory.",
    }
    assert found["results"] == {} and found["dense"] == 1.0
