"""Tasks, which turn the arguments of a call into a plan."""
