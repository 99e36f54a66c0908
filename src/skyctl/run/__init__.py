"""One run of a plan: started on the nodes, watched, and planned again when a node is lost."""
