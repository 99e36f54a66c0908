"""Who supervises a run: its lock, its journal, handing over, taking over and ending it."""
