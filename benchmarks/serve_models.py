"""Starts servers of a model whose weights are drawn on the device, and reads what their processes cost.

    python -m benchmarks.serve_models tmoe FOLDER --port 8000 --slots 256
    python -m benchmarks.serve_models transformers FOLDER --port 8000 --continuous-batching

The folder has the settings and a tokenizer, but no weights: those of 12 layers would take longer to write and
to read than the measurement. Both programs are the users' own; only the reading of weights is replaced. Each
matrix is drawn with standard deviation 0.02 and each norm is 1, in both, so that tokens are spread over
experts in the same way. No token ends an answer.

next: serve.py
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tmoe.serve.engine_process as engine_process
from tmoe.config.model import ModelConfig
from tmoe.generate.load import DTYPES, Loaded, device_of, empty
from tmoe.hf.config import read_config, write_config
from tmoe.hf.tokenizer_files import carried_by

SEED = 1
EOS = "<|endoftext|>"
BLANK = "\u0120"  # a blank in the alphabet of byte-level vocabularies


# ---- the folder ----


def byte_names() -> list[str]:
    """The names of the 256 bytes in byte-level vocabularies."""
    from tmoe.serve.token_text import byte_alphabet

    return sorted(byte_alphabet(), key=byte_alphabet().__getitem__)


def words_of(vocab: int) -> list[str]:
    """The vocabulary's words, each a token if a blank is before it: all words of one letter, of two, ..."""
    words = ("".join(word) for n in (1, 2, 3, 4) for word in product(ascii_lowercase, repeat=n))
    return list(islice(words, vocab - 257))


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer of `vocab` ids: the bytes, the words with a blank before them, and EOS."""
    names = [*byte_names(), *(BLANK + word for word in words_of(vocab))]
    merges = [[name[:-1], name[-1]] for name in names[256:]]
    model = dict(type="BPE", vocab={name: i for i, name in enumerate([*names, EOS])}, merges=merges)
    plain = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    end = dict(id=vocab - 1, content=EOS, special=True, normalized=False)
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    whole = dict(version="1.0", model=model, pre_tokenizer=plain, decoder=plain, added_tokens=[end])
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False, eos_token=EOS
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_folder(folder: Path, cfg: ModelConfig, dtype: str) -> Path:
    """A Hugging Face folder without weights. Answers are drawn at temperature 1 without filters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(write_config(cfg, dtype)))
    sampled = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
    (folder / "generation_config.json").write_text(json.dumps(sampled))
    write_tokenizer(folder, cfg.vocab)
    return folder


# ---- drawn models ----


@torch.no_grad()
def draw(tensors: dict[str, Tensor]) -> None:
    """Fills a model's tensors."""
    generators = {t.device: torch.Generator(t.device).manual_seed(SEED) for t in tensors.values()}
    for name, t in tensors.items():
        if t.dim() > 1:
            t.normal_(0, 0.02, generator=generators[t.device])
        else:
            t.fill_(float("norm" in name))


def load_drawn(path: Path, tokenizer: Any = None, device: Any = None, dtype: Any = None, *_: Any) -> Loaded:
    """In the place of `tmoe.generate.load.load`: a model of the folder's settings with drawn weights."""
    where = device_of(device)
    kind = DTYPES[dtype] if dtype else torch.bfloat16 if where.type == "cuda" else torch.float32
    cfg = read_config(json.loads((path / "config.json").read_text()))
    model = empty(cfg, where, kind)
    draw(model.state_dict())
    carried = carried_by(path)
    assert carried is not None
    return Loaded(path, model.eval(), carried.load(), (), (), carried.generation, None)


def transformers_model(path: Path, device: str, attention: str | None = None) -> Any:
    """transformers' model of the folder's settings with drawn weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(path)
    how = dict(attn_implementation=attention) if attention else {}
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=kind, **how).eval()
    draw(dict(model.named_parameters()))
    model.generation_config = GenerationConfig.from_pretrained(path)
    return model


# ---- the programs ----


def serve_tmoe(folder: Path, argv: Sequence[str]) -> None:
    """`tmoe serve`; its engine is spawned, and this module is then read there with the same replacement."""
    from tmoe.serve.command_line import main

    main([str(folder), *argv])


def serve_transformers(folder: Path, argv: Sequence[str]) -> None:
    """`transformers serve`."""
    import typer
    from transformers.cli.serve import Serve
    from transformers.cli.serving.model_manager import ModelManager

    def drawn(self: Any, *_: Any, **__: Any) -> Any:
        device = "cuda" if torch.cuda.is_available() and self.device != "cpu" else "cpu"
        return transformers_model(folder, device, self.attn_implementation)

    ModelManager._load_model = drawn
    app = typer.Typer()
    app.command()(Serve)
    app([str(folder), *argv], standalone_mode=False)


PROGRAMS = dict(tmoe=serve_tmoe, transformers=serve_transformers)


class Server(NamedTuple):
    """A server under way."""

    port: int
    process: subprocess.Popen
    log: Path

    def children(self) -> list[int]:
        """The engine's process, if the server has one."""
        pid = self.process.pid
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        found = [int(child) for task in tasks for child in task.read_text().split()]
        return [c for c in found if b"resource_tracker" not in Path(f"/proc/{c}/cmdline").read_bytes()]

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU seconds of the server's own process so far, and those of the engine's."""
        return cpu_of(self.process.pid), sum(map(cpu_of, self.children()))


def cpu_of(pid: int) -> float:
    """CPU seconds of all threads of a process, by Linux's clock of it: /proc counts whole ticks of 10 ms."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def server(kind: str, folder: Path, flags: Sequence[str], log: Path, seconds: float) -> Iterator[Server]:
    """A server of the folder, once it answers /health. RuntimeError if that takes longer than `seconds`."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "benchmarks.serve_models",
        kind,
        str(folder),
        "--port",
        str(port),
        *flags,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=Path(__file__).parents[1])
        try:
            end = time.monotonic() + seconds
            while not healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    last = " / ".join(log.read_text(errors="replace").splitlines()[-3:])
                    raise RuntimeError(f"{kind} serve does not answer (exit code {process.poll()}): {last}")
                time.sleep(0.1)
            yield Server(port, process, log)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


if __name__ in ("__main__", "__mp_main__"):  # the second one is the engine's process, which is spawned
    engine_process.load = load_drawn  # pyrefly: ignore

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:])
