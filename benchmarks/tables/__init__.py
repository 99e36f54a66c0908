"""The planner's benchmark: one module a section, each with its instances, its run and its table."""
