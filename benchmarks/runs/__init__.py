"""What ``benchmarks/runtime.py`` runs, one file a section. They share fault injection with ``tests/``."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)
