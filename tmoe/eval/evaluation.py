"""One evaluation, as the flags of the command ask for it: checked, computed on all ranks, shown and written.

next: eval/task_names.py, eval/harness.py, eval/texts.py, eval/pass_at.py
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from tmoe.base.disk import written_whole
from tmoe.base.versions import package_version, versions
from tmoe.checkpoint.base import base_of, weights_hash
from tmoe.checkpoint.manifest import is_step, read_manifest
from tmoe.config.check import Setting, require
from tmoe.data.chat.template import load_template
from tmoe.eval import pass_at, texts
from tmoe.eval.evaluator import Evaluator
from tmoe.eval.flags import Flags
from tmoe.eval.store import Store
from tmoe.eval.task_names import require_mentioned
from tmoe.eval.team import Team
from tmoe.eval.tokens import Tokens
from tmoe.eval.worker import Worker
from tmoe.generate.generation_config import DRAWN, not_followed, sampling_of
from tmoe.generate.load import Loaded, load
from tmoe.generate.sampler import Sampling

TOKENS = 256  # default of --max-tokens
TEMPERATURE = 0.8  # if neither the flag nor generation_config.json has one
PACKAGES = "lm_eval", "datasets", "tokenizers"


class Prepared:
    """Everything that rank 0 reads before the model is loaded, so that a wrong flag is refused at once."""

    def __init__(self, flags: Flags) -> None:
        flags.check()
        if flags.out is not None:
            flags.results().parent.mkdir(parents=True, exist_ok=True)
        self.files = [texts.read_texts(path) for path in flags.text]
        self.rows = pass_at.read_rows(flags.file) if flags.file else []
        self.names: list[str] = []
        self.manager: Any = None
        self.rewards: Any = None
        if flags.tasks:
            require_lm_eval()
            require_mentioned(flags.tasks, flags.tasks_path)
            from tmoe.eval import harness  # takes seconds, and the other evaluations do not need lm_eval

            self.names, self.manager = harness.wanted(flags.tasks, flags.tasks_path)
        if flags.pass_at:
            how = flags.reward_workers, flags.reward_timeout, flags.code
            self.rewards = pass_at.rewards_of(flags.rewards, *how)


def require_lm_eval() -> None:
    """ConfigError, which names the extra, without lm_eval."""
    there = importlib.util.find_spec("lm_eval") is not None
    require(there, f"{Setting('tasks')} needs the package lm_eval: pip install 'tmoe[eval]'")


def run(flags: Flags) -> None:
    """Executes a command line, on all ranks."""
    begun = time.perf_counter()
    team = Team(flags.parallel.ep)
    prepared = team.agreed(lambda: Prepared(flags) if team.rank == 0 else None)
    with ExitStack() as ends:
        if team.group is not None:
            ends.callback(dist.destroy_process_group)
        if prepared is not None and prepared.rewards is not None:
            ends.callback(prepared.rewards.close)
        how = flags.tokenizer, flags.device, flags.dtype, flags.adapter, flags.quantize
        lay_out = team.spread if flags.parallel.ep > 1 else None
        loaded = team.agreed(lambda: load(flags.path, *how, lay_out))
        say = note if team.rank == 0 else quiet
        say(f"{loaded.path} on {team.size} x {loaded.model.head_weight.device}, {since(begun)} to load")
        for line in loaded.notes:
            say(line)
        engine = team.agreed(lambda: loaded.engine(flags.slots, flags.pool_gib))
        facts = team.from_first(team.agreed(lambda: identity(loaded, flags) if team.rank == 0 else {}))
        results = flags.results() if flags.out is not None else None
        store = team.agreed(lambda: Store(results, facts, team.rank))
        ends.callback(store.close)
        worker = Worker(engine, store, say)
        if prepared is None:
            return team.serve(worker)
        ends.callback(team.dismiss)
        evaluate(Evaluation(flags, prepared, team, worker, store, loaded, facts))


@dataclass
class Evaluation:
    """One call of the command on rank 0."""

    flags: Flags
    prepared: Prepared
    team: Team
    worker: Worker
    store: Store
    loaded: Loaded
    facts: dict[str, Any]

    def evaluator(self) -> Evaluator:
        """Checks the lengths and the template, and puts together what the evaluations use."""
        flags, loaded = self.flags, self.loaded
        cfg = loaded.model.cfg
        longest = cfg.longest if flags.max_len is None else flags.max_len
        require(longest <= cfg.longest, "max_len", longest, f"must be at most {cfg.longest_limit}")
        template = load_template(loaded.tokenizer, flags.chat_template, now=True, flag="--chat-template")
        tokens = Tokens(loaded.tokenizer, loaded.begin)
        return Evaluator(self.team, self.worker, self.store, loaded, tokens, template, longest)


def evaluate(one: Evaluation) -> None:
    """Runs what the flags ask for; prints the figures, and writes them to --out."""
    flags, prepared, loaded = one.flags, one.prepared, one.loaded
    evaluator = one.evaluator()
    lengths = texts.lengths(evaluator, flags.window, flags.stride) if prepared.files else (0, 0)
    asked = pass_at.questions(evaluator, prepared.rows, flags)
    sampling = drawn_by(flags, loaded) if flags.pass_at else None
    found: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    if prepared.files:
        found["text"] = texts.evaluate(evaluator, prepared.files, *lengths)
    if prepared.names:
        found["tasks"], some = of_tasks(evaluator, flags, prepared)
        samples += some
    if sampling is not None:
        if left := not_followed(loaded.generation):
            note(f"generation_config.json: not followed here: {', '.join(left)}")
        counts = pass_at.Counts(flags.ks(), flags.answers(), flags.right)
        made = pass_at.evaluate(evaluator, asked, counts, sampling, prepared.rewards)
        samples += made.pop("samples")
        assert flags.file is not None
        file = dict(file=str(flags.file), sha256=sha256(flags.file.read_bytes()).hexdigest())
        found["pass_at"] = file | made | dict(sampling=asdict(sampling))
    show(found)
    if flags.out is not None:
        write(one, evaluator, found, samples)


def drawn_by(flags: Flags, loaded: Loaded) -> Sampling:
    """How answers of --pass-at are drawn: by the flags, else by the folder, else by the defaults."""
    given = {name: value for name in DRAWN if (value := getattr(flags, name)) is not None}
    asked = sampling_of(loaded.generation)
    most = TOKENS if flags.max_tokens is None else flags.max_tokens
    asked["min_tokens"] = min(asked.get("min_tokens", 0), most)
    settings: dict[str, Any] = dict(temperature=TEMPERATURE) | asked | given
    sampling = Sampling(**settings, max_tokens=most, seed=flags.seed)
    equal = sampling.temperature == 0 and flags.answers() > 1
    wrong = f"all {flags.answers()} answers to a prompt would be equal"
    require(not equal, "temperature", 0, wrong, "a number above 0")
    return sampling


def of_tasks(
    evaluator: Evaluator, flags: Flags, prepared: Prepared
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results of the tasks, and a line for each document."""
    from tmoe.eval import harness

    if flags.apply_chat_template:
        note(f"conversations are written by {evaluator.template.source}")
    multiturn, chat = flags.fewshot_as_multiturn, flags.apply_chat_template
    several = prepared.names, prepared.manager, flags.limit, flags.few_shot
    asked = harness.Wanted(*several, chat, multiturn, flags.system, flags.code, flags.seed)
    found = harness.evaluate(evaluator, asked)
    by_task = found.pop("samples", {})
    return found, [dict(task=task) | sample for task, some in by_task.items() for sample in some]


