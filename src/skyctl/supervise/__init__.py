"""Runs that survive: attempts, and who has a run in charge."""
