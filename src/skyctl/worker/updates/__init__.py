"""When weights are updated and by what: each step, one late, by a parameter server."""