def identity(loaded: Loaded, flags: Flags) -> dict[str, Any]:
    """Hashes of the model and its tokenizer, and the type of its weights."""
    facts = dict(model=weights_hash(loaded.path), tokenizer=loaded.tokenizer.fingerprint)
    facts["dtype"] = str(loaded.model.head_weight.dtype).removeprefix("torch.")
    if is_step(loaded.path) and (base := base_of(read_manifest(loaded.path))) is not None:
        facts["base"] = base.sha256
    elif flags.adapter is not None:
        facts["adapter"] = weights_hash(flags.adapter)
    if flags.quantize:
        facts["quantize"] = flags.quantize
    return facts


def write(one: Evaluation, evaluator: Evaluator, found: dict[str, Any], samples: list[Any]) -> None:
    """Writes the results with everything that they depend on, and the answers in a second file."""
    path = one.flags.results()
    flags = {name: value for name, value in asdict(one.flags).items() if name != "out"}
    told = dict(
        path=str(one.loaded.path),
        **one.facts,
        template=evaluator.template.digest,
        template_source=evaluator.template.source,
        max_len=evaluator.longest,
    )
    packages = {name: package_version(name) for name in PACKAGES}
    content = dict(model=told, settings=flags, processes=one.team.size, versions=versions(note) | packages)
    with written_whole(path) as file:
        json.dump(plain(content | found), file, indent=1)
        file.write("\n")
    if samples:
        beside = path.with_name(f"{path.stem}.samples.jsonl")
        with written_whole(beside) as file:
            file.writelines(json.dumps(plain(sample)) + "\n" for sample in samples)
        note(f"{beside}: {len(samples)} answers")
    note(f"{path}: all results")


def plain(value: Any) -> Any:
    """A value that JSON can represent; numbers that are not finite become None, other objects text."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(one) for one in value]
    if isinstance(value, bool | int | str | None):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def show(found: dict[str, Any]) -> None:
    """Prints the figures, one a line."""
    for one in found.get("text", {}).get("files", []):
        print(f"{one['file']}: {line_of(one)}")
    if len(found.get("text", {}).get("files", [])) > 1:
        print(f"all texts: {line_of(found['text']['all'])}")
    for kind in ("results", "groups"):
        for task, metrics in found.get("tasks", {}).get(kind, {}).items():
            for name, value in metrics.items():
                metric, _, rule = name.partition(",")
                if not rule or metric.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                error = metrics.get(f"{metric}_stderr,{rule}")
                around = f" ± {error:.4f}" if isinstance(error, float) else ""
                print(f"{task} {metric}{'' if rule == 'none' else f' ({rule})'}: {value:.6g}{around}")
    for name, value in found.get("pass_at", {}).items():
        if isinstance(value, float) and name != "right":
            print(f"{name}: {value:.6g}")


def line_of(one: dict[str, Any]) -> str:
    counts = f"{one['tokens']:,} tokens, {one['bytes']:,} bytes"
    figures = f"{one['nats_a_token']:.6g} nats a token, {one['bits_a_byte']:.6g} bits a byte"
    return f"{figures}, perplexity {one['perplexity']:.6g} ({counts})"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def quiet(text: str) -> None:
    """In place of `note` on the ranks that print nothing."""


def since(begun: float) -> str:
    return f"{time.perf_counter() - begun:.1f} s"
