"""One stage of a pipeline: its forwards and backwards, and what it sends to its neighbours."""
