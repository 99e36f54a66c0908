"""The sections of ``benchmarks/probing.py``."""
