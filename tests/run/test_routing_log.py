"""routing.bin: every record comes back as it was; what a crash tore or a disk damaged costs that alone."""

import dataclasses
import errno
import os
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_logs import config, routers, start, step
from runs import SMALL
from runs import lines as lines_of
from runs import run as run_small

from tmoe.config.run import ParallelConfig
from tmoe.log import routing_log
from tmoe.log.metrics import Metrics
from tmoe.log.routing_log import RoutingRecord, pack, read_records, rewind


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """report.png takes longer to draw than these runs take."""
    monkeypatch.setattr(Metrics, "draw", lambda _: None)


def record(number: int, layers: int = 2, experts: int = 4, most: int = 300) -> RoutingRecord:
    draw = np.random.default_rng(number)
    counts = draw.integers(0, most, (layers, experts), dtype=np.int64)
    bias = draw.normal(size=(layers, experts)).astype(np.float32)
    entropy, losses = draw.random(layers, np.float32), draw.random((layers, 2), np.float32)
    return RoutingRecord(number, ("sequence", "z"), counts, counts // 3, bias, entropy, losses)


def written(path, records) -> list[int]:
    """The file of these records, and where each ends."""
    ends = [0]
    with open(path, "wb") as file:
        for one in records:
            file.write(pack(one))
            ends.append(file.tell())
    return ends


def assert_alike(found: list[RoutingRecord], wanted: list[RoutingRecord]) -> None:
    assert [one[:2] for one in found] == [one[:2] for one in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        for a, b in zip(ours[2:], theirs[2:], strict=True):
            np.testing.assert_array_equal(a, b)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 3), st.integers(1, 9), st.sampled_from([1, 200, 60000, 2**31, 2**40]))
def test_records_come_back(tmp_path_factory, layers, experts, most):
    path = tmp_path_factory.mktemp("r") / "routing.bin"
    records = [record(i, layers, experts, most) for i in range(3)]
    written(path, records)
    assert_alike(list(read_records(path)), records)


def test_not_a_number_comes_back():
    one = record(0)._replace(entropy_L=np.array([np.nan, np.inf]))
    (found,) = [routing_log._unpacked(zlib.decompress(zlib.compress(pack(one)))[routing_log.HEAD.size :])]
    np.testing.assert_array_equal(found.entropy_L, one.entropy_L)


def test_a_record_of_an_older_run_counted_from_0(tmp_path, monkeypatch):
    path = tmp_path / "routing.bin"
    with monkeypatch.context() as older:
        older.setattr(routing_log, "COUNTED", {})
        old = pack(record(4))
    path.write_bytes(old + pack(record(6)))
    assert [one.step for one in read_records(path)] == [5, 6]
    assert rewind(path, 5) > 0 and path.read_bytes() == old


def test_a_torn_end_costs_the_last_record_alone(tmp_path):
    """Wherever a kill or a full disk has cut it."""
    path = tmp_path / "routing.bin"
    records = [record(i) for i in range(3)]
    ends = written(path, records)
    whole = path.read_bytes()
    for size in range(ends[2], ends[3]):
        path.write_bytes(whole[:size])
        assert_alike(list(read_records(path)), records[:2])
    assert rewind(path, 9) == size - ends[2]  # so that what is added next is not behind a torn one
    assert path.read_bytes() == whole[: ends[2]]


@pytest.mark.parametrize("place", [0, 5, 9, 40, -1])
def test_a_damaged_byte_costs_one_record(tmp_path, place):
    path = tmp_path / "routing.bin"
    records = [record(i) for i in range(4)]
    ends = written(path, records)
    data = bytearray(path.read_bytes())
    data[(ends[2] if place < 0 else ends[1]) + place] ^= 0x55
    path.write_bytes(data)
    assert_alike(list(read_records(path)), [records[0], *records[2:]])


@pytest.mark.parametrize(
    "told", [b"[]", b'{"step":1}', b'{"step":1,"losses":[],"arrays":{"x":["O",9]}}', b""]
)
def test_what_no_run_wrote_is_passed_over(tmp_path, told):
    body = zlib.compress(told + b"\n")
    foreign = routing_log.HEAD.pack(routing_log.MARK, len(body), zlib.crc32(body)) + body
    path = tmp_path / "routing.bin"
    path.write_bytes(foreign + pack(record(1)) + b"tmoR")
    assert_alike(list(read_records(path)), [record(1)])
    assert list(read_records(tmp_path / "missing")) == [] and rewind(tmp_path / "missing", 0) == 0


