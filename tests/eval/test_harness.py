"""lm_eval's tasks: every metric, sum and text is that of its model `hf`, however many ranks there are.

next: tests/eval/test_texts.py
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import forked
import pytest
from eval_models import OFFLINE, TASKS, offline, save_model, save_tasks  # noqa: F401

with patch.dict(os.environ, OFFLINE):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

from tmoe.config.check import ConfigError
from tmoe.eval import command_line, harness, task_names
from tmoe.eval.worker import Worker

KINDS = "qwen3_moe", "llama", "gpt_oss", "deepseek_v3"
# a sum of fp32 log-probs, in one case in another order: an absolute error of a sum up to several hundred
SUM = 1e-4


@pytest.fixture(autouse=True)
def _no_facts_of_the_machine(monkeypatch):
    """After an evaluation, lm_eval's own command starts `pip list`."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    return save_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {kind: save_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def ours(folder: Path, tasks: Path, out: Path, *words: str) -> dict:
    """The results of `tmoe eval`, with the samples of each task."""
    command_line.main([str(folder), "--tasks", *TASKS, "--tasks-path", str(tasks), "--out", str(out), *words])
    return read(out)


def read(out: Path) -> dict:
    found = json.loads(out.read_text())
    lines = [json.loads(line) for line in out.with_suffix(".samples.jsonl").read_text().splitlines()]
    found["samples"] = {task: [line for line in lines if line["task"] == task] for task in TASKS}
    return found


def theirs(folder: Path, tasks: Path, **settings) -> dict:
    model = HFLM(str(folder), dtype="float32", device="cpu", batch_size=4)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, **settings)


def numbers(results: dict) -> dict[tuple[str, str], float]:
    """The metrics of all tasks that are numbers, without their errors, which are drawn."""
    return {
        (task, name): value
        for task, metrics in results.items()
        for name, value in metrics.items()
        if isinstance(value, float) and "stderr" not in name
    }


def assert_equal(got: dict, want: dict) -> None:
    mine, others = numbers(got["tasks"]["results"]), numbers(want["results"])
    assert mine.keys() == others.keys() and len(others) == 10
    for (task, name), value in others.items():
        if name.startswith(("acc", "exact_match")):
            assert mine[task, name] == value, (task, name)
        else:
            scale = {"bits_per_byte,none": 1e-6, "byte_perplexity,none": 1e-6 * value}.get(name, 1e-4 * value)
            assert mine[task, name] == pytest.approx(value, abs=scale), (task, name)
    for task in TASKS:
        for a, b in zip(got["samples"][task], want["samples"][task], strict=True):
            if task == "tiny_until":
                assert a["filtered_resps"] == b["filtered_resps"]
                continue
            for (x,), (y,) in zip(a["resps"], b["resps"], strict=True):
                if task == "tiny_rolling":
                    assert x == pytest.approx(y, abs=2 * SUM, rel=1e-7)
                    continue
                assert float(x[0]) == pytest.approx(float(y[0]), abs=SUM) and x[1] == y[1]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_hf(kind, chat, folders, tasks, tmp_path):
    """Contexts longer than the model, none, examples, letters, whole texts, generation."""
    words = ["--apply-chat-template"] if chat else []
    got = ours(folders[kind], tasks, tmp_path / "out.json", *words)
    assert_equal(got, theirs(folders[kind], tasks, apply_chat_template=chat, fewshot_as_multiturn=chat))
    asked = got["samples"]["tiny_choice"][0]["arguments"][0][0]
    assert ("assistant" in asked or "INST" in asked or "Assistant" in asked) == chat


def test_examples_limit_and_system(folders, tasks, tmp_path):
    words = "--few-shot 3 --limit 5 --apply-chat-template --no-fewshot-as-multiturn".split()
    words += ["--system", "Be brief."]
    got = ours(folders["qwen3_moe"], tasks, tmp_path / "out.json", *words)
    how = dict(num_fewshot=3, limit=5, apply_chat_template=True, fewshot_as_multiturn=False)
    want = theirs(folders["qwen3_moe"], tasks, system_instruction="Be brief.", **how)
    assert_equal(got, want)
    first = got["samples"]["tiny_letter"]
    assert len(first) == 5 and "Be brief." in first[0]["arguments"][0][0]
    assert first[0]["arguments"][0][0].count("Q: ") == 4


