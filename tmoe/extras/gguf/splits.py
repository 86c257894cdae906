"""How texts are cut before byte pairs are merged: a tokenizer.json's splits, and llama.cpp's names of them.

llama.cpp finds the name by the ids of a test text of each published tokenizer; here the expressions of
tokenizer.json decide, as written in src/llama-vocab.cpp of llama.cpp 0c1e57098 ("original regex").

next: extras/gguf/vocabulary.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tmoe.config.check import ConfigError

ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{short}|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{short}|{digits}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+",
)
OWN = "byte level"  # GPT-2's expression, which ByteLevel applies itself
KEEPING = ("Isolated", False), ("Removed", True)  # both give the parts that match
DIGITS = "digits"  # single digits


class Split(NamedTuple):
    """llama.cpp's name of a pre-tokenizer, and what it does."""

    name: str
    expressions: tuple[str, ...]
    """applied in turn, each to the parts before"""
    whole: bool = False
    """whether a part that is a token is taken without merging (ignore_merges)"""


SPLITS = (
    Split("gpt-2", (OWN,)),
    Split("starcoder", (DIGITS, OWN)),
    Split("qwen2", (rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{ENDS}",)),
    Split("llama-bpe", (rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{ENDS}",), True),
    Split("dbrx", (rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{ENDS}",)),
    Split("gpt-4o", (CASED.replace("{short}", f"{SHORT}?").replace("{digits}", r"\p{N}{1,3}"),)),
    Split("tekken", (CASED.replace("{short}", "").replace("{digits}", r"\p{N}"),), True),
    Split("deepseek-v3", DEEPSEEK),
)
BY_NAME = {split.name: split for split in SPLITS}


def split_of(tokenizer: dict[str, Any], named: str) -> str:
    """llama.cpp's name for the splits of a tokenizer.json; `named` if it says one. ConfigError for others."""
    if named:
        return named
    expressions = _expressions(tokenizer.get("pre_tokenizer"))
    whole = bool((tokenizer.get("model") or {}).get("ignore_merges"))
    found = [split.name for split in SPLITS if split.expressions == expressions and split.whole == whole]
    if not found:
        shown = " then ".join(map(repr, expressions)) if expressions else "none that is known"
        alone = ", a part that is a token is taken whole" * whole
        raise ConfigError(
            f"tokenizer.json: llama.cpp's name of its pre-tokenizer is not known ({shown}{alone}); known are "
            f"{', '.join(split.name for split in SPLITS)}; --pre NAME names it"
        )
    return found[0]


def _expressions(stated: Any) -> tuple[str, ...] | None:
    """The splits of a pre_tokenizer in turn; None for another kind of it."""
    steps = stated.get("pretokenizers", []) if _kind(stated) == "Sequence" else [stated]
    found: list[str] = []
    for step in steps:
        kind = _kind(step)
        if kind == "ByteLevel" and not step.get("add_prefix_space"):
            found += [OWN] if step.get("use_regex", True) else []
        elif kind == "Digits" and step.get("individual_digits"):
            found.append(DIGITS)
        elif kind == "Split" and (step.get("behavior"), bool(step.get("invert"))) in KEEPING:
            found.append(str((step.get("pattern") or {}).get("Regex")))
        else:
            return None
    return tuple(found)


def _kind(step: Any) -> str:
    return step.get("type", "") if isinstance(step, dict) else ""


def pre_tokenizer(name: str) -> dict[str, Any]:
    """The pre_tokenizer of a tokenizer.json for one of `SPLITS`."""
    steps: list[dict[str, Any]] = []
    own = False
    for expression in BY_NAME[name].expressions:
        if expression == OWN:
            own = True
        elif expression == DIGITS:
            steps.append(dict(type="Digits", individual_digits=True))
        else:
            steps.append(
                dict(type="Split", pattern=dict(Regex=expression), behavior="Isolated", invert=False)
            )
    steps.append(dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=own))
    return dict(type="Sequence", pretokenizers=steps)
