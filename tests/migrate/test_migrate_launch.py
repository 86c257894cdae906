"""Launchers, wrappers and variables in front of another framework's flags, and the processes they name."""

import shlex

import pytest

from tmoe.extras.migrate.frameworks import translate
from tmoe.extras.migrate.launchers import read

HELLO, SFT, GPT = "tutel.examples.helloworld", "tuning.sft_trainer", "pretrain_gpt.py"
RUN, LOCAL = "python3 -m torch.distributed.run", "LOCAL_SIZE=8 python3 -m tutel.launcher.run"
# command, program, processes, processes on a node; by hand, from the launchers' own pages
LINES = [
    (f"python3 -m {HELLO} --x", HELLO, None, None),
    (f"{RUN} --nproc_per_node=2 -m {HELLO} --x", HELLO, 2, 2),
    (f"{RUN} --nproc_per_node=8 --nnodes=2 --node_rank=0 -m {HELLO} --x", HELLO, 16, 8),
    (f"torchrun -m --nproc-per-node 2 --master_addr 10.0.0.1 {HELLO} --x", HELLO, 2, 2),
    (f"ssh node0 /usr/bin/{RUN} --nproc_per_node=8 -m {HELLO} --x", HELLO, 8, 8),
    (f"mpiexec -bind-to none -host localhost -x {LOCAL} -m {HELLO} --x", HELLO, 8, 8),
    (f"mpiexec -host a,b -x MASTER_ADDR=a -x {LOCAL} -m {HELLO} --x", HELLO, 16, 8),
    (f"mpirun -np 16 --hostfile hosts --allow-run-as-root python -m {HELLO} --x", HELLO, 16, None),
    (f"mpirun --host a:4,b:4 python -m {HELLO} --x", HELLO, 8, None),
    (f"mpiexec -n 8 -ppn 4 -genv A 1 python -m {HELLO} --x", HELLO, 8, 4),
    ("accelerate launch --config_file none.yaml --num_processes=8 tuning/a.py --x", "tuning/a.py", 8, 8),
    ("accelerate launch --use_fsdp --num_machines 2 --num_processes 16 -m tuning.sft_trainer --x",
     SFT, 16, 8),
    ("python -m accelerate.commands.launch -n 4 -m tuning.sft_trainer --x", SFT, 4, 4),
    ("deepspeed --num_gpus=8 --num_nodes 2 pretrain_gpt.py --x", GPT, 16, 8),
    ("deepspeed --include localhost:0,1,3 --module tuning.sft_trainer --x", SFT, 3, None),
    ("srun -N2 --ntasks-per-node=8 python -u pretrain_gpt.py --x", GPT, 16, 8),
    (f"srun -m block:block -N 2 -n 2 torchrun --nproc-per-node 8 --nnodes 2 {GPT} --x", GPT, 16, 8),
    ("jsrun -n 4 -a 6 -g 6 python pretrain_gpt.py --x", GPT, 24, 6),
    ("bash -c 'torchrun --nproc_per_node 4 pretrain_gpt.py --x'", GPT, 4, 4),
    (f"docker run --gpus all -e A=1 image torchrun --nproc_per_node 4 {GPT} --x", GPT, 4, 4),
    ("torchrun --nproc-per-node gpu pretrain_gpt.py --x", GPT, None, None),
    ("torchrun --nnodes 1:4 --nproc-per-node 8 pretrain_gpt.py --x", GPT, None, 8),
    ("WORLD_SIZE=4 python pretrain_gpt.py --x", GPT, 4, None),
    ("cd a && export B=1; torchrun --nproc_per_node 4 pretrain_gpt.py --x 2>&1 | tee log", GPT, 4, 4),
    ("nohup torchrun \\\n --nproc_per_node 4 pretrain_gpt.py \\\n --x > log &", GPT, 4, 4),
    (f"srun -N 2 -n 16 --container-image=a bash -c 'cd a && python {GPT} --x'", GPT, 16, None),
    (f"srun -n 4 bash -lc 'export A=1; python -u {GPT} --x 2>&1 | tee log'", GPT, 4, None),
    (f"'#!/bin/bash\n# of two\nexport A=1\ntorchrun \\\r\n --nproc_per_node 4 \\\n {GPT} --x\n'", GPT, 4, 4),
    (f"sbatch --nodes 2 --wrap 'srun -n 16 python {GPT} --x'", GPT, 16, None),
    (f"sbatch --wrap='torchrun --nproc_per_node 4 {GPT} --x'", GPT, 4, 4),
    ("--x", "", None, None),
]  # fmt: skip


