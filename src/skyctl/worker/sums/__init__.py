"""Sums over several ranks along the plan's routes: of gradients, of weights, of norms' statistics."""
