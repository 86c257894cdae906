"""Every setting of a run, the checks that need no process group, and the presets."""
