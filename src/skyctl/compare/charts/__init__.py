"""Pictures of a comparison: one description of each (``chart.py``), drawn as SVG and as PNG."""
