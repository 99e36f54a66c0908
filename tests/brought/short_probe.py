"""``skyctl``, but its probes take as little time as they can: what they measure matters to no test here."""

import functools

from skyctl.cli.app import main
from skyctl.probe import cluster_probe

if __name__ == "__main__":
    cluster_probe.ProbeOptions = functools.partial(cluster_probe.ProbeOptions, budget_s=0.05)
    main()
