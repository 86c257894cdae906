"""The commands besides training: report, rollouts, routing, warmup and the dry run."""
