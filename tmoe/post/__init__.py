"""Tasks: what a run trains for, with its data, its counts and the facts that it reports.

next: post/tasks.py
"""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.post.task import Task
    from tmoe.post.tasks import TASKS, task_of

__all__ = ["TASKS", "Task", "task_of"]

__getattr__, __dir__ = lazy(
    __name__,
    {"TASKS": "tmoe.post.tasks", "Task": "tmoe.post.task", "task_of": "tmoe.post.tasks"},
)
