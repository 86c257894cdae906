"""The whole road of a model that calls a tool: adapters, rewards, merge, 4 bits, GGUF; served and evaluated.

A Hugging Face folder with Qwen3's template is finetuned on conversations with a tool, then by rewards. The
model is then its adapters, a merged folder, one in int4, and a GGUF file. Each of them is served, and the
openai package gets the tool call. Greedy answers of all programs are equal.

next: tests/serve/test_tools_over_http.py
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import forked
import openai
import pytest
import served
import torch
from chat_tokenizers import chat_tokenizer
from served import typed
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen3MoeConfig

from tmoe.data.chat.encoding import chat_prompt, turn_ends
from tmoe.data.tokenizer import JsonTokenizer, own_files
from tmoe.generate.load import load
from tmoe.generate.sampler import Sampling
from tmoe.log.metrics_file import read_steps

pytestmark = pytest.mark.slow
EAGER = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
READS = "tmoe/"  # of inputs.py: programs are started by their names
ASKED = [dict(role="user", content="Weather in Łódź?")]
PARAMETERS = dict(type="object", properties=dict(city=dict(type="string")), required=["city"])
FUNCTION = dict(name="weather", description="The weather of a city.", parameters=PARAMETERS)
TOOLS = [dict(type="function", function=FUNCTION)]
CALL = dict(type="function", function=dict(name="weather", arguments=dict(city="Łódź")))
CALLS = dict(role="assistant", reasoning_content="I ask.", tool_calls=[CALL])
RESULT = dict(role="tool", content="19 degrees", name="weather")
SAID = "It is 19 degrees."
ANSWERS = dict(role="assistant", reasoning_content="I know.", content=SAID)
PLAIN = "I cannot know."
DECLINES = dict(role="assistant", reasoning_content="No tool.", content=PLAIN)
ROWS = [
    dict(messages=[*ASKED, CALLS], tools=TOOLS),
    dict(messages=[*ASKED, CALLS, RESULT, ANSWERS], tools=TOOLS),
    dict(messages=[*ASKED, DECLINES]),
]
PROMPTS = [dict(prompt=ASKED, tools=TOOLS), dict(prompt=ASKED)]
MOST = 64  # tokens of an answer
KINDS = "adapters", "merged", "int4", "gguf"


class Road(NamedTuple):
    """The folder of the road, and the model in each of its forms."""

    folder: Path
    tokenizer: JsonTokenizer
    models: dict[str, Path]

    def run(self, *words: str) -> str:
        """The output of a program, which must end well."""
        done = forked.run([str(word) for word in words], cwd=self.folder, env=EAGER)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def train(self, out: str, *words: str) -> list[dict]:
        """The log of a run."""
        how = "--train.seq 512 --train.batch 2 --train.dtype fp32 --optim.warmup 0 --log.no-progress".split()
        train = str(forked.ROOT / "train.py")
        data = f"{out}.jsonl"
        how += ["--data.path", data, "--data.val-path", data, "--train.eval-every", "0", "--log.no-report"]
        self.run(train, "--init", "base", "--out", out, *how, *words)
        return [line for _, line in read_steps(self.folder / out / "metrics.jsonl")]

    def prompts(self) -> list[list[int]]:
        return [chat_prompt(ASKED, self.tokenizer, tools=row.get("tools")).tolist() for row in PROMPTS]


def save_base(folder: Path) -> JsonTokenizer:
    """Saves a random Qwen3-MoE, and a tokenizer whose merges make the prompt short."""
    first = chat_tokenizer("qwen3")
    prompt = first.decode(chat_prompt(ASKED, first, tools=TOOLS))
    tokenizer = chat_tokenizer("qwen3", merges=300, text=prompt + json.dumps(CALL, ensure_ascii=False))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.vocab,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=128,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # adapters leave embedding and head as they are, so logits must have room
        for name, p in model.named_parameters():
            std = dict(lm_head=0.4, embed_tokens=1.0).get(name.split(".")[-2], p.shape[-1] ** -0.5)
            if p.dim() > 1:
                p.normal_(0, std)
    model.save_pretrained(folder)
    for name, content in own_files(tokenizer).items():
        (folder / name).write_bytes(content)
    return tokenizer


@pytest.fixture(scope="module")
def road(tmp_path_factory) -> Road:
    folder = tmp_path_factory.mktemp("road")
    forms = dict(adapters="rl", merged="merged", int4="int4", gguf="from-gguf")
    road = Road(folder, save_base(folder / "base"), {kind: folder / name for kind, name in forms.items()})
    for name, rows in dict(sft=ROWS, rl=PROMPTS).items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows * 4)
        (folder / f"{name}.jsonl").write_text(text)

    words = "--task sft --lora.rank 16 --steps 50 --optim.lr 1e-2"
    losses = [line["loss"] for line in road.train("sft", *words.split())]
    assert losses[-1] < 0.05, losses
    # at this temperature some answers are wrong, so their rewards have a gradient
    words = "--task grpo --lora.init sft --steps 2 --optim.lr 1e-4 --grpo.prompts 4 --grpo.group 4"
    words += f" --grpo.max-tokens {MOST} --grpo.temperature 2.5 --grpo.rewards regex(<tool_call>)"
    steps = road.train("rl", *words.split())
    assert all(0 < step["reward/mean"] < 1 for step in steps), steps
    assert max(step["grad_norm"] for step in steps) > 0

    road.run("-m", "tmoe.hf", "merge", "rl", "merged")
    road.run("-m", "tmoe.hf", "merge", "rl", "int4", "--quantize", "int4")
    road.run("-m", "tmoe.hf", "import", "merged", "step")
    road.run("-m", "tmoe.hf", "gguf", "step", "q8.gguf", "--type", "q8_0")
    road.run("-m", "tmoe.hf", "import", "q8.gguf", "from-gguf")
    return road


@pytest.fixture(scope="module")
def texts(road) -> list[str]:
    """The greedy answers of `tmoe generate` with the merged model, to which all others must be equal."""
    found = generated(road, "merged")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>' in found[0]
    assert found[1].endswith(PLAIN)
    return found


def generated(road: Road, kind: str) -> list[str]:
    rows = [dict(messages=row["prompt"]) | row for row in PROMPTS]
    (road.folder / "ask.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"--file ask.jsonl --temperature 0 --max-tokens {MOST} --out {kind}.answers.jsonl".split()
    road.run("-m", "tmoe.generate", road.models[kind], *words)
    lines = (road.folder / f"{kind}.answers.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_the_client_gets_the_tool_call(road, texts, kind):
    """Streamed and not; the tool's result is answered; the served tokens are those of the loaded model."""
    with (
        served.server(road.models[kind], road.folder / f"{kind}.log", name="road", max_len=512) as found,
        openai.OpenAI(base_url=f"http://127.0.0.1:{found.port}/v1", api_key="x", max_retries=0) as client,
    ):
        says = client.models.retrieve("road").to_dict()["tmoe"]
        assert (says["tool_calls"], says["reasoning"]) == ("hermes", True)
        asked = dict(model="road", messages=ASKED, temperature=0, max_tokens=MOST)
        choice = typed(client.chat.completions.create(**asked, tools=TOOLS, logprobs=True)).choices[0]
        message = choice.message
        assert choice.finish_reason == "tool_calls" and message.reasoning_content == "I ask."
        assert json.loads(message.tool_calls[0].function.arguments) == dict(city="Łódź")
        end = road.tokenizer.eos_text
        raw = b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode()
        assert raw == texts[0] + end
        with client.chat.completions.stream(**asked, tools=TOOLS) as events:
            streamed = events.get_final_completion().choices[0]
        assert streamed.message.tool_calls[0].function.name == "weather"
        assert streamed.message.tool_calls[0].function.arguments == message.tool_calls[0].function.arguments
        turns = [*ASKED, message.model_dump(exclude_none=True), RESULT]
        after = client.chat.completions.create(**asked | dict(messages=turns), tools=TOOLS)
        assert after.choices[0].message.content == SAID
        assert client.chat.completions.create(**asked).choices[0].message.content == PLAIN
    loaded = load(road.models[kind], device="cpu")
    how = Sampling(temperature=0, max_tokens=MOST, stop_ids=turn_ends(loaded.tokenizer))
    samples = loaded.engine().generate(road.prompts(), 1, how)
    assert [sample.text for (sample,) in samples] == texts


