"""Which device holds which expert of a mixture: the search, its bound, and moves when the load drifts."""
