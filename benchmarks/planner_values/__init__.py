"""What the planner finds, recorded and compared: ``benchmarks/planner_record.py``."""
