"""Optuna's sampler draws a sweep's trials, where Optuna is installed. Placement stays the sweep's own."""

from __future__ import annotations

from typing import Any

from skyctl.errors import InputError
from skyctl.records.sweep import Choice, Range, SweepRequest, TrialState
from skyctl.sweep.parameters import Parameters, format_value


class OptunaSampler:
    """A study in memory, made anew from the trials that ended when a sweep is resumed.

    Raises:
        InputError: Optuna is not installed.
    """

    def __init__(self, request: SweepRequest) -> None:
        try:
            import optuna  # type: ignore[import-not-found, unused-ignore]
        except ImportError as exc:
            raise InputError(
                f"--optuna needs Optuna, which is not installed here ({exc})",
                hint="pip install optuna; or leave --optuna out: draws are then independent",
            ) from exc
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self._space = request.space
        self._distributions = {name: self._distribution(space) for name, space in request.space.items()}
        # Trials that run count as bad ones meanwhile, so that those at once are not alike.
        sampler = optuna.samplers.TPESampler(seed=request.seed, constant_liar=True)
        direction = "minimize" if request.mode == "min" else "maximize"
        self._study: Any = optuna.create_study(direction=direction, sampler=sampler)
        self._asked: dict[int, Any] = {}

    def ask(self, number: int) -> Parameters:
        """The parameters of the trial with that number."""
        asked = self._asked[number] = self._study.ask(self._distributions)
        return {name: format_value(asked.params[name]) for name in self._space}

    def tell(self, trial: TrialState) -> None:
        """A trial has ended."""
        states = self._optuna.trial.TrialState
        has_value = trial.status == "done" and trial.value is not None
        state = states.COMPLETE if has_value else states.PRUNED if trial.status == "stopped" else states.FAIL
        value = trial.value if has_value else None
        if (asked := self._asked.pop(trial.number, None)) is not None:
            self._study.tell(asked, value, state=state)
            return
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=state,
                value=value,
                params={name: self._read(name, text) for name, text in trial.parameters.items()},
                distributions=self._distributions,
            )
        )

    def _distribution(self, space: Choice | Range) -> Any:
        of = self._optuna.distributions
        if isinstance(space, Choice):
            return of.CategoricalDistribution(space.values)
        if space.whole:
            return of.IntDistribution(int(space.low), int(space.high), log=space.log)
        return of.FloatDistribution(space.low, space.high, log=space.log)

    def _read(self, name: str, text: str) -> str | int | float:
        """A parameter as the study knows it; six digits may lie just outside of its range."""
        space = self._space[name]
        if isinstance(space, Choice):
            return text
        return int(text) if space.whole else min(max(float(text), space.low), space.high)
