"""The supervisor of a run: its lock, its journal, handing over, taking over and ending it."""
