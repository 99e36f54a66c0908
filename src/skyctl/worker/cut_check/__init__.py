"""Trains a workload for two steps, twice: the user's own objects in plain torch, and its layers as stages."""
