"""tmoe's models inside lm_eval: its tasks, with the scores and texts of its model `hf`.

lm_eval finds no models of other packages, so `tmoe eval` calls it with the object of this file. That object
is one process to lm_eval; the other ranks get their shares from eval/team.py. So every metric is computed on
rank 0, from the same numbers in the same order, however many ranks there are.

next: eval/evaluator.py
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import lm_eval.evaluator
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tmoe.config.check import ConfigError, Setting, require
from tmoe.data.tokenizer import DataError
from tmoe.eval.evaluator import Evaluator
from tmoe.eval.task_names import refuse, words_of
from tmoe.generate.generation_config import sampling_of
from tmoe.generate.sampler import Sampling

# Settings of generation that are followed, and values of others that change nothing.
FOLLOWED = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
NEUTRAL = dict(num_beams=1, num_return_sequences=1, use_cache=True, length_penalty=1.0, num_beam_groups=1)
SHOWN = "results", "groups", "n-shot", "n-samples", "versions", "higher_is_better", "configs", "samples"


class TmoeLM(TemplateLM):
    """lm_eval's interface to a model. Scores are computed in packed rows, texts by the engine."""

    max_gen_toks = 256

    def __init__(self, evaluator: Evaluator, seed: int = 0) -> None:
        super().__init__()
        self.evaluator, self.seed = evaluator, seed
        self.computes = False
        """whether the model computes, and not lm_eval"""
        self.tokens = evaluator.tokens
        self.max_length = evaluator.longest

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eos

    @property
    def prefix_token_id(self) -> int:
        return self.tokens.prefix

    @property
    def tokenizer_name(self) -> str:
        """The identity of tokenizer and template, under which lm_eval caches requests."""
        return f"{self.tokens.plain.fingerprint}-{self.evaluator.template.digest}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.evaluator.template.text

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without the generation prompt its last turn is left open."""
        template = self.evaluator.template
        try:
            text = template.render(chat_history, prompt=add_generation_prompt)
        except DataError:  # some templates know no system message; lm_eval's `hf` leaves it out too
            chat_history = [message for message in chat_history if message["role"] != "system"]
            text = template.render(chat_history, prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        at = text.rfind(last.strip())
        if at < 0:
            raise DataError(f"the chat template ({template.source}) leaves out the last turn, {last[:40]!r}")
        end = at + len(last.strip())
        blanks = last[len(last.rstrip()) :]
        return text[: end + len(blanks) * text[end:].startswith(blanks)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.tokens.encode(string, add_special_tokens)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        pairs = []
        for texts, context, rest in requests:
            where, top = f"the answer {texts[1][:40]!r}" if texts else "a window", self.max_length
            after = f" after {texts[0][-40:]!r}" if texts else ""
            require(len(rest) > 0, f"{where}{after} has no token")
            require(len(rest) <= top, f"{where}{after} has {len(rest)} tokens; valid: at most {top}")
            before = context or [
                self.prefix_token_id
            ]  # a context of blanks, which lm_eval gives to the answer
            whole = (before + rest)[-(top + 1) :]  # cut from the left, as lm_eval does
            pairs.append((whole[:-1], rest))
        self.computes = True
        found = self.evaluator.score(pairs)
        self.computes = False
        for (texts, _, _), one in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, one)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        counts, parts = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            some = [(None, *make_disjoint_window(window)) for window in windows]
            counts.append(len(some))
            parts += some
        found = iter(self._loglikelihood_tokens(parts))
        sums = [sum(next(found)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        kinds: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            kinds.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(i)
        for group in kinds.values():
            first = requests[group[0]]
            sampling, until = self.sampling(first.args[1], first.task_name or "a task")
            room = self.max_length - sampling.max_tokens
            ids = [self.tok_encode(requests[i].args[0])[-room:] or [self.prefix_token_id] for i in group]
            self.computes = True
            answers = self.evaluator.answer(ids, 1, sampling, group)
            self.computes = False
            for i, ((made, _, _),) in zip(group, answers, strict=True):
                text = self.tokens.decode(made)
                texts[i] = postprocess_generated_text(text, stop=until, think_end_token=None)
                self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def sampling(self, asked: dict[str, Any], task: str) -> tuple[Sampling, list[str]]:
        """The settings of answers, and the texts at which they are cut, for a task's generation_kwargs.

        generation_config.json of the model is followed where it changes greedy answers too, as in
        transformers. ConfigError for settings that tmoe does not have.
        """
        place = f"{task}: generation_kwargs"
        try:
            kwargs: dict[str, Any] = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
            until = handle_stop_sequences(kwargs.pop("until", None), eos=self.tokens.eos_text)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{place}: {error}") from None
        most, draws = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample", False)
        room = f"must be above 0, and below the {self.max_length} tokens of an input"
        require(0 < most < self.max_length, f"{place}: max_gen_toks={most}: {room}")
        require(all(isinstance(text, str) for text in until), f"{place}: until={until}: must be texts")
        for name, value in kwargs.items():
            known = name in FOLLOWED or NEUTRAL.get(name) == value
            require(known, f"{place}: {name}={value!r}: is not there; valid: {', '.join(FOLLOWED)}")
        base = sampling_of(self.evaluator.loaded.generation)
        base = {name: value for name, value in base.items() if name not in ("temperature", *FOLLOWED[1:4])}
        given = {name: kwargs[name] for name in FOLLOWED if name in kwargs and (draws or name == FOLLOWED[4])}
        given["temperature"] = kwargs.get("temperature", 0.0) if draws else 0.0
        base["min_tokens"] = min(base.get("min_tokens", 0), most)
        # eos ends an answer as an id, and is no text of it
        stop = tuple(text for text in until if text and text != self.tokens.eos_text) + base.pop("stop", ())
        try:
            return Sampling(**base | given, max_tokens=most, stop=stop, seed=self.seed), until
        except ConfigError as error:
            raise ConfigError(f"{place}: {error.spelt('name')}") from None


class Warned(logging.Handler):
    """Keeps lm_eval's last warning: some of its errors, such as `KeyError: None`, need it as their reason."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = f" ({' '.join(record.getMessage().split())})"


