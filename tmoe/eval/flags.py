"""The flags of `tmoe eval`: their meanings, their defaults, and which of them fit together.

next: eval/evaluation.py
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tmoe.config.axes import Copies
from tmoe.config.check import Section, Setting, require

NAME = "results.json"
MOST_ANSWERS = 100_000  # to each prompt of --pass-at
# A flag, and the flags that use it: one of them must be given with it.
USED_BY = dict.fromkeys(("tasks_path", "limit", "few_shot", "apply_chat_template"), ("tasks",))
USED_BY |= dict(fewshot_as_multiturn=("apply_chat_template",), window=("text",), stride=("text",))
USED_BY |= dict.fromkeys(("rewards", "file", "chat", "n", "right", "max_tokens"), ("pass_at",))
USED_BY |= dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), ("pass_at",))
USED_BY |= dict.fromkeys(("reward_workers", "reward_timeout"), ("pass_at",))
USED_BY |= dict.fromkeys(("system", "code", "seed", "slots", "pool_gib"), ("tasks", "pass_at"))
USED_BY |= dict(chat_template=("apply_chat_template", "pass_at"), max_len=("tasks", "text"))


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
    parallel: Copies = field(default_factory=Copies)

    def check(self) -> None:
        """ConfigError for flags that cannot be combined, and for values out of range."""
        section = Section(self)
        some = self.tasks or self.text or self.pass_at
        ways = ", ".join(Setting(name) for name in ("tasks", "text", "pass_at"))
        require(bool(some), f"nothing to evaluate: give {ways}")
        named = all(word.strip() for words in self.tasks for word in words.split(","))
        require(named, "tasks", " ".join(self.tasks), "holds an empty name", "names of tasks")
        share = self.limit is None or 0 < self.limit < 1 or (self.limit >= 1 and self.limit % 1 == 0)
        section.require(share, "limit", "must be a whole number of documents, or a share between 0 and 1")
        section.require((self.few_shot or 0) >= 0, "few_shot", "must be 0 or more")
        for name in ("window", "stride", "max_len", "n", "max_tokens", "reward_workers"):
            value = getattr(self, name)
            section.require(value is None or value >= 1, name, "must be at least 1")
        section.require(self.max_len is None or self.max_len > 1, "max_len", "must be at least 2")
        section.require(math.isfinite(self.right), "right", "must be a number")
        timed = 0 < self.reward_timeout < math.inf
        section.require(timed, "reward_timeout", "must be above 0, and finite")
        self._check_uses(section)
        if self.pass_at:
            self._check_pass_at(section)
        self._check_out(section)

    def _check_uses(self, section: Section) -> None:
        """ConfigError for a flag that differs from its default, and that nothing in this call uses."""
        defaults = {one.name: one.default for one in fields(self)}
        for name, others in USED_BY.items():
            fine = getattr(self, name) == defaults[name] or any(getattr(self, other) for other in others)
            section.require(fine, name, f"needs {' or '.join(Setting(other) for other in others)}")

    def _check_pass_at(self, section: Section) -> None:
        for name in ("rewards", "file"):
            given = bool(getattr(self, name))
            require(given, f"{Setting('pass_at', self.pass_at)}: needs {Setting(name)}")
        most = max(self.ks())
        enough = self.n is None or self.n >= most
        most_n = self.n is None or self.n <= MOST_ANSWERS
        section.require(most_n, "n", f"must be at most {MOST_ANSWERS:,}")
        section.require(enough, "n", f"is too few for {Setting('pass_at', self.pass_at)}", f"{most} or more")

    def _check_out(self, section: Section) -> None:
        if self.out is None:
            return
        whole = self.out.suffix == ".json"
        there = not whole or self.out.parent.is_dir()
        section.require(there, "out", "its folder is not there", "a file in a folder that is")
        path = self.results()
        other = path.is_dir() or any(part.exists() and not part.is_dir() for part in path.parents)
        other = other or self.out.suffix in (".jsonl", ".txt", ".csv", ".toml", ".yaml", ".md")
        section.require(not other, "out", "is no .json file and no folder", "NAME.json, or a folder")
        there = next(part for part in path.parents if part.exists())
        section.require(os.access(there, os.W_OK), "out", f"{there} cannot be written to")

    def ks(self) -> list[int]:
        """The numbers of --pass-at. ConfigError if they are none."""
        words = self.pass_at.split(",")
        ok = all(re.fullmatch(r"\s*[0-9]{1,6}\s*", word) and 0 < int(word) <= MOST_ANSWERS for word in words)
        wrong = f"must be whole numbers from 1 to {MOST_ANSWERS:,} with commas between"
        require(ok, "pass_at", self.pass_at, wrong, "1,8,64")
        return sorted({int(word) for word in words})

    def results(self) -> Path:
        """The file of the results."""
        assert self.out is not None
        return self.out if self.out.suffix == ".json" else self.out / NAME

    def answers(self) -> int:
        """The number of answers to each prompt."""
        return max(self.ks()) if self.n is None else self.n
