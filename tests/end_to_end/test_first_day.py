"""A new user's first day: the jobs that README and docs promise, by their commands, and the flags these take.

Job 3, tmoe.MoE in a model of one's own, is README's snippet, which test_snippets.py runs.

next: docs/settings.md
"""

import json
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
import tokenizers
import torch
from corpora import prose
from hf_tiny import load_step
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)

from tmoe.config.compare import as_flags
from tmoe.config.presets import presets
from tmoe.hf import swap_experts
from tmoe.hf.config import read_config
from tmoe.log.metrics_file import read_steps

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EAGER = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": str(ROOT)}
VOCAB = 300
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
MODELS = dict(
    qwen=Qwen3MoeConfig(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **SIZES),
    mixtral=MixtralConfig(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, **SIZES),
    llama=LlamaConfig(intermediate_size=48, **SIZES),
)
OWN_MODEL = "--model.vocab 300 --model.dim 32 --model.layers 2 --model.heads 4 --model.kv-heads 2"
OWN_MODEL += " --model.head-dim 8 --model.moe.experts 8 --model.moe.top-k 2 --model.moe.ffn-dim 32"


class Day:
    """The folder of a day, and the commands typed in it so far."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows = folder / "own.jsonl"
        self.rows.write_text("".join(json.dumps(dict(text=prose(n, 60))) + "\n" for n in range(120)))
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator([prose(0, 500)], trainer)
        (folder / "tok").mkdir()
        tokenizer.save(str(folder / "tok/tokenizer.json"))

    def hugging_face(self, name: str) -> Path:
        """A folder with a random model and the day's tokenizer."""
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(self.folder / name)
        file = str(self.folder / "tok/tokenizer.json")
        own = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|endoftext|>")
        own.save_pretrained(self.folder / name)
        return self.folder / name

    def type(self, command: str, code: int = 0) -> str:
        """The output of a command in the day's folder; the command must end with this code."""
        done = forked.run(words_of(command), cwd=self.folder, env=EAGER)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


def words_of(command: str) -> list[str]:
    """python's words: train.py lies in the checkout."""
    return [str(ROOT / word) if word == "train.py" else word for word in command.split()]


def flags(*commands: str) -> int:
    """How many flags a user types; those of torchrun are not ours."""
    return sum(word.startswith("--") and word != "--" for words in commands for word in words.split())


def table() -> dict[str, tuple[int, int]]:
    """Flags before and now, by the job's number, as docs/settings.md has them."""
    rows = re.findall(r"^\| (\d) \|.*\| (\d+) \| (\d+) \|$", (ROOT / "docs/settings.md").read_text(), re.M)
    return {job: (int(before), int(now)) for job, before, now in rows}


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    return Day(tmp_path_factory.mktemp("day"))


def lasting(day: Day, command: str, out: Path) -> str:
    """The output of an endless run of two processes, ended through the process that its lock names."""
    with ThreadPoolExecutor(1) as beside:
        run = beside.submit(forked.torchrun, 2, words_of(command), cwd=day.folder, env=EAGER)
        log = out / "metrics.jsonl"
        while not run.done() and not (log.exists() and '"step"' in log.read_text()):
            time.sleep(0.1)  # before its first step the run may not hear signals yet
        assert not run.done(), run.result()
        os.kill(int((out / ".lock").read_text().split()[0]), signal.SIGINT)
    assert run.result().returncode == 0, run.result()
    return run.result().stdout + run.result().stderr


def test_1_own_data_own_tokenizer_own_model(day):
    """Trained on two processes, stopped, gone on with on one at another rate, validated, drawn, exported."""
    out = day.folder / "run"
    convert = "-m tmoe.data own.jsonl --out shards --tokenizer tok"
    start = f"train.py tiny --data.path shards --out run {OWN_MODEL} --train.seq 32 --train.batch 2"
    start += " --steps 100000 --optim.lr 0.003 --log.tensorboard --parallel.ep 2"
    assert "120 documents" in day.type(convert)
    said = lasting(day, start, out)
    steps = [line["step"] for _, line in read_steps(out / "metrics.jsonl")]
    last = steps[-1]
    assert steps == list(range(1, last + 1)) and (out / f"checkpoints/step-{last}").is_dir()
    state = f"its state is in run/checkpoints/step-{last}, and the same command continues it"
    assert said.splitlines()[-1] == f"stopped by SIGINT after step {last}: {state}"
    assert (out / ".lock").read_text() == ""

    # The folder knows the settings. Another number of processes is named.
    again = f"train.py run --steps {last + 3} --optim.lr 0.001 --parallel.ep 1"
    said = day.type(again)
    assert f"resumed after step {last}; " in said and "--optim.lr=0.001 (was 0.003)" in said
    assert f"saved run/checkpoints/step-{last + 3}" in said
    assert f"has {last + 3} of them; name more to continue" in day.type("train.py run")
    check = "train.py run --eval-only"
    assert f"after step {last + 3}" in day.type(check)
    assert "run/report.png" in day.type("-m tmoe.report run") and (out / "report.png").is_file()
    assert "8 experts" in day.type("-m tmoe.routing run")

    step = f"run/checkpoints/step-{last + 3}"
    assert "verified" in day.type(f"-m tmoe.hf export {step} exported")
    found = AutoTokenizer.from_pretrained(day.folder / "exported")
    text = prose(5, 9)
    theirs = tokenizers.Tokenizer.from_file(str(day.folder / "tok/tokenizer.json"))
    assert found.encode(text) == theirs.encode(text).ids
    settings = json.loads((day.folder / "exported/generation_config.json").read_text())
    assert settings["eos_token_id"] == theirs.token_to_id("<|endoftext|>")
    for folder in ("run", "exported"):
        assert "3 tokens" in day.type(f"-m tmoe.generate {folder} expert --max-tokens 3 --min-tokens 3")

    # Before, every start repeated all that the first had said.
    before = flags(convert, start, start, start, "--eval-only")
    assert table()["1"] == (before, flags(convert, start, again, check))


