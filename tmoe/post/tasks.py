"""The tasks by name, and the task of a run.

next: post/task.py
"""

from tmoe.config.run import Config
from tmoe.parallel.mesh import Mesh
from tmoe.post.grpo import Grpo
from tmoe.post.kto import Kto
from tmoe.post.losses import LOSSES
from tmoe.post.preference import Preference
from tmoe.post.sft import Sft
from tmoe.post.task import Task

TASKS: dict[str, type[Task]] = dict(pretrain=Task, sft=Sft, preference=Preference, grpo=Grpo)


def task_of(cfg: Config, mesh: Mesh) -> Task:
    """The task that --task names."""
    single = cfg.task == "preference" and LOSSES[cfg.preference.loss].of == "completions"
    return (Kto if single else TASKS[cfg.task])(cfg, mesh)
