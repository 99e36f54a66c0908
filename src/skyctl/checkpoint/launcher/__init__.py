"""The launcher's work on checkpoints: when to write, who copies them, what to go on from."""
