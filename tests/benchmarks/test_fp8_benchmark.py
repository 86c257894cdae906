"""benchmarks/fp8_experts.py on a CPU: its checks, its layers, and the table that decides where fp8 is used.

next: tests/moe/test_fp8_choice.py
"""

import argparse
import json

import pytest
import torch

from benchmarks import fp8_experts
from benchmarks.moe_layer import ALL
from tmoe.ops.experts import fp8_table
from tmoe.ops.experts.fp8_table import Measured


@pytest.fixture(autouse=True)
def _forced(monkeypatch):
    """The benchmark chooses kernels for the rest of its process."""
    monkeypatch.setattr(fp8_table, "forced", {})


def arguments(**more):
    own = dict(device="cpu", tiny=True, shapes=["qwen3"], rounds=1, json=None, table=None, configs=None)
    return argparse.Namespace(**own | more)


def test_casts_and_accuracy_are_checked(monkeypatch):
    monkeypatch.setitem(ALL, "gpt-oss-20b", fp8_experts.TINY)
    (cast,) = fp8_experts.casts(arguments())
    assert cast.good
    found = list(fp8_experts.accuracy(arguments(shapes=["qwen3", "qwen3-4096"])))
    # one of two shapes of equal widths; four and six products in fp8
    assert len(found) == 40 and all(figure.good for figure in found)
    errors = [float(figure.value) for figure in found[::2]]
    assert min(errors) > 1e-2


def test_times_go_into_the_table(tmp_path):
    """An older entry of the same shape is replaced, another shape's stays."""
    table = tmp_path / "table.json"
    other = Measured(64, 128, 7, 1.0, 2.0, 3.0)._asdict()
    old = Measured(64, 128, 48, 0.0, 0.0, 0.0)._asdict()
    table.write_text(json.dumps({"cpu": [other, old], "cuda:90": []}))
    figures = list(fp8_experts.layer(arguments(table=table)))
    assert figures[0].what.startswith("qwen3: bf16 (") and float(figures[0].value[:-1]) > 0
    written = json.loads(table.read_text())
    assert written["cuda:90"] == [] and written["cpu"][0] == other
    (new,) = (Measured(**entry) for entry in written["cpu"][1:])
    assert new[:3] == (64, 128, 48) and min(new[3:]) > 0


def test_a_rival_has_the_same_layer():
    """SwiGLU experts by grouped products, in fp32, whose products are those of the op."""
    layer = fp8_experts.on(fp8_experts.layer_of("qwen3", fp8_experts.TINY, "cpu"), "cpu", torch.float32)

    def product(a, b_EDF, ends):
        parts = a.tensor_split(ends[:-1].tolist())
        return torch.cat([part @ b for part, b in zip(parts, b_EDF, strict=True)])

    rival = fp8_experts.by_groups(product, layer, list(layer[:4]))
    ours = fp8_experts.moe_mlp(*layer[:4], layer.ids, None, "swiglu")
    assert (rival - ours).norm() < 1e-5 * ours.norm()


def test_parts_have_limits_and_a_gpu_is_asked_for(monkeypatch, capsys):
    assert set(fp8_experts.LIMITS) == set(fp8_experts.PARTS)
    monkeypatch.setattr("sys.argv", ["fp8_experts"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            fp8_experts.main()
        assert "no GPU here" in capsys.readouterr().err
