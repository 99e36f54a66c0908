"""Mixtures of experts: the layer, and who answers in each step."""
