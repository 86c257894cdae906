"""Writes the stored files of tests/hf/test_gguf.py: logits, tokens and types of tensors, by llama.cpp itself.

    PYTHONPATH=.:tests/lib python tests/lib/gguf_stored.py tests/hf [NAME ...]

Needs llama-cpp-python, which no test needs. The last files are of version 0.3.36 (llama.cpp 0c1e57098).
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path

import gguf_tiny as tiny
import numpy as np
from gguf import GGUFReader

from tmoe.extras.gguf.command import export_gguf
from tmoe.extras.gguf.types import MIXES

SAID: list[str] = []
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def hear(level: int, text: bytes, data: object) -> None:
    if level >= 4 or b"error" in text:
        SAID.append(text.decode(errors="replace").strip())


def run_llama(path: Path, prompt: list[int], new: int) -> tuple[np.ndarray, list[int]]:
    """Logits of the prompt [n, V] and greedy tokens after it, on one thread, with an fp32 cache."""
    import llama_cpp as L

    model = L.llama_model_load_from_file(str(path).encode(), L.llama_model_default_params())
    if not model:
        raise RuntimeError("; ".join(SAID)[-300:])
    params = L.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = (
        256,
        256,
        256,
        1,
        1,
    )
    params.flash_attn_type, params.type_k, params.type_v = 0, 0, 0
    context = L.llama_init_from_model(model, params)
    words = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
    first, made, at, todo = None, [], 0, list(prompt)
    while len(made) < new:
        batch = L.llama_batch_init(len(todo), 0, 1)
        batch.n_tokens = len(todo)
        for i, token in enumerate(todo):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, at + i, 1, 1
            batch.seq_id[i][0] = 0
        if L.llama_decode(context, batch):
            raise RuntimeError("; ".join(SAID)[-300:])
        rows = [
            np.ctypeslib.as_array(L.llama_get_logits_ith(context, i), (words,)).copy()
            for i in range(len(todo))
        ]
        first = np.stack(rows) if first is None else first
        at += len(todo)
        todo = [int(rows[-1].argmax())]
        made += todo
        L.llama_batch_free(batch)
    L.llama_free(context)
    L.llama_model_free(model)
    return first, made


def logits_of(folder: Path, name: str) -> dict[str, np.ndarray]:
    """llama.cpp's logits and tokens of a model of `tiny.MODELS`, compared with tmoe's."""
    step = tiny.step_of(folder / name, tiny.MODELS[name])
    path = folder / f"{name}.gguf"
    export_gguf(step, path, type="f32")
    logits, made = run_llama(path, tiny.PROMPT, tiny.NEW)
    model = tiny.Transformer(tiny.MODELS[name])
    tiny.fill(model, 0)
    ours, greedy = tiny.greedy(model)
    equal = sum(a == b for a, b in zip(made, greedy, strict=True))
    print(f"{name:28} logits {np.abs(ours - logits).max():.1e} of {np.abs(ours).max():.1f}, {equal} tokens")
    return {f"{name}/logits": logits[tiny.ROWS], f"{name}/tokens": np.array(made)}


def types_of(folder: Path, name: str) -> dict[str, list[str]]:
    """Mix -> the types that llama_model_quantize gives the tensors, in the order of their names."""
    import llama_cpp as L

    step = tiny.step_of(folder / name, tiny.MIXED[name])
    path, made = folder / f"{name}.gguf", folder / "quantised.gguf"
    export_gguf(step, path, type="f32")
    found = {}
    for mix, entry in MIXES.items():
        if mix == "f32":
            continue
        params = L.llama_model_quantize_default_params()
        params.ftype, params.nthread = int(entry.file_type), 1
        if L.llama_model_quantize(str(path).encode(), str(made).encode(), ctypes.byref(params)):
            raise RuntimeError("; ".join(SAID)[-300:])
        kinds = {t.name: t.tensor_type.name for t in GGUFReader(made).tensors}
        found[mix] = [kinds[tensor] for tensor in sorted(kinds)]
    return found


def main(out: Path, names: list[str]) -> None:
    import llama_cpp as L

    L.llama_backend_init()
    listener = L.llama_log_callback(hear)  # kept, because llama.cpp calls it
    L.llama_log_set(listener, ctypes.c_void_p(0))
    with tempfile.TemporaryDirectory() as folder:
        logits: dict[str, np.ndarray] = {}
        for name in names or tiny.MODELS:
            if name in tiny.MODELS:
                logits |= logits_of(Path(folder), name)
        if logits and not names:
            np.savez_compressed(out / "gguf_logits.npz", **logits)
    if names:
        return
    types: dict[str, dict[str, list[str]]] = {}
    for name in tiny.MIXED:
        with tempfile.TemporaryDirectory() as folder:
            types[name] = types_of(Path(folder), name)
            print(name, sorted({kind for mix in types[name].values() for kind in mix}))
    kinds = sorted({kind for mixes in types.values() for said in mixes.values() for kind in said})
    coded = {
        name: {mix: "".join(DIGITS[kinds.index(kind)] for kind in said) for mix, said in mixes.items()}
        for name, mixes in types.items()
    }
    (out / "gguf_types.json").write_text(json.dumps(dict(types=kinds) | coded, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
