"""Sweeps: many small runs of a script, packed on the cluster's devices."""
