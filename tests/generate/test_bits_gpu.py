"""On a GPU an engine with bits gives the log-probs of training's forward in every bit, at published widths.

Over an expert group it starts itself under torchrun, on two GPUs or with two ranks on one:
    torchrun --nproc-per-node 2 tests/generate/test_bits_gpu.py

next: tests/generate/test_rollout_bits.py
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rollout_bits import in_training, share_equal
from symm_ranks import run

from tmoe.config.presets import presets
from tmoe.config.run import Config, TrainConfig
from tmoe.generate import Engine, Sampling
from tmoe.model.transformer import Transformer
from tmoe.parallel import build_mesh, parallelize

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]
GRANITE = dict(
    embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0078125, logits_scaling=4.0
)
SHAPES = {"qwen3-30b-a3b": {}, "moe-pilot-14b": GRANITE, "olmoe-1b-7b": {}}
LENGTHS = 1, 7, 64, 127, 128, 129, 200, 300  # of prompts: below, at and behind blocks


def cut(name: str, **changes) -> Transformer:
    """Two layers of a preset at its widths, in bf16, with random norms too."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(replace(presets()[name].model, layers=2, **changes))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.uniform_(0.5, 1.5)
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("graphs", [False, True], ids=["steps", "graphs"])
@pytest.mark.parametrize("name", SHAPES)
def test_log_probs_are_trainings(name, graphs):
    model = cut(name, **SHAPES[name])
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.cfg.vocab, (n,), generator=draw).tolist() for n in LENGTHS]
    how = Sampling(temperature=0.8, max_tokens=80, seed=3)
    found = Engine(model, slots=12, graphs=graphs, bits=True).generate(prompts, 2, how)
    want = in_training(model, prompts, found, 0.8)
    ours = [sample.logprobs for group in found for sample in group]
    share, far = share_equal(ours, want)
    print(f"{name}: {share:.2%} of tokens equal in bits, {far:.2g} at most")
    assert all(torch.equal(a, b) for a, b in zip(ours, want, strict=True))


def test_without_bits_they_differ():
    """So the flag is what makes them equal."""
    model = cut("qwen3-30b-a3b")
    prompts = [list(range(1, 200))]
    found = Engine(model, slots=2).generate(prompts, 2, Sampling(max_tokens=40))
    ours = [sample.logprobs for group in found for sample in group]
    model.keep_bits()
    share, _ = share_equal(ours, in_training(model, prompts, found, 1.0))
    assert share < 1


@pytest.mark.timeout(420)
def test_over_an_expert_group():
    shared = [] if torch.cuda.device_count() >= 2 else ["-m", "benchmarks.shared"]
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *shared, __file__, limit=400)


def over_ranks() -> None:
    """What a rank does: prompts of its own, and other numbers of rows of each expert in each pass."""
    mesh = build_mesh(ep=2)
    for name, more in SHAPES.items():
        torch.manual_seed(0)
        model_cfg = replace(presets()[name].model, layers=2, **more)
        cfg = Config(model=model_cfg, train=TrainConfig(seq=512), compile=False)
        cfg = replace(cfg, parallel=replace(cfg.parallel, ep=2))
        with torch.device("cuda"):
            model = Transformer(model_cfg)
        parallelize(model, mesh, cfg)
        draw = torch.Generator().manual_seed(dist.get_rank())
        prompts = [
            torch.randint(model_cfg.vocab, (n,), generator=draw).tolist() for n in LENGTHS[dist.get_rank() :]
        ]
        how = Sampling(temperature=0.8, max_tokens=40, seed=3)
        for graphs in (False, True):
            found = Engine(model, slots=12, graphs=graphs, bits=True).generate(prompts, 2, how)
            with torch.no_grad():
                want = in_training(model, prompts, found, 0.8)
            share, far = share_equal([sample.logprobs for group in found for sample in group], want)
            which = f"{name}, rank {dist.get_rank()}, graphs {graphs}"
            print(f"{which}: {share:.2%} of tokens equal in bits, {far:.2g} at most", flush=True)
            assert share == 1.0
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    over_ranks()
    dist.barrier()
    if dist.get_rank() == 0:
        print("all right", flush=True)
    dist.destroy_process_group()
