"""The dry run of a task: the steps that --epochs and the data give, then what each rank will hold.

next: commands/dry_run.py
"""

from tmoe.cli.defaults import plan_of, samples_a_step, with_length
from tmoe.cli.parse import planned_world
from tmoe.config.axes import Axes
from tmoe.config.run import Config
from tmoe.hf.tokenizer_files import carried_by_start
from tmoe.post.tasks import task_of
from tmoe.run.process import one_error


def plan(cfg: Config) -> None:
    """Prints the dry run. The data is read only if the number of steps follows from it (--epochs)."""
    from tmoe.commands.dry_run import dry_run, fake_world  # imported here, because no real run needs it

    axes = Axes.of(cfg.parallel, planned_world(cfg, 1))
    a_step = samples_a_step(cfg, axes.readers)
    samples, trained = 0, 0.0
    if cfg.epochs is not None:
        with one_error(), fake_world(cfg, axes, 0) as mesh:
            data = task_of(cfg, mesh).open("train", carried_by_start(cfg))
            samples, trained = data.samples, data.trained_a_sample()
            cfg = with_length(cfg, samples, a_step)
    dry_run(cfg, plan_of(cfg, a_step, samples, trained))
