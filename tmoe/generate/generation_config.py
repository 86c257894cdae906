"""Reads generation_config.json: the keys that become settings of `Sampling`, and those not followed.

next: generate/sampler.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys for which `Sampling` has a setting of the same name.
DRAWN = ("temperature", "top_k", "top_p", "min_p")
# Keys that apply with any value of do_sample; `sampling_of` turns them into settings.
ALWAYS = ("stop_strings", "repetition_penalty", "suppress_tokens", "min_new_tokens", "bad_words_ids")
# Keys that change no token of an answer, or that other files read (end tokens: data/chat/format.py).
SILENT = {
    *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "do_sample", "use_cache"),
    *("cache_implementation", "cache_config", "max_cache_len", "output_attentions", "output_hidden_states"),
    *("output_scores", "output_logits", "return_dict_in_generate", "compile_config", "disable_compile"),
    *("low_memory", "prefill_chunk_size", "continuous_batching_config", "use_mtp", "is_assistant"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("speculation_type", "max_matching_ngram_size", "transformers_version", "chat_format"),
}
# Values with which a key has no effect.
NEUTRAL = dict(
    temperature=1,
    top_k=0,
    top_p=1,
    min_p=0,
    max_length=20,
    num_beams=1,
    num_beam_groups=1,
    num_return_sequences=1,
    typical_p=1,
    repetition_penalty=1,
    encoder_repetition_penalty=1,
    length_penalty=1,
    guidance_scale=1,
)


def sampling_of(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `Sampling` that generation_config.json asks for.

    With do_sample true these are the keys of DRAWN that it has, with do_sample false temperature 0, as in
    transformers (Hugging Face, 2026). Texts of stop_strings become `stop`. Tokens of suppress_tokens become
    `suppress`, and so do words of bad_words_ids that are one token and end no answer. min_new_tokens becomes
    min_tokens.
    """
    settings: dict[str, Any] = {}
    if generation.get("do_sample") is True:
        settings = {name: generation[name] for name in DRAWN if _is_number(generation.get(name))}
    elif generation.get("do_sample") is False:
        settings = dict(temperature=0)
    if stops := _texts(generation.get("stop_strings")):
        settings["stop"] = stops
    if _is_number(penalty := generation.get("repetition_penalty")) and penalty != 1:
        settings["repetition_penalty"] = penalty
    if (least := _ids([generation.get("min_new_tokens")])) and least[0]:
        settings["min_tokens"] = least[0]
    eos = generation.get("eos_token_id")
    ends = _ids(eos if isinstance(eos, list) else [eos])
    bad = [
        word[0] for word in _list(generation.get("bad_words_ids")) if _is_alone(word) and word[0] not in ends
    ]
    left = _ids([*_list(generation.get("suppress_tokens")), *bad])
    if left:
        settings["suppress"] = left
    return settings


def not_followed(generation: Mapping[str, Any], followed: bool = True) -> list[str]:
    """Keys of generation_config.json that would change tokens but are not followed, each as name=value.

    followed: whether the answers follow `sampling_of`. If not, its keys are listed as well.
    """
    unread = SILENT
    if followed:
        unread = unread | (set(DRAWN) if generation.get("do_sample") is not None else set())
        unread = unread | {name for name in ALWAYS if sampling_of({name: generation.get(name)})}
        if longer := [word for word in _list(generation.get("bad_words_ids")) if not _is_alone(word)]:
            generation, unread = {**generation, "bad_words_ids": longer}, unread - {"bad_words_ids"}
    shown = []
    for name, value in generation.items():
        empty = value is None or value is False or value in ([], {}, "")
        neutral = _is_number(value) and value == NEUTRAL.get(name, 0)
        if name not in unread and not name.startswith("_") and not empty and not neutral:
            text = repr(value)
            shown.append(f"{name}={text if len(text) <= 60 else text[:57] + '...'}")
    if not followed and generation.get("do_sample") is False:
        shown.append("do_sample=False")
    return shown


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_alone(word: Any) -> bool:
    """Whether a word of bad_words_ids is a single token."""
    return isinstance(word, list) and len(word) == 1 and bool(_ids(word))


def _ids(values: list[Any]) -> tuple[int, ...]:
    """The values that are whole numbers from 0 on; others, as the -1 of Whisper, name no token."""
    return tuple(value for value in values if type(value) is int and value >= 0)


def _texts(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return tuple(text for text in values if isinstance(text, str) and text)
