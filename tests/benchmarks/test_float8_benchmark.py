"""benchmarks/float8.py without a GPU: its model, its rule, and the commands that it times.

next: benchmarks/float8.py
"""

from benchmarks import float8
from tmoe.cli.parse import parse
from tmoe.model.float8 import layers_in


def test_every_dense_layer_of_the_models_is_converted():
    """A product that stayed in bf16 would make the comparison of losses weaker."""
    for words in (float8.LOSS, *float8.MODELS.values()):
        found = layers_in(parse(words.split(), "").model)
        assert found.converted and not found.left


def test_the_rule_is_twice_the_largest_difference_between_seeds():
    """Seeds at 2.00, 2.03 and 1.98 are 0.05 apart: 0.10 is allowed, both ways."""
    seeds = {"bf16, seed 0": 2.0, "bf16, seed 1": 2.03, "bf16, seed 2": 1.98}
    for loss, want in ((2.099, True), (1.901, True), (2.101, False), (1.899, False)):
        lines, held = float8.compared(seeds | {"float8": 2.0, "fp8 of experts too": loss})
        assert held is want and lines[-1].endswith("held" if want else "broken")
        assert lines[-2].endswith("held")
        assert float8.compared(seeds | {"float8": loss, "fp8 of experts too": 2.0})[1] is want
