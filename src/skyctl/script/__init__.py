"""One rank of a script on a node: its process, its environment, the files that it writes."""