@pytest.mark.parametrize(("line", "program", "world", "each"), LINES)
def test_front(line, program, world, each):
    found = read(shlex.split(line), {})
    assert (found.words, found.program, found.world, found.each) == (["--x"], program, world, each)


def test_arguments_of_a_layer_are_no_variables():
    words = ["gate_type=top", "--x=1"]
    assert read(words, {}).words == words


def test_processes_of_accelerates_file(tmp_path):
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\nnum_machines: 1\nnum_processes: 4\n")
    assert read(["accelerate", "launch", "--config_file", str(tmp_path / "a.yaml"), "s.py"], {}).world == 4


@pytest.mark.parametrize(
    "front",
    [
        "TUTEL_GLOBAL_TIMEOUT_SEC=60 python3",
        "env A=1 TUTEL_GLOBAL_TIMEOUT_SEC=60 numactl --membind=0 python3",
        "mpiexec -n 2 -x A=1 -x TUTEL_GLOBAL_TIMEOUT_SEC=60 python3",
        "mpiexec -n 2 -x HANDED_ON python3",
        "mpiexec -genv TUTEL_GLOBAL_TIMEOUT_SEC 60 -n 2 python3",
        "srun -n 2 --export=ALL,TUTEL_GLOBAL_TIMEOUT_SEC=60 python3",
        "mpiexec -n 2 --genv TUTEL_GLOBAL_TIMEOUT_SEC=60 python3",
        "srun -n 2 env TUTEL_GLOBAL_TIMEOUT_SEC=60 python3",
        "python3",
    ],
)
def test_tutels_timeout(front, monkeypatch):
    """By whatever way Tutel would see it, in front or in the environment, it is tmoe's own."""
    if front == "python3" or "HANDED_ON" in front:
        monkeypatch.setenv("TUTEL_GLOBAL_TIMEOUT_SEC", "60")
        front = front.replace("HANDED_ON", "TUTEL_GLOBAL_TIMEOUT_SEC")
    out = translate("tutel", f"{front} -m {HELLO} --batch_size=16".split())
    assert out.flags["--train.collective-timeout"] == ["60"] and not out.refused


def test_a_launcher_names_the_world():
    """Two local experts on each of 16 processes are 32 experts over ep 16; --world overrides the launcher."""
    words = f"{RUN} --nproc_per_node=4 --nnodes=4 -m {HELLO} --num_local_experts=2"
    out = translate("tutel", words.split())
    assert (out.flags["--model.moe.experts"], out.flags["--parallel.ep"]) == (["32"], ["16"])
    assert out.command().startswith("torchrun --nnodes 4 --nproc-per-node 4 train.py tiny ")
    other = translate("tutel", words.split(), 8)
    assert other.flags["--parallel.ep"] == ["8"]
    assert "--world=8: is used; the launcher in the command starts 16" in other.notes


def test_variables_that_are_left_out_are_named():
    out = translate("tutel", f"CUDA_VISIBLE_DEVICES=0,1 MASTER_PORT=1 python -m {HELLO}".split())
    assert any(note.startswith("CUDA_VISIBLE_DEVICES=0,1: variables") for note in out.notes)


def test_a_variable_of_the_environment_is_no_note(monkeypatch):
    """`-x PATH` hands on what every process of tmoe has as well."""
    words = f"mpirun -np 2 -x PATH -x A=1 python -m {HELLO}".split()
    notes = [note for note in translate("tutel", words).notes if "variables" in note]
    assert notes == ["A=1: variables are left out; set those that are still needed before this command"]


def test_a_shells_list_is_named_as_such():
    (refused,) = translate("tutel", f"torchrun -m {HELLO} ${{ARGS[@]}}".split()).refused
    assert refused == "${ARGS[@]}: a shell's variable: write out the flags that it holds"


@pytest.mark.parametrize(
    "module", ["helloworld_deepspeed", "moe_mnist", "nccl_all_to_all_v", "helloworld_megatron"]
)
def test_other_programs_are_refused_by_name(module):
    (refused,) = translate("tutel", ["python3", "-m", f"tutel.examples.{module}"]).refused
    assert refused.startswith(f"tutel.examples.{module}: ")
