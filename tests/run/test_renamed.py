"""Old names of settings, as flags, in files, in records of runs and in Python, give the settings of today."""

import json
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from tmoe.checkpoint.plans import _model_settings
from tmoe.cli.parse import parse
from tmoe.config.compare import build_config, flattened, nested
from tmoe.config.model import MoEConfig
from tmoe.config.renamed import RENAMED, with_new_flags, with_new_names
from tmoe.config.run import Config, GrpoConfig, ParallelConfig

SECTIONS = {"grpo": GrpoConfig, "model.moe": MoEConfig, "parallel": ParallelConfig}


def test_every_new_name_is_a_setting_and_no_old_one_is():
    for old, new in RENAMED.items():
        section, _, name = new.rpartition(".")
        names = {one.name for one in fields(SECTIONS[section])}
        assert name in names and old.rpartition(".")[2] not in names


@pytest.mark.parametrize(
    "word, new",
    [
        ("--grpo.tries", "--grpo.resample"),
        ("--parallel.whole-gib=3", "--parallel.gathered-gib=3"),
        ("--parallel.whole_gib=3", "--parallel.gathered-gib=3"),
        ("--grpo.no-bits", "--grpo.no-bitwise"),
        ("--no-grpo.bits", "--grpo.no-bitwise"),
        ("--grpo.bits=false", "--grpo.bitwise=false"),
        ("--model.moe.columns", "--model.moe.max-top-k"),
    ],
)
def test_an_old_flag_is_the_new_one_with_a_note(word, new):
    words, notes = with_new_flags(["tiny", word, "5"])
    assert words == ["tiny", new, "5"]
    (note,) = notes
    assert new.partition("=")[0].replace("no-", "") in note and "until version 0.2" in note


def test_other_words_stay():
    words = "tiny --parallel.ep 2 --data.path grpo.tries parallel.wire".split()
    assert with_new_flags(words) == (words, [])


def test_a_command_line_of_before_gives_the_settings_of_today(capsys):
    old = "tiny --parallel.cp-by heads --parallel.whole-gib 2.5 --parallel.wire same".split()
    cfg = parse(old, "")
    assert (cfg.parallel.cp_exchange, cfg.parallel.gathered_gib) == ("heads", 2.5)
    assert capsys.readouterr().err.count("until version 0.2") == 3


def test_a_file_of_before_is_read_with_a_note_and_a_record_without(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text("[parallel]\nwhole-gib = 4.0\n")
    assert parse(["tiny", "--config", str(file)], "").parallel.gathered_gib == 4.0
    assert capsys.readouterr().err.count("parallel.whole-gib is called parallel.gathered_gib") == 1

    record = tmp_path / "config.json"
    record.write_text(json.dumps(dict(config=dict(parallel=dict(whole_gib=4.0)))))
    assert parse(["tiny", "--config", str(record)], "").parallel.gathered_gib == 4.0
    assert "whole" not in capsys.readouterr().err


def test_where_a_file_has_both_names_the_new_one_counts():
    both = dict(parallel=dict(wire="fp8", dispatch_dtype="same"), grpo=dict(tries=2))
    settings, old = with_new_names(both)
    assert settings == dict(parallel=dict(dispatch_dtype="same"), grpo=dict(resample=2))
    assert old == ["parallel.wire", "grpo.tries"]


def test_a_model_of_before_is_the_same_model():
    model = replace(Config().model, moe=MoEConfig(selection="tiles", max_top_k=3))
    settings = nested(flattened(model))
    settings["moe"]["columns"] = settings["moe"].pop("max_top_k")
    assert build_config(settings) == model


def test_python_names_of_before_are_read_with_a_warning():
    with pytest.warns(DeprecationWarning, match="parallel.wire is called parallel.dispatch_dtype"):
        parallel = ParallelConfig(wire="same", ep=2)
    assert parallel == ParallelConfig(dispatch_dtype="same", ep=2)
    with pytest.warns(DeprecationWarning, match=r"grpo.slots is called grpo.rollout_slots"):
        assert GrpoConfig(rewards=("exact",), rollout_slots=9).slots == 9
    with pytest.warns(DeprecationWarning):
        assert replace(parallel, cp_by="heads").cp_exchange == "heads"


def test_steps_of_before_and_of_today_are_of_one_model_for_an_average():
    today = dict(moe=dict(max_top_k=3, experts=8), dim=4)
    before = dict(moe=dict(columns=3, experts=8), dim=4)
    new, old = (_model_settings(SimpleNamespace(info=dict(config=dict(model=m)))) for m in (today, before))
    assert new == old == {"moe.max_top_k": 3, "moe.experts": 8, "dim": 4}
