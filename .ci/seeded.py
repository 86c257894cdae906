"""Plants faults in a copy of the repository and checks that CI's selection runs the tests that catch them.

    .venv/bin/python .ci/seeded.py [WORD ...]      # only faults whose file contains a WORD; default: all

Every test file of the copy has a record of a green run. A fault is one replaced text. The test that catches
the fault is run without selection; it must fail, and its file must be among the selected files.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/lib"))

import green  # noqa: E402

# (file, its text, the fault that replaces it, a test that catches the fault; a prefix of test names is
# enough)
SCHEDULE, WARMUP = "parallel/test_schedule.py", "optim/test_optim.py::test_warmup"
SPLIT = "ops/test_router_product.py::test_the_kernel"
FAULTS = [
    ("tmoe/moe/router.py", "weights_TK * self.cfg.scaling", "weights_TK", "moe/test_router.py"),
    ("tmoe/ops/router/product.py", "x - hi.to(tl.float32)", "x", SPLIT),
    ("tmoe/parallel/pipeline_schedule.py", "chunk + 1 < count", "chunk + 2 < count", SCHEDULE),
    ("tmoe/optim/learning_rate.py", "(step + 1) / warmup", "step / warmup", WARMUP),
    ("tmoe/data/chat/packing.py", "self.order[low + at]", "self.order[low]", "data/test_packing.py"),
    ("tmoe/checkpoint/manifest.py", "filled != volume", "False", "checkpoint/test_checkpoint.py"),
    ("tmoe/hf/architectures/mixtral.py", "theta=1e6", "theta=1e5", "hf/test_hf_fields.py::test_every_key"),
    ("tmoe/post/losses/sequences.py", "logp_N / tokens", "logp_N", "post/test_losses.py::test_gspo"),
    ("tmoe/generate/sampler.py", "value <= 1", "value <= 2", "generate/test_sampler.py::test_settings"),
    ("tmoe/extras/migrate/tutel.py", '"--model.dim"', '"--dim"', "migrate/test_migrate.py::test_the_page"),
    ("tmoe/model/rope.py", "keep * freq", "freq", "model/test_model.py::test_logits"),
    ("tmoe/extras/upcycle.py", "for name in want.keys()", "for name in ()", "hf/test_upcycle.py::test_sour"),
    ("tmoe/parallel/launcher.py", '"LOCAL_RANK"', '"LOCAL_RANKS"', "parallel/test_launcher.py::test_the_w"),
    ("tmoe/post/rewards/number.py", "is not None", "is None", "post/test_graders.py::test_numbers"),
    ("tmoe/log/metrics_file.py", "json.loads(text)", "{}", "run/test_report.py::test_load"),
    ("tmoe/commands/report.py", "def main", "def start", "test_tmoe_command.py::test_each_command"),
    ("train.py", "clip_grad_norm_(", "clip_grad_norm(", "test_house.py::test_the_step"),
    ("README.md", "torch 2.11", "torch 2.10", "test_stack.py::test_readme"),
    ("CONTRIBUTING.md", "layers=ALL_MOE", "layers=NO_MOE", "hf/test_architectures.py::test_contributing"),
    ("docs/settings.md", "steps = 2000", "stepps = 2000", "run/test_settings.py::test_the_file"),
    ("docs/migrate.md", "--model.dim", "--model.dims", "migrate/test_migrate.py::test_the_page"),
    ("pyproject.toml", '["**/*.json"]', '["**/*.none"]', "test_wheel.py::test_every_file"),
    ("tmoe/model/h200.json", "700e12", "900e12", "benchmarks/cost/test_points.py::test_every"),
    ("examples/digit_sums.py", "def main", "def other", "end_to_end/test_digit_sums.py"),
    ("tests/data/templates/chatml.jinja", "<|im_end|>", "<|im_stop|>", "data/test_chat_masks.py::test_g"),
    ("tests/lib/corpora.py", "def data", "def date", "data/test_data.py::test"),
]  # fmt: skip


def main() -> None:
    words = sys.argv[1:]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="tmoe-seeded-") as folder:
        copy = Path(folder) / "tmoe"
        names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
        for name in names:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        record = copy / "green.json"
        clean = green.Selection(copy, record, "here")
        clean.keep(dict.fromkeys(clean.tests, 1.0), clean.tests, {})
        for path, text, fault, catcher in FAULTS:
            if words and not any(word in path for word in words):
                continue
            before = (copy / path).read_text()
            assert text in before, f"{path} has no {text}"
            (copy / path).write_text(before.replace(text, fault))
            selected = green.Selection(copy, record, "here").chosen()
            caught = fails(copy, f"tests/{catcher}")
            found = f"tests/{catcher}".partition("::")[0] in selected
            (copy / path).write_text(before)
            missed += not (caught and found)
            verdict = "MISSED" if not found else "caught" if caught else "THE TEST PASSES"
            print(f"{verdict}  {path}: {len(selected)} of {len(clean.tests)} run; {catcher}", flush=True)
    raise SystemExit(min(missed, 1))


def fails(copy: Path, test: str) -> bool:
    """Whether a test fails. test: a file, or FILE::PREFIX for the tests whose name begins with PREFIX."""
    file, _, name = test.partition("::")
    words = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu", file, "-k", name]
    command = [sys.executable, "-m", "pytest", *words]
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=copy, env=env, capture_output=True).returncode not in (0, 5)


if __name__ == "__main__":
    main()
