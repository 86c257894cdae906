"""benchmarks/live.py on a CPU: both measurements print their figures, and reuse changes no bit.

next: test_logprobs_rivals.py
"""

import json

from benchmarks import live


def test_what_is_printed_and_kept(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    words = ["--device", "cpu", "--tiny", "--layers", "1", "--json", str(out)]
    live.main(["gaps", "olmoe-1b-7b", "--budget", "128", *words])
    live.main(["turns", "qwen3-30b-a3b", *words])
    gaps, turns = (json.loads(line) for line in out.read_text().splitlines())
    assert gaps["streams_left"] == live.STREAMS and gaps["longest_ms"] >= gaps["median_ms"] > 0
    assert gaps["ratio"] == gaps["longest_ms"] / gaps["median_before_ms"]
    assert turns["cached"] == 256 and turns["same_bits"] and turns["second_ms"] > 0
    assert "'budget': 128" in capsys.readouterr().out