class Manager(TaskManager):
    """lm_eval's tasks; a task that cannot be loaded is one error with its innermost cause."""

    def load(self, spec: Any) -> Any:
        logger, warned = logging.getLogger("lm_eval"), Warned(logging.WARNING)
        logger.addHandler(warned)
        try:
            return super().load(spec)
        except Exception as error:  # of YAML, templates and the package datasets
            said = f"cannot be loaded: {said_by(error)}{warned.last}"
            raise ConfigError.of("tasks", ",".join(spec), said) from error
        finally:
            logger.removeHandler(warned)


class Wanted(NamedTuple):
    """Tasks, and the settings of lm_eval that `tmoe eval` has."""

    names: list[str]
    manager: Manager
    limit: float | None
    few_shot: int | None
    chat: bool
    multiturn: bool
    system: str
    code: bool
    seed: int


def wanted(names: Sequence[str], paths: Sequence[Any]) -> tuple[list[str], Manager]:
    """The tasks of these names or patterns, those of `paths` first. ConfigError for a name without a task."""
    words = words_of(names)
    folders: list[Any] = [str(path) for path in paths]
    manager = Manager(include_path=folders or None, include_defaults=not folders)
    if folders and not all(manager.match_tasks([word]) for word in words):
        manager = Manager(include_path=folders, include_defaults=True)
    found: dict[str, None] = {}
    for word in words:
        if not (some := manager.match_tasks([word])):
            refuse(word, manager.all_tasks, paths)
        found |= dict.fromkeys(sorted(some))
    return list(found), manager


def evaluate(evaluator: Evaluator, asked: Wanted) -> dict[str, Any]:
    """lm_eval's results of the tasks, with the samples of each. ConfigError for tasks that cannot run.

    Seeds are lm_eval's, so the examples before a question are those of its command. Its function
    simple_evaluate would do the same, but starts `pip list` and other programs, which take seconds.
    """
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    loaded = asked.manager.load(asked.names)
    for name, task in loaded["tasks"].items():
        prepare(name, task, evaluator, asked)
    limit = asked.limit
    model = TmoeLM(evaluator, asked.seed)
    try:
        found = lm_eval.evaluator.evaluate(
            model,
            loaded,
            limit=int(limit) if limit is not None and limit >= 1 else limit,
            apply_chat_template=asked.chat,
            fewshot_as_multiturn=asked.multiturn and asked.chat,
            system_instruction=asked.system or None,
            confirm_run_unsafe_code=asked.code,
        )
    except (ConfigError, DataError, OSError):
        raise
    except Exception as error:  # of a task's YAML, its templates, its metrics
        if model.computes:
            raise
        raise ConfigError.of(
            "tasks", ",".join(asked.names), f"cannot be evaluated: {said_by(error)}"
        ) from error
    assert found is not None
    return {name: found[name] for name in SHOWN if name in found}


def prepare(name: str, task: Any, evaluator: Evaluator, asked: Wanted) -> None:
    """Sets a task's examples as lm_eval's simple_evaluate does. ConfigError for a task that cannot run."""
    unsafe = getattr(task, "UNSAFE_CODE", False) and not asked.code
    wrong = f"runs programs that the model has written; allow that with {Setting('code')}"
    require(not unsafe, "tasks", name, wrong)
    require(
        not getattr(task, "MULTIMODAL", False), "tasks", name, "has pictures, which tmoe's models do not read"
    )
    own = task.get_config("num_fewshot")
    if own == 0 and asked.few_shot:
        evaluator.worker.say(f"--few-shot={asked.few_shot}: the task {name} allows no examples")
    elif own is None or asked.few_shot is not None:
        task.set_config(key="num_fewshot", value=asked.few_shot or 0)
    if count := task.get_config("num_fewshot"):
        there = len(list(task.fewshot_docs()))
        short = f"the task {name} has {there} examples, not {count}"
        setting = ("tasks", name) if asked.few_shot is None else ("few_shot", count)
        require(count <= there, *setting, short, f"{Setting('few_shot')} of at most {there}")
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)


def said_by(error: BaseException) -> str:
    """The innermost cause of an error, in one line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return " ".join(f"{type(error).__name__}: {error}".split())
