"""Makes what stands in ``benchmarks/`` importable as it is when ``benchmarks/planner.py`` runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
