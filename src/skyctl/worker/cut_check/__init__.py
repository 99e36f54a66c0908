"""Trains a workload twice for two steps: the user's own objects in plain torch, and the layers it is cut into."""
