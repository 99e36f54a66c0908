"""What ``benchmarks/runtime.py`` runs, one file a section."""
