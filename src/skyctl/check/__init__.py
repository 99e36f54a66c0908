"""Preflight of every node and pair; ``check_task.py`` is the part that runs on the nodes."""