@pytest.mark.parametrize("world, ep", [(2, 1), (2, 2), (4, 2)])
def test_ranks_give_the_scores_of_one_process(world, ep, folders, tasks, tmp_path):
    kind = "gpt_oss" if world == 2 else "deepseek_v3"
    want = ours(folders[kind], tasks, tmp_path / "one.json")
    words = ["-m", "tmoe.eval", str(folders[kind]), "--parallel.ep", str(ep), "--tasks", *TASKS]
    words += ["--tasks-path", str(tasks), "--out", str(tmp_path / "many.json")]
    done = forked.torchrun(world, words)
    assert done.returncode == 0, done.stderr
    got = read(tmp_path / "many.json")
    assert got["processes"] == world
    assert_equal(got, want["tasks"] | dict(samples=want["samples"]))
    written = sorted(path.name for path in tmp_path.glob("many.answers*.jsonl"))
    assert len(written) == world  # each process has done a part


class Stopped(Exception):
    """The end of a call in the middle."""


def test_an_interrupted_call_continues(folders, tasks, tmp_path, monkeypatch):
    """Results are those of one call, and nothing that was kept is computed again."""
    want = ours(folders["llama"], tasks, tmp_path / "whole.json")
    land, texts = Worker.land, []

    def limited(self, row, *rest):
        if len(texts) > 20:
            raise Stopped
        texts.extend(row.members)
        land(self, row, *rest)

    monkeypatch.setattr(Worker, "land", limited)
    with pytest.raises(Stopped):
        ours(folders["llama"], tasks, tmp_path / "out.json")
    kept = (tmp_path / "out.answers.jsonl").read_bytes()
    (tmp_path / "out.answers.jsonl").write_bytes(kept[:-7])  # the last line is torn
    before = len(kept.splitlines()) - 2
    assert before > 10
    again = []

    def counted(self, row, *rest):
        again.extend(row.members)
        land(self, row, *rest)

    monkeypatch.setattr(Worker, "land", counted)
    got = ours(folders["llama"], tasks, tmp_path / "out.json")
    assert got["tasks"]["results"].keys() == want["tasks"]["results"].keys()
    assert numbers(got["tasks"]["results"]) == pytest.approx(numbers(want["tasks"]["results"]), rel=1e-4)
    whole = len([line for line in (tmp_path / "whole.answers.jsonl").open() if '"key"' in line])
    generated = len(got["samples"]["tiny_until"])
    assert len(again) == whole - generated - before


