"""The installed command `tmoe train|generate|hf|checkpoint|... WORDS`; `python -m tmoe` is the same.

    tmoe train tiny --steps 20                                       train.py of this folder
    torchrun --nproc-per-node 2 -m tmoe train tiny --parallel.ep 2   on two processes
    tmoe hf export STEP DIR                                          python -m tmoe.hf export STEP DIR

next: train.py
"""

import os
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

from tmoe.front import end

# Each command, and a description of it.
MODULES = {
    "checkpoint": "shows, verifies, reshards and averages step folders",
    "data": "turns text into token shards, and shows chat rows as they are trained on",
    "eval": "scores a model: lm_eval's tasks, perplexity of texts, pass@k by rewards",
    "generate": "continues a text, answers in a chat, or works through a file of prompts",
    "hf": "imports and exports Hugging Face folders and GGUF files",
    "migrate": "turns a command of Megatron-LM, Tutel or fms-acceleration into one of tmoe",
    "report": "draws a run's report.png from its metrics",
    "rollouts": "shows the answers of a run with --task grpo",
    "routing": "draws and compares how evenly the experts of runs are used",
    "serve": "answers over HTTP as OpenAI does",
    "upcycle": "makes a Mixture-of-Experts model of a dense one",
    "warmup": "compiles the kernels of presets beforehand",
}
TRAIN = "trains, finetunes and evaluates: train.py of this folder"


def main() -> None:
    """Runs the command that the first word names, in this process, with the words that follow."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in MODULES:
        sys.argv = sys.argv[1:]
        runpy.run_module(f"tmoe.{name}", run_name="__main__", alter_sys=True)
        return
    if name == "train":
        train()
    usage = f"usage: tmoe {{{','.join(('train', *MODULES))}}} ...  (each has --help)"
    if name in ("", "-h", "--help"):
        lines = [f"  tmoe {command:<11} {does}" for command, does in (("train", TRAIN), *MODULES.items())]
        print("\n".join([usage, "", *lines]))
        sys.exit(0 if name else 2)
    near = get_close_matches(name, ("train", *MODULES), 1)
    hint = f"did you mean tmoe {near[0]}?" if near else f"valid: {', '.join(('train', *MODULES))}"
    end(f"tmoe {name}: no such command; {hint}")


def train() -> None:
    """Becomes `python train.py` of the current folder, or ends with a message that says where the file is."""
    entry = Path("train.py")
    try:
        ours = "from tmoe" in entry.read_text()
    except (OSError, ValueError):
        ours = False
    if not ours and {"-h", "--help", "--help-all"} & set(sys.argv[2:]):
        from tmoe.cli.parse import parse  # takes 1 s, and no other command needs it

        parse(sys.argv[2:], "")
    if not ours:
        where = "it is a file of tmoe's checkout, to read and to change: go there, or copy it here"
        end(f"tmoe train: no train.py of tmoe in {Path.cwd()}; {where}")
    os.execv(sys.executable, [sys.executable, str(entry), *sys.argv[2:]])


if __name__ == "__main__":
    main()
