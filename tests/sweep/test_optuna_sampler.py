"""Optuna's sampler, where Optuna is installed; else that it is asked for."""

from __future__ import annotations

import importlib.util

import pytest

from skyctl.errors import InputError
from skyctl.records.script_request import ScriptRequest
from skyctl.records.sweep import SweepRequest, TrialState
from skyctl.sweep.optuna_sampler import OptunaSampler
from skyctl.sweep.parameters import make_space

HAS_OPTUNA = importlib.util.find_spec("optuna") is not None


def request(trials: int = 30) -> SweepRequest:
    return SweepRequest(
        sweep_id="s",
        created="now",
        cluster="c",
        cluster_file="c.yaml",
        script=ScriptRequest(kind="script", words=("t.py",), ranks={"a": 1}),
        files={},
        metric="loss",
        trials=trials,
        space=make_space(["act=a,b"], ["lr=1e-4:1e-2:log", "width=8:64"]),
        optuna=True,
    )


def ended(number: int, parameters: dict[str, str]) -> TrialState:
    """A trial that is best at a rate of 1e-2; one in five fails."""
    failed = number % 5 == 0
    value = None if failed else 1e-2 - float(parameters["lr"])
    return TrialState(
        number=number, parameters=parameters, status="failed" if failed else "done", value=value
    )


@pytest.mark.skipif(HAS_OPTUNA, reason="Optuna is installed here")
def test_without_optuna_it_is_refused() -> None:
    with pytest.raises(InputError, match="not installed") as caught:
        OptunaSampler(request())
    assert "pip install optuna" in str(caught.value)


@pytest.mark.skipif(not HAS_OPTUNA, reason="Optuna is not installed here")
@pytest.mark.filterwarnings("ignore")
def test_its_draws_follow_the_figures_also_of_a_sweep_that_is_resumed() -> None:
    first = OptunaSampler(request())
    trials = []
    for number in range(1, 21):
        trials.append(ended(number, first.ask(number)))
        first.tell(trials[-1])
    resumed = OptunaSampler(request())
    for trial in trials:
        resumed.tell(trial)
    late = [float(resumed.ask(number)["lr"]) for number in range(21, 41)]
    early = [float(trial.parameters["lr"]) for trial in trials[:10]]
    assert sum(late) / len(late) > 1.5 * sum(early) / len(early)
    assert all(1e-4 <= rate <= 1e-2 for rate in late)
