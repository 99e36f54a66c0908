"""A run as a row of attempts: what ended one, what the next goes on from, and where."""
