"""Runs in a lab that faults happen to."""
