"""Pictures of a comparison: one description of each (``chart.py``), drawn in the report and as files."""
