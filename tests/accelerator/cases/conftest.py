"""The worker's fixtures: processes that play ranks, which have the toy accelerator as this one has."""

from tests.worker.conftest import driver, pool, workload

__all__ = ["driver", "pool", "workload"]
