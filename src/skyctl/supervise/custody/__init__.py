"""Who has a run in charge: what is written down of it, handing over, taking over, and what others ask."""
