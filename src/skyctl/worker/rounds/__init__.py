"""Rounds: local steps, then an average of weights, and what an outer optimizer makes of it."""
