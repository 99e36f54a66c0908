"""What the launcher does with checkpoints: when to write, who copies them, what to go on from."""
