"""Do predictions hold in labs that the model of time was not made in? Does a trial choose the fastest form?

One JSON line a prediction and a lab, and a summary at the end. Needs root (namespaces, cgroups, sshd).

    python benchmarks/predictions.py                    # every lab, about half an hour
    python benchmarks/predictions.py --lab "two sites"  # one of them (may be repeated)
"""

from __future__ import annotations

import argparse
import json

from runs.unseen_labs import LABS, summary, unseen_labs


def main() -> None:
    """Runs the labs asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lab", action="append", choices=list(LABS), help="default: all")
    lines = []
    for line in unseen_labs(parser.parse_args().lab or list(LABS)):
        lines.append(line)
        print(json.dumps({"benchmark": "predictions"} | line), flush=True)
    print(json.dumps({"benchmark": "predictions", "summary": summary(lines)}), flush=True)


if __name__ == "__main__":
    main()
