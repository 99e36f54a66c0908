"""Weights on disk, keyed by layer: readable by any plan."""
