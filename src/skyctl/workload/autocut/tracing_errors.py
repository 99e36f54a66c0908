"""Why a forward can't be followed."""

from __future__ import annotations

from skyctl.workload.user_code import describe_exception


class CannotFollowError(Exception):
    """A forward does something that can't be cut.

    Attributes:
        reason: what it does.
        line: where.
        scope: the dotted name of the innermost opened module under way; empty for the model itself.
    """

    def __init__(self, reason: str, line: str, scope: str) -> None:
        super().__init__(f"{line}: {reason}")
        self.reason, self.line, self.scope = reason, line, scope


def explain_failed_call(exc: Exception) -> str:
    """The reason why a call on tensors without values failed."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    if isinstance(exc, DynamicOutputShapeException):
        operation = getattr(exc.func, "_opname", exc.func)
        return f"how large a tensor is depends on the values of another ({operation})"
    if isinstance(exc, DataDependentOutputException):
        operation = getattr(exc.func, "_opname", exc.func)
        return f"what it does next depends on the values of a tensor ({operation})"
    return describe_exception(exc)
