"""Preflight of every node and pair; ``node.py`` is the part that runs on the nodes."""
