"""Models as layers, their batches and their costs. Nodes use it: the standard library and torch only."""
