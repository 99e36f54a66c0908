"""The sections of ``benchmarks/runtime.py``, one file each. They share fault injection with ``tests/``."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)
