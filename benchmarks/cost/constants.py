"""The constants of the cost model: the times that one GPU and its links need for the parts of a step.

h200.json, for one GPU, records for each constant whether it was measured, fitted (and on which points) or
assumed. Constants that only one axis uses are listed by axis (`OF_AXIS`, `standing`).

`of_gpu` computes the constants of another GPU from them: times are longer in proportion to the data sheets'
rates. It was not measured how close kernels come to a data sheet's numbers on those GPUs.

next: step_time.py
"""

import copy
import math
from types import SimpleNamespace
from typing import Any

from tmoe.config.gpus import GPUS, room
from tmoe.model import stage_times

GIB = 2**30
FLOPS = ("peak", "product_rate", "attention_rate", "isolated_attention_rate")  # scaled by the FLOP/s
LINKS = ("collective", "exchange")
# The constants that determine what each axis adds to a step, besides `collective`, which all axes use. A step
# along a single axis determines its constants: measure the step (benchmarks/axes.py), fit the constants
# (benchmarks.model --fit), write them into h200.json.
OF_AXIS = {
    "dp": ("fsdp_overlap", "slowed", "copy_factor"),
    "ep": ("exchange",),
    "tp": ("tp_factor",),
    "cp": ("cp_factor",),
    "pp": ("message", "held", "others_held"),
    "etp": ("etp_factor",),
    "replicate": ("fsdp_overlap",),
}
CONSTANTS = stage_times.CONSTANTS


def check_constant(name: str, value: Any, like: Any) -> None:
    """Raises ValueError unless a constant has the type of the shipped one and is in its range.

    A number must be at least 0, or above 0 if it is a divisor; a curve must have at least two points.
    """
    kinds = [(int, float) if isinstance(v, (int, float)) else type(v) for v in (value, like)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{name}: {value} must be of the kind of {like}")
    if isinstance(value, (int, float)):
        divides = name.endswith("_rate") or name in ("peak", "memory", "node")
        least = 1 if name in ("node", "skew") else 0
        if not (math.isfinite(value) and value >= least and (value > 0 or not divides)):
            range_ = "above 0" if divides and not least else f"{least} or more"
            raise ValueError(f"{name}: {value} must be finite and {range_}")
    if isinstance(value, list) and not (len(value) > 1 and all(len(p) == 2 and min(p) >= 0 for p in value)):
        raise ValueError(f"{name}: {value} must be two points or more, of two numbers not below 0 each")


def of_gpu(constants: dict[str, dict], name: str) -> dict[str, dict]:
    """The constants of the GPU `name`, computed from the H200's by data sheets."""
    if name == "h200":
        return constants
    gpu, measured = GPUS[name], GPUS["h200"]
    made = copy.deepcopy(constants)
    ratios = {constant: gpu.flops / measured.flops for constant in FLOPS}
    ratios |= {"memory_rate": gpu.bandwidth / measured.bandwidth}
    for constant, ratio in ratios.items():
        value = made[constant]["value"]
        curve = [[x, y * ratio] for x, y in value] if isinstance(value, list) else value * ratio
        made[constant] |= {
            "value": curve,
            "how": "scaled",
            "source": f"the H200's x {ratio:.3g}, by data sheets",
        }
    slower = measured.links / gpu.links
    for constant in LINKS:
        made[constant] |= {"how": "scaled", "source": f"the H200's times x {slower:.3g}, by data sheets"}
    made["collective"]["value"] = [[x, y * slower] for x, y in made["collective"]["value"]]
    for how in made["exchange"]["value"].values():
        if isinstance(how, dict):
            how["curve"] = [[x, y * slower] for x, y in how["curve"]]
    made["memory"] |= {"value": gpu.memory, "source": "the data sheet's, as the driver shows it"}
    return made


def title(name: str, m: SimpleNamespace, own: bool) -> str:
    """Which GPU a page is for, and the origin of its numbers.

    own: whether the user gave a file of constants.
    """
    room_ = f"{m.room / GIB:.1f} GiB for tensors"
    if own:
        return f"{room_} a GPU, by the constants given"
    if name == "h200":
        known = "measured on one to four GPUs; ~: network between nodes assumed"
        return f"{GPUS[name].title} ({room_} each): {known}"
    return f"{GPUS[name].title} ({room_} each): the H200's, scaled by data sheets; ~: network assumed as well"


def standing(constants: dict[str, dict]) -> dict[str, str]:
    """The origin of each axis's constants in words: "measured", "fitted", "scaled", or which are assumed."""

    def words(names: tuple[str, ...]) -> str:
        assumed = [name for name in names if constants[name]["how"] == "assumed"]
        return f"assumed: {', '.join(assumed)}" if assumed else constants[names[0]]["how"]

    return {axis: words(names) for axis, names in OF_AXIS.items()}


def values(constants: dict[str, dict]) -> SimpleNamespace:
    """The constants by name, `room`, bytes of the GPU's memory that tensors may use, and `gate`."""
    m = stage_times.namespace(constants)
    m.room = room(m.memory)
    return m
