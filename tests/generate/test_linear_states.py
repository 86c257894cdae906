"""Generation with states of linear layers: as the model's own forward, token after token."""

from dataclasses import replace

import pytest
import torch

import tmoe
from tmoe.config.check import ConfigError
from tmoe.config.linear_settings import LinearConfig
from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.eval.forward import batch_of, hidden
from tmoe.eval.tree import rows
from tmoe.generate.cache import bytes_a_sequence, bytes_a_token
from tmoe.generate.forward import all_turns
from tmoe.generate.live import Live
from tmoe.generate.requests import Details

LINEAR = LinearConfig("deltanet", key_heads=2, value_heads=4, key_dim=8, value_dim=12)
CFG = ModelConfig(
    **dict(vocab=61, dim=32, layers=4, heads=4, kv_heads=2, head_dim=16, init_std=0.3),
    **dict(attention_gate=True, qk_norm="head", norm_offset=True, linear=LINEAR),
    rope=RopeConfig(dim=4, max_seq=600),
    moe=MoEConfig(experts=6, top_k=2, ffn_dim=10, shared_dim=14, shared_gate=True),
)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return tmoe.Transformer(CFG).eval()


def greedy(net, prompt, count):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(net(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def prompts_of(*lengths):
    gen = torch.Generator().manual_seed(1)
    return [torch.randint(61, (n,), generator=gen).tolist() for n in lengths]


def test_answers_are_the_forwards(net):
    """Prompts of one token, of several pages, packed and refilled; slots close their gaps."""
    prompts = prompts_of(1, 7, 140, 2, 300, 33)
    engine = tmoe.Engine(net, slots=3)
    samples = engine.generate(prompts, sampling=tmoe.Sampling(temperature=0.0, max_tokens=9))
    for prompt, (sample,) in zip(prompts, samples, strict=True):
        assert sample.ids.tolist() == greedy(net, prompt, 9)


def test_mamba2_answers_are_the_forwards():
    """Prompts of one token and of two pages, in more requests than slots; then in pieces."""
    torch.manual_seed(0)
    mamba = LinearConfig("mamba2", key_heads=2, value_heads=4, key_dim=8, value_dim=12, least_step=0.01)
    net = tmoe.Transformer(replace(CFG, linear=mamba)).eval()
    prompts = prompts_of(1, 140, 33)
    sampling = tmoe.Sampling(temperature=0.0, max_tokens=6)
    samples = tmoe.Engine(net, slots=2).generate(prompts, sampling=sampling)
    with Live(net, slots=2, max_len=600, budget=128) as live:
        tickets = [live.submit(ids, sampling) for ids in prompts]
        for prompt, (sample,), ticket in zip(prompts, samples, tickets, strict=True):
            assert sample.ids.tolist() == greedy(net, prompt, 6) == ticket.result(timeout=600)[0].ids.tolist()


def test_answers_to_a_prompt_begin_with_its_state(net):
    """More answers than slots: the last begin long after their prompt was computed, with other prompts."""
    prompts = prompts_of(20, 5)
    sampling = tmoe.Sampling(temperature=1.0, max_tokens=6, seed=3)
    want = tmoe.Engine(net, slots=64).generate(prompts, n=7, sampling=sampling)
    for slots in (1, 2, 5):
        got = tmoe.Engine(net, slots=slots).generate(prompts, n=7, sampling=sampling)
        for a, b in zip(sum(got, ()), sum(want, ()), strict=True):
            assert a.ids.tolist() == b.ids.tolist()
            torch.testing.assert_close(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-5)
    for prompt, answers in zip(prompts, want, strict=True):
        for answer in answers:
            ids = torch.tensor([[*prompt, *answer.ids.tolist()]])
            with torch.no_grad():
                logp = net(ids)[0].log_softmax(-1)
            at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
            torch.testing.assert_close(logp[at, ids[0, at + 1]], answer.logprobs, rtol=1e-4, atol=1e-4)


def test_a_live_engine_passes_states_between_pieces(net):
    """A long prompt in pieces between the steps of other answers; a prompt that is a beginning of another."""
    long, short = prompts_of(420, 9)
    sampling = tmoe.Sampling(temperature=0.0, max_tokens=8)
    with Live(net, slots=4, max_len=600, budget=128) as live:
        assert not live.reuse
        tickets = [live.submit(ids, sampling) for ids in (short, long, long[:300], short)]
        for ticket, ids in zip(tickets, (short, long, long[:300], short), strict=True):
            (sample,) = ticket.result(timeout=600)
            assert sample.ids.tolist() == greedy(net, ids, 8) and sample.cached == 0


def test_a_cancelled_answer_leaves_no_state(net):
    sampling = tmoe.Sampling(temperature=0.0, max_tokens=500)
    with Live(net, slots=1, max_len=600) as live:
        first = live.submit([3, 4], sampling, n=3)
        live.cancel(first)
        (sample,) = live.submit([3, 4], tmoe.Sampling(temperature=0.0, max_tokens=5)).result(timeout=600)
        assert sample.ids.tolist() == greedy(net, [3, 4], 5)


def test_log_probs_of_prompts(net):
    (prompt,) = prompts_of(30)
    details = Details(prompt_logprobs=True)
    (((sample),),) = tmoe.Engine(net).generate(
        [prompt], sampling=tmoe.Sampling(temperature=0.0, max_tokens=1), details=details
    )
    with torch.no_grad():
        logp = net(torch.tensor([prompt]))[0].log_softmax(-1)
    want = logp[torch.arange(29), torch.tensor(prompt[1:])]
    torch.testing.assert_close(sample.prompt_tops.own, want, rtol=1e-4, atol=1e-4)


def test_scoring_rows_share_no_beginnings(net):
    """eval's rows: sequences with equal beginnings, one after the other, each as if alone."""
    begin, a, b = prompts_of(40, 3, 5)
    sequences = [begin + a, begin + b, begin, a]
    (row,) = rows(sequences, 1000, share=False)
    assert len(row.ids) == sum(map(len, sequences))
    with torch.no_grad():
        turns = all_turns(CFG, 64, torch.device("cpu"))
        h_SD = hidden(net, batch_of(row, torch.device("cpu")), turns, 0)
        for number, places in zip(row.members, row.places, strict=True):
            want, _ = net.hidden(torch.tensor([sequences[number]]))
            torch.testing.assert_close(h_SD[places], want[0], rtol=1e-4, atol=1e-4)


def test_sizes():
    """Per linear layer 4 x 8 x 12 numbers in fp32 and 3 x 80 inputs; keys of one full layer."""
    assert bytes_a_sequence(CFG, torch.bfloat16) == 3 * (4 * 8 * 12 * 4 + 3 * 80 * 2)
    assert bytes_a_token(CFG, torch.bfloat16) == 2 * (16 + 16) * 2


def test_bits_are_refused_by_name(net):
    with pytest.raises(ConfigError, match=r"bits: --model\.linear\.kind=deltanet: single steps"):
        tmoe.Engine(net, bits=True)
