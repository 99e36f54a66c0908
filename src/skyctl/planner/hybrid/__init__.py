"""Several pipelines side by side, each with cuts of its own; gradients are summed by groups of layers."""