def test_a_record_is_compact(tmp_path):
    """Counts of Qwen3-235B's 94 layers of 128 experts, 16 thousand tokens a step: below 1.5 bytes each."""
    draw = np.random.default_rng(0)
    counts = draw.multinomial(16384 * 8, np.ones(128) / 128, 94)
    zeros = np.zeros((94, 128))
    one = RoutingRecord(0, ("sequence", "z"), counts, zeros.astype(int), zeros, np.ones(94), np.ones((94, 2)))
    assert len(pack(one)) < 1.5 * 94 * 128


def test_a_line_has_a_record_and_resume_goes_on(tmp_path):
    cfg = config(tmp_path)
    with start(cfg) as log:
        for number in range(5):
            step(log, number)
    with open(tmp_path / "routing.bin", "ab") as file:
        file.write(pack(record(5))[:-3])  # killed while it wrote
    with start(cfg, start_step=3) as log:
        for number in range(3, 7):
            step(log, number)
    found = list(read_records(tmp_path / "routing.bin"))
    assert [one.step for one in found] == list(range(1, 8)) and not list(tmp_path.glob("*before*"))
    for one in found:
        want = routers(one.step - 1)
        assert one.losses == ("sequence", "z")
        np.testing.assert_array_equal(one.counts_LE, want.counts_LE)
        np.testing.assert_array_equal(one.dropped_LE.sum(1), want.dropped_L)
        np.testing.assert_allclose(one.entropy_L, want.entropy_L)
    assert all(
        line["router_losses"] == {"sequence": [1.0] * 3, "z": [1.0] * 3} for line in lines_of(tmp_path)
    )


def test_a_model_without_experts_has_no_records(tmp_path):
    cfg = config(tmp_path)
    dense = dataclasses.replace(cfg.model, dense_layers=3)
    with start(dataclasses.replace(cfg, model=dense, parallel=ParallelConfig())) as log:
        step(log, 0, router=None)
    assert not (tmp_path / "routing.bin").exists()


def test_a_full_disk_costs_a_record_and_no_training(tmp_path, capsys, monkeypatch):
    with start(config(tmp_path)) as log:
        step(log, 0)
        write = log.records.write

        class Full:
            fileno = log.records.fileno

            def write(self, data):
                write(data[:7])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        records, log.records = log.records, Full()
        step(log, 1)
        log.records = records
        step(log, 2)
    assert [one.step for one in read_records(tmp_path / "routing.bin")] == [1, 3]
    assert capsys.readouterr().out.count("routing.bin: could not be written, training continues") == 1


def recounted(rank: int, world: int, argv: list[str]) -> torch.Tensor:
    """A run whose router choices are counted on the way: [steps, layers, E], this rank's."""
    from tmoe.moe import layer

    counts, measure = [], layer.measure

    def counting(routing, *rest, **kw):
        counts.append(routing.ids_TK.flatten().long().bincount(minlength=4))
        return measure(routing, *rest, **kw)

    layer.measure = counting
    try:
        run_small(rank, world, argv)
    finally:
        layer.measure = measure
    return torch.stack(counts[: 8 * 4]).view(8, 2, 2, 4).sum(1)  # 8 steps of 2 micro-batches of 2 layers


def test_a_run_of_two_ranks_equals_a_recount(tmp_path, gloo):
    """Counts, losses and bias of a run with a choice bias, two losses and a line every third step."""
    words = "--parallel.ep 2 --train.accumulate 2 --log.every 3 --model.moe.choice-bias --checkpoint.mode off"
    words += " --model.moe.balance sequence:0.01 gshard:0.02 --out"
    counts = sum(gloo(2, recounted, [*SMALL, *words.split(), str(tmp_path / "a")]))
    records = list(read_records(tmp_path / "a/routing.bin"))
    assert [one.step for one in records] == [1, 3, 6, 8]
    assert all(one.losses == ("sequence", "gshard", "z") for one in records)
    for first, last, one in zip((0, 1, 3, 6), (0, 2, 5, 7), records, strict=True):
        np.testing.assert_array_equal(one.counts_LE, counts[first : last + 1].sum(0))
        assert (one.dropped_LE == 0).all() and (one.losses_LX > 0.5).all() and (one.entropy_L > 0).all()
    bias = np.zeros((2, 4), np.float32)
    for of_step, one in zip(counts, [None] * 7 + [records[-1]], strict=True):
        bias += 0.001 * (of_step.double().mean(1, keepdim=True) - of_step.double()).sign().numpy()
        if one is not None:
            np.testing.assert_allclose(one.bias_LE, bias, atol=1e-6)
