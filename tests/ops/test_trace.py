"""What benchmarks/trace.py reads out of a trace, against figures counted by hand."""

import gzip
import json

import pytest

from benchmarks import trace
from tmoe.run import profile as runtime

EVENTS = [  # (name, stream, begins, microseconds)
    ("nvjet_sm90", 7, 0, 100),
    ("push_kernel", 7, 100, 50),  # alone for 20, then beside the collective
    ("nccl_AllGather", 9, 120, 60),  # alone for 30
    ("flash_fwd", 7, 200, 100),  # behind a gap of 20
    ("fused_norm", 7, 310, 40),  # behind one of 10
    ("nvjet_sm90", 7, 350, 30),  # inside the loss
    ("flash_fwd", 7, 385, 15),  # behind one of 5
]


@pytest.mark.parametrize("packed", [True, False])
def test_a_step_is_divided_as_by_hand(tmp_path, packed):
    kernels = [dict(cat="kernel", name=n, tid=t, ts=1000 + ts, dur=dur) for n, t, ts, dur in reversed(EVENTS)]
    loss = dict(cat="gpu_user_annotation", name="loss", tid=7, ts=1350, dur=30)
    host = dict(cat="cpu_op", name="nvjet_sm90", tid=1, ts=0, dur=9999)
    path = tmp_path / ("trace.json.gz" if packed else "trace.json")
    with (gzip.open if packed else open)(path, "wt") as file:
        json.dump({"traceEvents": [host, loss, *kernels]}, file)
    shares, names, waits = trace.read(path)
    assert shares == pytest.approx(
        {
            "ms": 0.4,
            "GPU idle": 0.035,
            "exchange not hidden": 0.02,
            "collectives not hidden": 0.03,
            "outside": 0.105,  # 35 idle, 30 of the collective, 40 of the norm; the loss holds a product
            "dense products": 0.1,
            "exchange": 0.05,
            "collectives": 0.06,
            "attention": 0.115,
            "glue": 0.04,
            "loss": 0.03,
        }
    )
    assert names[0] == ("nvjet_sm90", 130, 2)
    assert waits == pytest.approx({"flash_fwd": 0.025, "fused_norm": 0.01})
    assert "| idle before `flash_fwd` | 0.03 | 6.2% |" in trace.summary(shares, waits)


@pytest.mark.parametrize("gradients", [False, True])
def test_gradients_on_their_way_are_no_exchange_of_tokens(tmp_path, gradients):
    """The same kernel carries both; a range around anything in a stream names that stream's work."""
    events = [
        ("nvjet_sm90", 7, 0, 100),
        ("ncclDevKernel_SendRecv", 22, 80, 50),
        ("sum_parts_kernel", 22, 130, 10),
    ]
    kernels = [dict(cat="kernel", name=n, tid=t, ts=ts, dur=dur) for n, t, ts, dur in events]
    named = dict(
        cat="gpu_user_annotation", name="experts' gradients" if gradients else "other", tid=22, ts=130, dur=10
    )
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [named, *kernels]}))
    shares, _, _ = trace.read(path)
    if gradients:
        assert shares["collectives"] == pytest.approx(0.06)
        assert shares["collectives not hidden"] == shares["outside"] == pytest.approx(0.04)
        assert "exchange" not in shares
    else:
        assert shares["exchange"] == pytest.approx(0.05)
        assert shares["exchange not hidden"] == pytest.approx(0.03)
        assert shares["outside"] == pytest.approx(0.01)


def test_of_several_steps_the_last_is_read_from_the_end_of_the_one_before(tmp_path):
    kernels = [
        dict(cat="kernel", name=n, tid=t, ts=ts, dur=dur)
        for n, t, ts, dur in [
            ("nvjet_sm90", 7, 0, 90),  # step 4 on the main stream, until 90
            ("nccl_AllGather", 9, 80, 30),  # 10 of it in step 4, 20 in step 5
            ("flash_fwd", 7, 120, 40),  # behind a gap of 10
            ("Memcpy", 11, 150, 5),
            ("nvjet_sm90", 7, 165, 35),  # behind one of 5; step 5 ends with it
            ("nccl_ReduceScatter", 9, 190, 60),  # 10 of it in step 5
            ("nvjet_sm90", 7, 300, 10),  # of no step
        ]
    ]
    steps = [
        ("ProfilerStep#4", 7, 0, 90),
        ("ProfilerStep#4", 9, 80, 30),
        ("ProfilerStep#5", 7, 120, 80),
        ("ProfilerStep#5", 9, 190, 60),
    ]
    marks = [
        dict(cat="gpu_user_annotation", name=n, tid=t, ts=ts, dur=dur) for n, t, ts, dur in reversed(steps)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*marks, *kernels]}))
    shares, names, waits = trace.read(path)
    assert shares == pytest.approx(
        {
            "ms": 0.11,
            "GPU idle": 0.015,
            "exchange not hidden": 0,
            "collectives not hidden": 0.02,
            "outside": 0.035,
            "attention": 0.04,
            "dense products": 0.035,
            "collectives": 0.03,
            "glue": 0.005,
        }
    )
    assert names[0] == ("flash_fwd", 40, 1)
    assert waits == pytest.approx({"flash_fwd": 0.01, "nvjet_sm90": 0.005})


def test_the_tracer_starts_a_step_before_those_that_are_traced(tmp_path):
    def of(steps, start):
        return [runtime.profiler(steps, str(tmp_path), 0, start).schedule(i).name for i in range(7)]

    assert of((3, 4, 6), 0) == [
        "NONE",
        "WARMUP",
        "RECORD",
        "RECORD_AND_SAVE",
        "WARMUP",
        "RECORD_AND_SAVE",
        "NONE",
    ]
    assert of((13,), 10) == ["NONE", "WARMUP", "RECORD_AND_SAVE", *["NONE"] * 4]
    assert of((11,), 10) == ["RECORD_AND_SAVE", *["NONE"] * 6]
