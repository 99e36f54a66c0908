"""State keyed by layer, as files: their layout, copies on other nodes, from which ones a run can go on."""
