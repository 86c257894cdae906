"""Commands of their own: report, rollouts, routing, warmup and the dry run."""
