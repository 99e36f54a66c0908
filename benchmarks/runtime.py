"""The runtime: is a step as short as devices and links allow, and does the prediction hold?

Prints one JSON line a case. Needs root (network namespaces, cgroups, sshd) but for ``published``.

    make bench-runtime                               # everything, half an hour or more
    make bench-runtime ARGS="--only sleeping"        # one section; also: unequal, prediction, published,
                                                     # data, data-prediction (both also: --case gpt)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

from runs.data import CASES as DATA_CASES
from runs.data import data
from runs.data_prediction import CASES as PREDICTION_CASES
from runs.data_prediction import data_prediction
from runs.prediction import prediction
from runs.published import published
from runs.sleeping import sleeping
from runs.unequal import unequal

SECTIONS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "sleeping": sleeping,
    "published": published,
    "unequal": unequal,
    "prediction": prediction,
}
"""Those that run where none is named; others take long, and run where they are named."""


def main() -> None:
    """Runs the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sections = [*SECTIONS, "data", "data-prediction"]
    parser.add_argument("--only", action="append", choices=sections, help="this section (may be repeated)")
    cases = [*DATA_CASES, *PREDICTION_CASES]
    parser.add_argument("--case", action="append", choices=cases, help="of data and data-prediction")
    given = parser.parse_args()
    measured = SECTIONS | {
        "data": lambda: data(given.case or DATA_CASES),
        "data-prediction": lambda: data_prediction(given.case or tuple(PREDICTION_CASES)),
    }
    for name, section in measured.items():
        if name in (given.only or SECTIONS):
            for line in section():
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
