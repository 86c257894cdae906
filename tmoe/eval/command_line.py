"""The command line: a model is scored on lm_eval's tasks, on texts, and by rewards of its answers.

    python -m tmoe.eval runs/tiny --text book.txt                    nats a token, bits a byte, perplexity
    python -m tmoe.eval HF_DIR --tasks arc_easy,hellaswag --few-shot 5 --out scores.json
    python -m tmoe.eval HF_DIR --tasks mine --tasks-path tasks       tasks of your own, YAML files
    python -m tmoe.eval STEP --pass-at 1,8 --rewards number --file prompts.jsonl --out passed.json
    torchrun --nproc-per-node 8 -m tmoe eval HF_DIR --parallel.ep 8 --tasks gsm8k

Figures are written to stdout, notes to stderr; --out keeps everything, so that an
interrupted call can be repeated, and continues.
Exit code 0: done; 2: refused, with the reason on stderr; 1: failed or interrupted.

next: eval/harness.py, eval/texts.py, eval/pass_at.py
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch.distributed as dist
import tyro

from tmoe.base.disk import expand_home, written_whole
from tmoe.base.versions import package_version, versions
from tmoe.checkpoint.base import base_of, weights_hash
from tmoe.checkpoint.manifest import CheckpointError, is_step, read_manifest
from tmoe.config.check import Section, Setting, require
from tmoe.data.chat.template import load_template
from tmoe.eval import pass_at, texts
from tmoe.eval.evaluator import Evaluator
from tmoe.eval.store import Store
from tmoe.eval.team import Team
from tmoe.eval.tokens import Tokens
from tmoe.eval.worker import Worker
from tmoe.front import call, flags_of, one_message
from tmoe.generate.generation_config import DRAWN, not_followed, sampling_of
from tmoe.generate.load import Loaded, load
from tmoe.generate.sampler import Sampling

TOKENS = 256  # default of --max-tokens
TEMPERATURE = 0.8  # if neither the flag nor generation_config.json has one
PACKAGES = "lm_eval", "datasets", "tokenizers"
NAME = "results.json"
OF_PASS_AT = ["rewards", "file", "n", "right", "temperature", "top_k", "top_p", "min_p", "max_tokens", "code"]


@dataclass(frozen=True)
class Parallel:
    """How processes that torchrun starts divide the model."""

    ep: int = 1
    """processes that divide the experts of one copy of the model; more processes have more copies"""


@dataclass(frozen=True)
class Flags:
    """The flags of `python -m tmoe.eval`."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|STEP|HF_DIR")]
    """a run folder (its newest complete step is used), a step folder, a Hugging Face folder, or a name on the
    hub"""
    tasks: tuple[str, ...] = ()
    """names of lm_eval's tasks and groups, or patterns of them; needs the extra [eval]"""
    tasks_path: tuple[Path, ...] = ()
    """folders with tasks of your own, as YAML files of lm_eval"""
    limit: float | None = None
    """most documents of each task; below 1: this share of them"""
    few_shot: int | None = None
    """examples before each question; none: as many as the task says"""
    apply_chat_template: bool = False
    """write the questions of tasks as conversations, and examples as turns before them"""
    fewshot_as_multiturn: bool = True
    """with --apply-chat-template: each example is a turn; False: all are in the user's turn"""
    system: str = ""
    """a system message, or the text before each question"""
    chat_template: str | None = None
    """a jinja file that replaces the tokenizer's own chat template"""
    text: tuple[Path, ...] = ()
    """files whose perplexity is computed: texts, or .jsonl with the field text"""
    window: int | None = None
    """most tokens that are read at once from --text; none: the sequences of the run, else at most 8192"""
    stride: int | None = None
    """tokens that a window predicts after the first window; none: half a window"""
    pass_at: str = ""
    """numbers k of pass@k, as 1,8,64; needs --rewards and --file"""
    rewards: tuple[str, ...] = ()
    """rewards of an answer with their weights, as in --grpo.rewards"""
    file: Path | None = None
    """file of prompts: rows of .jsonl or .json with prompt or messages, and what the rewards read"""
    chat: bool = False
    """treat prompts that are texts as a user's messages"""
    n: Annotated[int | None, tyro.conf.arg(aliases=("-n",))] = None
    """answers to each prompt; none: the largest k"""
    right: float = 1.0
    """least reward of an answer that counts as right"""
    temperature: float | None = None
    """divisor of the logits for --pass-at;
    none: the value in generation_config.json, else 0.8"""
    top_k: int | None = None
    """keep the k most probable tokens; 0: all"""
    top_p: float | None = None
    """keep the smallest set of most probable tokens whose probabilities sum to this; 1: all"""
    min_p: float | None = None
    """keep tokens at least this many times as probable as the most probable one; 0: all"""
    max_tokens: int | None = None
    """most tokens of an answer for --pass-at; none: 256"""
    seed: int = 0
    """equal seeds give equal answers"""
    code: bool = False
    """allow programs that the model has written: of the reward `code`, and of tasks marked unsafe"""
    reward_workers: int = 2
    """processes that compute rewards"""
    reward_timeout: float = 10.0
    """seconds that one reward may take for one answer"""
    out: Path | None = None
    """file.json for all results, or a folder for results.json; other files there keep every answer, and what
    is done when a call is interrupted"""
    max_len: int | None = None
    """most tokens of an input; longer ones lose their beginning; none: the model's positions"""
    slots: int = 64
    """most answers that are made at the same time"""
    pool_gib: float | None = None
    """GiB for keys and values; none: as much as the slots need, on a GPU at most 80% of the free memory"""
    adapter: Path | None = None
    """a step folder or run folder of --lora.rank; its adapters are added to the model, their base"""
    quantize: Literal["int8", "int4", "fp8", "nf4"] | None = None
    """quantise matrices of experts and dense layers while loading; not with --parallel.ep"""
    tokenizer: str | None = None
    """'bytes', or a tokenizer.json, for a folder without a tokenizer"""
    device: str | None = None
    """cpu, cuda or cuda:N; none: a GPU if there is one"""
    dtype: Literal["bf16", "fp32"] | None = None
    """type of weights and computation; none: bf16 on a GPU, else fp32"""
    parallel: Parallel = field(default_factory=Parallel)

    def check(self) -> None:
        """ConfigError for flags that cannot be combined, and for values out of range."""
        section = Section(self)
        some = self.tasks or self.text or self.pass_at
        ways = ", ".join(Setting(name) for name in ("tasks", "text", "pass_at"))
        require(bool(some), f"nothing to evaluate: give {ways}")
        for name in ("few_shot", "limit"):
            low = (getattr(self, name) or 0) >= 0
            section.require(low, name, "must be 0 or more")
        section.require(self.limit != 0, "limit", "must be above 0")
        for name in ("window", "stride", "max_len", "n", "max_tokens"):
            section.require(
                getattr(self, name) is None or getattr(self, name) >= 1, name, "must be at least 1"
            )
        section.require(self.max_len is None or self.max_len > 1, "max_len", "must be at least 2")
        needs = dict.fromkeys(("tasks_path", "limit", "few_shot", "apply_chat_template"), "tasks")
        needs |= dict(window="text", stride="text") | dict.fromkeys(OF_PASS_AT, "pass_at")
        del needs["code"]
        self._check_needs(section, needs)
        if self.pass_at:
            for name in ("rewards", "file"):
                require(
                    bool(getattr(self, name)), f"{Setting('pass_at', self.pass_at)}: needs {Setting(name)}"
                )
            most = max(self.ks())
            enough = self.n is None or self.n >= most
            section.require(
                enough, "n", f"is too few for {Setting('pass_at', self.pass_at)}", f"{most} or more"
            )
        exists = self.out is None or self.results().parent.is_dir() or self.out.suffix != ".json"
        section.require(exists, "out", "its folder is not there", "a file in a folder that is")

    def _check_needs(self, section: Section, needs: dict[str, str]) -> None:
        """ConfigError for a flag that differs from its default without the flag that it belongs to."""
        defaults = {one.name: one.default for one in fields(self)}
        for name, other in needs.items():
            fine = bool(getattr(self, other)) or getattr(self, name) == defaults[name]
            section.require(fine, name, f"needs {Setting(other)}")

    def ks(self) -> list[int]:
        """The numbers of --pass-at. ConfigError if they are none."""
        words = self.pass_at.split(",")
        ok = all(word.strip().isascii() and word.strip().isdigit() and int(word) > 0 for word in words)
        require(ok, "pass_at", self.pass_at, "must be whole numbers above 0 with commas between", "1,8,64")
        return sorted({int(word) for word in words})

    def results(self) -> Path:
        """The file of the results."""
        assert self.out is not None
        return self.out if self.out.suffix == ".json" else self.out / NAME

    def sampling(self, loaded: Loaded) -> Sampling:
        """How answers of --pass-at are drawn: by the flags, else by the folder, else by the defaults."""
        given = {name: value for name in DRAWN if (value := getattr(self, name)) is not None}
        asked = sampling_of(loaded.generation)
        most = TOKENS if self.max_tokens is None else self.max_tokens
        asked["min_tokens"] = min(asked.get("min_tokens", 0), most)
        settings: dict[str, Any] = dict(temperature=TEMPERATURE) | asked | given
        sampling = Sampling(**settings, max_tokens=most, seed=self.seed)
        equal = sampling.temperature == 0 and self.answers() > 1
        wrong = f"all {self.answers()} answers to a prompt would be equal"
        require(not equal, "temperature", 0, wrong, "a number above 0")
        return sampling

    def answers(self) -> int:
        """The number of answers to each prompt."""
        return max(self.ks()) if self.n is None else self.n


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
    worker = Worker(engine, store, say)
    try:
        if team.rank:
            return team.serve(worker)
        assert prepared is not None
        try:
            evaluate(Evaluation(flags, prepared, team, worker, store, loaded, facts))
        finally:
            if prepared.rewards is not None:
                prepared.rewards.close()
            with suppress(RuntimeError):  # a rank that has failed
                team.dismiss()
    finally:
        store.close()
        if team.group is not None:
            dist.destroy_process_group()


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
        top = loaded.model.cfg.rope.max_seq
        longest = top if flags.max_len is None else flags.max_len
        wrong = f"the model has {Setting('model.rope.max_seq', top)} positions"
        require(longest <= top, "max_len", longest, wrong, f"at most {top}")
        template = load_template(loaded.tokenizer, flags.chat_template, now=True, flag="--chat-template")
        tokens = Tokens(loaded.tokenizer, loaded.begin)
        return Evaluator(self.team, self.worker, self.store, loaded, tokens, template, longest)


