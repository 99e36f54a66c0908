"""The knowledge of a cluster: a profile's problem, and what runs have shown since it was measured."""
