"""What a run does with checkpoints: when to write, where copies go, what to go on from."""
