"""The benchmark of scoring: it runs on a CPU, and both contestants get the same numbers.

next: benchmarks/eval.py
"""

import json

import pytest

from benchmarks import eval as benchmark


@pytest.mark.parametrize("name", benchmark.SETS)
def test_sets_are_what_they_say(name):
    pairs = benchmark.pairs_of(name, 30, 300, 2048)
    assert pairs == benchmark.pairs_of(name, 30, 300, 2048)
    assert len(pairs) == (30 if name == "texts" else 120)
    assert all(a and b and len(a) + len(b) <= 2048 for a, b in pairs)
    if name == "letters":
        assert {len(b) for _, b in pairs} == {1}
    if name == "examples":
        assert len({tuple(a[:600]) for a, _ in pairs}) == 1
    if name != "texts":
        assert all(pairs[i][0] == pairs[i - i % 4][0] for i in range(len(pairs)))


def test_it_runs(tmp_path, capsys):
    words = (
        "olmoe-1b-7b --device cpu --tiny --questions 4 --batches 2 --rounds 1 --sets mixed letters".split()
    )
    benchmark.main([*words, "--json", str(tmp_path / "line.jsonl")])
    found = json.loads((tmp_path / "line.jsonl").read_text())["tokens_per_s"]
    assert found.keys() == {"mixed", "letters"} and found["mixed"].keys() == {"tmoe", "hf, batch 2"}
    assert "times the best of hf" in capsys.readouterr().out
