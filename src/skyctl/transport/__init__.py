"""Tensors between two ranks, as a backend of torch.distributed; or over its own, Gloo."""

BACKEND, GLOO = "skyctl", "gloo"
"""The names of what carries tensors between ranks."""