def test_2_published_models_in_and_out(day):
    commands, before = [], 0
    for name in ("qwen", "mixtral"):
        folder = day.hugging_face(name)
        start = f"train.py --init {name} --data.path own.jsonl --out tuned-{name} --train.seq 32 --steps 2"
        said = day.type(start)
        assert f"note: the model's settings are those of {name}\n" in said
        assert f"weights of {folder}, " in said and "step 2/2" in said
        step = f"tuned-{name}/checkpoints/step-2"
        assert "verified" in day.type(f"-m tmoe.hf export {step} out-{name}")
        theirs = AutoModelForCausalLM.from_pretrained(day.folder / f"out-{name}")
        tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            want, got = theirs(tokens).logits, load_step(day.folder / step)(tokens)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        untouched = AutoModelForCausalLM.from_pretrained(folder)
        assert not torch.equal(theirs.lm_head.weight, untouched.lm_head.weight)
        commands.append(start)
        # Before, the model was spelled, and its own tokenizer named.
        config = json.loads((folder / "config.json").read_text())
        model = as_flags(presets()["tiny"].model, read_config(config))
        before += flags(start, model, "--data.tokenizer")
    assert table()["2"] == (before, flags(*commands))


def test_4_experts_swapped_under_a_trainer(day):
    pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(day.hugging_face("qwen"))
    tokens = torch.randint(VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(tokens).logits
        swap_experts(model)
        torch.testing.assert_close(model(tokens).logits, want, rtol=1e-4, atol=1e-5)
    data = [dict(input_ids=x, labels=x) for x in tokens]
    where = str(day.folder / "trainer")
    how = dict(max_steps=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, TrainingArguments(where, **how), train_dataset=data)
    trainer.train()
    trainer.save_model(where)
    again = AutoModelForCausalLM.from_pretrained(where)
    with torch.no_grad():
        tuned = model.eval()(tokens).logits
        torch.testing.assert_close(again(tokens).logits, tuned, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(tuned, want) and table()["4"] == (0, 0)


def test_5_steps_are_looked_at_cut_anew_and_damaged(day):
    """Inspected, cut for other ranks, averaged, verified; a damaged byte; experts made of a dense model."""
    day.hugging_face("llama")
    upcycle = "-m tmoe.upcycle dense up --experts 4 --top-k 2"
    assert "python -m tmoe.hf import makes one" in day.type(upcycle.replace("dense", "llama"), 2)
    day.type("-m tmoe.hf import llama dense")
    inspect = day.type("-m tmoe.checkpoint inspect dense")
    assert "embedding.weight" in inspect and "1 rank" in inspect and "1 ranks" not in inspect
    cut = "-m tmoe.checkpoint reshard dense cut --world 2 --ep 1"
    assert "verified" in day.type(cut)
    assert "verified" in day.type("-m tmoe.checkpoint average dense cut mean")
    assert "whole" in day.type("-m tmoe.checkpoint verify mean")

    damaged = day.folder / "damaged"
    shutil.copytree(day.folder / "dense", damaged)
    file = next(damaged.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for command, code in (("-m tmoe.checkpoint verify damaged", 1), ("-m tmoe.hf export damaged none", 2)):
        assert "damaged: SHA-256 differs" in day.type(command, code)
    assert "damaged: SHA-256 differs" in day.type(
        "train.py --init damaged --data.path own.jsonl --eval-only", 2
    )

    day.type(upcycle)
    check = "train.py --init up --data.path own.jsonl --train.seq 32 --eval-only"
    losses = [
        re.search(r"validation loss ([\d.]+)", day.type(words))[1]
        for words in (check, check.replace(" up ", " dense "))
    ]
    assert losses[0] == losses[1]
    told = json.loads((day.folder / "up/manifest.json").read_text())["info"]["config"]["model"]
    assert told["moe"]["experts"] == 4
    model = as_flags(presets()["tiny"].model, load_step(day.folder / "up").cfg)
    before = flags(cut, upcycle, check, model, "--data.tokenizer")
    assert table()["5"] == (before, flags(cut, upcycle, check))


def test_6_which_gpus_to_rent(day):
    fits = "train.py qwen3-30b-a3b --dry-run --world 64 --parallel.ep 8 --gpu h100"
    said = day.type(fits)
    assert (
        "verdict: does not fit. " in said and "the smallest change that fits: --parallel.checkpoint" in said
    )
    change = said.split("the smallest change that fits: ")[1].splitlines()[0]
    assert "verdict: fits. " in day.type(f"{fits} {change}")
    page = "-m benchmarks.model --gpus 64 --tokens 1e12 --gpu h100 -- qwen3-30b-a3b"
    said = day.type(page)
    assert "H100 SXM 80 GB" in said and "scaled by data sheets" in said and "too much" in said
    # Before, the page took a file of constants, written by hand, and the dry run had no verdict.
    assert table()["6"] == (flags(fits, page, "--constants") - 2, flags(fits, page))
