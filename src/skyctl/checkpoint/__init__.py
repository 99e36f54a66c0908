"""Checkpoints of a run: ``node/`` for nodes and launcher, ``launcher/`` for the launcher alone."""