def test_kept_results_of_another_model_are_refused(folders, tasks, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--tasks", "tiny_letter", "--tasks-path", str(tasks), "--out", str(out)]
    command_line.main([str(folders["llama"]), *words])
    with pytest.raises(SystemExit) as end:
        ours(folders["qwen3_moe"], tasks, out)
    assert end.value.code == 2
    wrong = "out.json there holds results of another model, tokenizer; valid: a new file"
    assert last_line(capsys) == f"error: --out={out}: {wrong}"


def last_line(capsys) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_what_a_result_depends_on_is_written(folders, tasks, tmp_path):
    got = ours(folders["gpt_oss"], tasks, tmp_path / "out.json")
    model, versions = got["model"], got["versions"]
    assert (
        len(model["model"]) == 64 and model["tokenizer"].startswith("sha256:") and model["dtype"] == "float32"
    )
    assert len(model["template"]) == 32 and model["max_len"] == 96
    assert versions["lm_eval"] and versions["torch"] and versions["tokenizers"]
    assert got["settings"]["tasks"] == list(TASKS) and got["settings"]["parallel"] == {"ep": 1}


UNKNOWN = [
    ("--tasks tiny_choise", "--tasks=tiny_choise: lm_eval has no such task; did you mean tiny_choice?"),
    ("--tasks broken", "--tasks=broken: cannot be loaded: FileNotFoundError"),
    ("--tasks beams", "beams: generation_kwargs: num_beams=4: is not there; valid: temperature, top_k"),
    (
        "--tasks long",
        "long: generation_kwargs: max_gen_toks=96: must be above 0, and below the 96 ",
    ),
    ("--tasks tiny_letter --max-len 97", "--max-len=97: must be at most --model.rope.max-seq=96"),
    ("--tasks warm", "warm: generation_kwargs: temperature=-1.0: must be at least 0 and finite in float32"),
    ("--tasks ends", "ends: generation_kwargs: until=[5, "),
    ("--tasks name", "--tasks=name: cannot be loaded: UndefinedError: 'nothing' is undefined"),
    ("--tasks score", "--tasks=score: cannot be loaded: KeyError: None (accu metric is not assigned"),
    ("--tasks unsafe", "--tasks=unsafe: runs programs that the model has written; allow that with --code"),
    ("--tasks tiny_letter --few-shot 9", "--few-shot=9: the task tiny_letter has 4 examples, not 9; valid: "),
    ("--tasks tiny_letter --tasks-path NONE", "--tasks-path=NONE: no such folder"),
]


@pytest.mark.parametrize("words, said", UNKNOWN)
def test_what_cannot_be_done_is_one_line(words, said, folders, tasks, capsys):
    until = (tasks / "tiny_until.yaml").read_text()
    data = str(tasks / "rows.jsonl")
    (tasks / "broken.yaml").write_text(until.replace("tiny_until", "broken").replace(data, "none/none.jsonl"))
    beams = until.replace("max_gen", "num_beams: 4, max_gen")
    (tasks / "beams.yaml").write_text(beams.replace("tiny_until", "beams"))
    (tasks / "long.yaml").write_text(until.replace("tiny_until", "long").replace("toks: 24", "toks: 96"))
    warm = until.replace("do_sample: false", "do_sample: true, temperature: -1")
    (tasks / "warm.yaml").write_text(warm.replace("tiny_until", "warm"))
    (tasks / "ends.yaml").write_text(until.replace("tiny_until", "ends").replace('["\\n", "Q"]', "5"))
    (tasks / "name.yaml").write_text(until.replace("tiny_until", "name").replace("{{q}}", "{{nothing}}"))
    (tasks / "score.yaml").write_text(until.replace("tiny_until", "score").replace("exact_match", "accu"))
    (tasks / "unsafe.yaml").write_text(until.replace("tiny_until", "unsafe") + "unsafe_code: true\n")
    words = words if "--tasks-path" in words else f"{words} --tasks-path {tasks}"
    with pytest.raises(SystemExit) as end:
        command_line.main([str(folders["llama"]), *words.split()])
    assert end.value.code == 2
    assert last_line(capsys).startswith(f"error: {said}")


def test_a_file_that_is_no_yaml_is_named(tasks, tmp_path):
    """lm_eval leaves it out in silence."""
    (tmp_path / "torn.yaml").write_text("task: torn\nx: [")
    assert [text.split(": ")[0] for text in task_names.unread([tmp_path, tasks])] == [
        f"{tmp_path}/torn.yaml is no YAML"
    ]


def test_names_and_patterns_are_found_in_the_bytes_of_files(tmp_path):
    """lm_eval's thousands of files are parsed only for names that they hold, also in files they include."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/one.yaml").write_text("include: ../shared_yaml\ndescription: x\n")
    (tmp_path / "shared_yaml").write_text('"task": "zq_shared"\ntag: [zq_mine]\n')
    task_names.require_mentioned(["zq_shared,zq_mine", "zq_sh*", "arc_easy", "*"], [tmp_path])
    for word, hint in (("zq_sharet", "did you mean zq_shared?"), ("qzx*", "--tasks-path names a folder")):
        with pytest.raises(ConfigError) as refused:
            task_names.require_mentioned([word], [tmp_path])
        assert f"{word}: lm_eval has no such task; {hint}" in str(refused.value)


def test_a_context_of_blanks_is_a_prefix():
    """lm_eval gives the blanks to the answer, so without a bos the context has no token."""
    asked = []
    evaluator = SimpleNamespace(tokens=SimpleNamespace(prefix=9), longest=4)
    evaluator.score = lambda pairs: asked.extend(pairs) or [(0.0, False)] * len(pairs)
    model = harness.TmoeLM(evaluator)
    model._loglikelihood_tokens([(("  ", "a"), [], [5, 6]), (("", "b"), [], [1, 2, 3, 4])])
    assert asked == [([9, 5], [5, 6]), ([9, 1, 2, 3], [1, 2, 3, 4])]


def test_drawn_answers_depend_on_the_seed(folders, tasks, tmp_path):
    until = (
        (tasks / "tiny_until.yaml").read_text().replace("do_sample: false", "do_sample: true, temperature: 1")
    )
    (tasks / "drawn.yaml").write_text(until.replace("tiny_until", "drawn") + "repeats: 2\n")
    words = [str(folders["llama"]), "--tasks", "drawn", "--tasks-path", str(tasks), "--limit", "2"]

    def answers(seed: int, name: str) -> list:
        command_line.main([*words, "--seed", str(seed), "--out", str(tmp_path / f"{name}.json")])
        return [json.loads(line)["resps"][0] for line in (tmp_path / f"{name}.samples.jsonl").open()]

    first, other, again = answers(1, "a"), answers(2, "a"), answers(1, "b")
    assert first == again and first != other
    assert all(len(set(two)) == 2 for two in first)


def test_patterns_and_commas_name_tasks(tasks):
    names, _ = harness.wanted(["tiny_letter,tiny_until", "tiny_r*"], [tasks])
    assert names == ["tiny_letter", "tiny_until", "tiny_rolling"]
