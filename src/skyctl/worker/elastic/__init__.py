"""A step that survives the ranks that leave in it: who is still there, and whether its sum takes effect."""
