"""Tasks: what a run trains for, and the data, counts and facts that go with it.

next: post/task.py
"""

from tmoe.config.run import Config
from tmoe.parallel.mesh import Mesh
from tmoe.post.grpo import Grpo
from tmoe.post.preference import Preference
from tmoe.post.sft import Sft
from tmoe.post.task import Task

TASKS: dict[str, type[Task]] = dict(pretrain=Task, sft=Sft, preference=Preference, grpo=Grpo)


def task_of(cfg: Config, mesh: Mesh) -> Task:
    """That of --task."""
    return TASKS[cfg.task](cfg, mesh)
