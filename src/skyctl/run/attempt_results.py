"""The results of an attempt: its measurement, and what its ranks have left on their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from skyctl.compare.timeline import plan_timeline
from skyctl.experts.step_record import StepRecord
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.records.measurement import Measurement
from skyctl.run.artifacts import gather_weights, write_trace
from skyctl.run.attempt_orders import AttemptOrders
from skyctl.run.attempt_state import AttemptState
from skyctl.run.expert_figures import ExpertFigures, host_loads, read_figures
from skyctl.run.expert_spec import ExpertSetting
from skyctl.run.expert_step import predict_hosted
from skyctl.run.live_run import LiveRun
from skyctl.run.plan_update import observed_slowdowns
from skyctl.run.rank_spec import holding_specs
from skyctl.run.step_history import StepHistory
from skyctl.run.step_metrics import build_measurement, with_differences
from skyctl.schedule.simulation_input import SimulationInput


class AttemptResults:
    """The results of one attempt, as far as its ranks have come."""

    def __init__(self, run: LiveRun, orders: AttemptOrders, state: AttemptState) -> None:
        self._run, self._orders, self._state = run, orders, state

    def measurement(self, weights: str | None = None) -> Measurement:
        """The measurement of this attempt alone.

        Args:
            weights: the path of the trained ones; None: there are none.
        """
        orders, state = self._orders, self._state
        holding = holding_specs(orders.specs)
        return build_measurement(
            self._run.run_id, orders.plan, holding, state.collected, weights, self._simulations
        )

    def of_all_attempts(self, history: StepHistory, *, weights: bool) -> Measurement:
        """The measurement of the whole run.

        Args:
            history: of the run.
            weights: the trained ones are gathered.
        """
        run, plan, number = self._run, self._orders.plan, self._orders.number
        run.callbacks.phase("gathering the trained weights")
        path = None
        if weights:
            path = str(gather_weights(self._state, run.journal.paths, run.sessions))
        if not self._state.has_begun:  # its checkpoint was the last step's
            return history.alone(run.run_id, plan, path, number)
        done = history.of_all(self.measurement(path), number)
        knows_parts = self._orders.experts is None  # else layers take other times than the plan has
        if len(self._simulations) > 1 or plan.problem.rhythm.is_rounds or not knows_parts:
            return done
        return with_differences(self._simulations[0], done)

    def experts(self) -> dict[int, tuple[ExpertFigures, StepRecord]]:
        """By rank with experts on hosts, what it has seen of them."""
        steps, found = self._orders.specs[0].order.steps, {}
        for rank, result in self._state.results.items():
            seen = read_figures(result.experts, self._orders.specs[rank].experts, steps)
            if seen is not None:
                found[rank] = seen
        return found

    def hosted_step_s(self, setting: ExpertSetting | None) -> float | None:
        """The predicted step with what the hosts were sent; None: where experts were is not known here."""
        hosted = self._orders.experts
        if setting is None or hosted is None or not hosted.places.holders:
            return None
        loads = host_loads(self.experts(), hosted.places.devices)
        return predict_hosted(self._orders.plan, setting, hosted.places, loads).iteration_s

    def with_trace(self, done: Measurement) -> Measurement:
        """Fetches and writes the attempt's trace; the measurement with its path (None: that did not work)."""
        run, simulated = self._run, plan_timeline(self._orders.plan, self._simulations)
        trace = write_trace(self._state, run.journal.paths, run.sessions, simulated, run.callbacks)
        return done.model_copy(update={"trace": trace})

    def slowdowns(self) -> dict[str, float]:
        """By device, measured ÷ predicted of its layers' time, as far as can be told."""
        return observed_slowdowns(self._orders.plan, self._state.collected.settled_events())

    @cached_property
    def _simulations(self) -> Sequence[SimulationInput]:
        """By pipeline, what the plan's prediction comes from."""
        return pipeline_simulations(self._orders.plan)
