"""The planner's results, recorded and compared: ``benchmarks/planner_record.py``."""
