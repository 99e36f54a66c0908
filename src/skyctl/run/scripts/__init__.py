"""Runs of scripts that people have: ``skyctl run``, with torchrun's contract."""
