"""Jobs that share a device by turns: who is next, what each has used, and the process that says so."""
