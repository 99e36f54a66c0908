"""The plan that options ask for: its parallelism, schedule and backend."""