def evaluate(one: Evaluation) -> None:
    """Runs what the flags ask for; prints the figures, and writes them to --out."""
    flags, prepared, loaded = one.flags, one.prepared, one.loaded
    evaluator = one.evaluator()
    lengths = texts.lengths(evaluator, flags.window, flags.stride) if prepared.files else (0, 0)
    asked = pass_at.questions(evaluator, prepared.rows, flags.chat, flags.system)
    sampling = flags.sampling(loaded) if flags.pass_at else None
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
        found["pass_at"] = made | dict(sampling=asdict(sampling))
    show(found)
    if flags.out is not None:
        write(one, evaluator, found, samples)


def of_tasks(
    evaluator: Evaluator, flags: Flags, prepared: Prepared
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results of the tasks, and a line for each document."""
    from tmoe.eval import harness

    if flags.apply_chat_template:
        note(f"conversations are written by {evaluator.template.source}")
    multiturn, chat = flags.fewshot_as_multiturn, flags.apply_chat_template
    several = prepared.names, prepared.manager, flags.limit, flags.few_shot
    asked = harness.Wanted(*several, chat, multiturn, flags.system, flags.code)
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


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line. An error ends the process with one message."""
    description = (__doc__ or "").partition("\nnext:")[0]
    shape = dict(description=description, config=(tyro.conf.FlagCreatePairsOff,))
    with one_message(CheckpointError):
        known = [*flags_of(Flags), "--parallel.ep"]
        run(call(Flags, "python -m tmoe.eval", expand_home(argv), known=known, **shape))