def test_transformers_and_the_command_give_the_same_answers(road, texts):
    """The merged folder, and the one in int4, which compressed-tensors reads."""
    assert generated(road, "int4") == texts
    for kind, more in (
        ("merged", {}),
        ("int4", dict(quantization_config=CompressedTensorsConfig(dequantize=True))),
    ):
        model = AutoModelForCausalLM.from_pretrained(road.models[kind], dtype=torch.float32, **more)
        for prompt, text in zip(road.prompts(), texts, strict=True):
            made = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=MOST)
            assert road.tokenizer.decode(made[0, len(prompt) :]) == text + road.tokenizer.eos_text


def test_the_evaluation_of_the_same_model(road, texts):
    """pass@1 by the reward of training, on its prompts, and the perplexity of a text."""
    (road.folder / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (road.folder / "text.txt").write_text(texts[0])
    words = ["--pass-at", "1", "--rewards", "regex(<tool_call>)", "--file", "two.jsonl", "--temperature", "0"]
    words += ["--max-tokens", str(MOST), "--text", "text.txt", "--out", "eval.json"]
    road.run("-m", "tmoe.eval", "merged", *words)
    found = json.loads((road.folder / "eval.json").read_text())
    assert found["pass_at"]["pass@1"] == 0.5 and found["text"]
    lines = (road.folder / "eval.samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == texts
