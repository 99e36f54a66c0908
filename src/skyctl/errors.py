"""Every error skyctl raises on purpose, and the exit code each one ends a command with.

::

    SkyctlError                1   the work failed, or a check did not hold
    ├── RunError               1   a rank failed while a run was going
    ├── UndecidedError         1   nothing found in time, and nothing proved either
    ├── InputError             2   bad usage or bad input
    │   ├── InventoryError     2   cluster.yaml or lab.yaml
    │   ├── RecordError        2   a JSON file of ours that can't be read
    │   │   └── InvalidRecordError 2   a record's fields are wrong (a ValueError, too)
    │   └── WorkloadError      2   the model, the data, or their options
    ├── InfeasibleError        3   proved that no plan fits
    ├── NodeError              4   a node was unreachable, refused or unfit
    │   ├── UnreachableError   4   no connection (name, route, port, time-out)
    │   ├── HostKeyError       4   the host's key is unknown or has changed
    │   ├── LoginError         4   connected, but not let in
    │   ├── UnfitError         4   let in, but something it needs is missing there
    │   │   ├── PythonTooOldError   4   its Python is older than skyctl needs
    │   │   └── UnsupportedDtypeError   4   its processor can't compute in that dtype
    │   ├── SessionGoneError   4   the node has ended the session, or another launcher has it
    │   └── ProtocolError      4   what the node sent is nothing that skyctl would send there
    └── MismatchError          5   plan and cluster do not match

Ctrl-C is KeyboardInterrupt, and ends a command with 130.

A message names the thing, what it needs and what it has; ``hint`` says what to do next; ``log`` is the path
of the full log where there is one. This module imports nothing: nodes use it too.
"""

from __future__ import annotations


class SkyctlError(Exception):
    """Root of the tree.

    Args:
        message: one or two sentences, for a person.
        hint: what to do next, or None.
        log: path of the full log, or None.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, log: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log

    def __str__(self) -> str:
        """The message, then the hint and the log on lines of their own."""
        lines = [self.message]
        if self.hint:
            lines.append(f"  next: {self.hint}")
        if self.log:
            lines.append(f"  log:  {self.log}")
        return "\n".join(lines)


class RunError(SkyctlError):
    """A rank failed while a run was going; the message names rank, device and node."""


class UndecidedError(SkyctlError):
    """Nothing was found in the time given, and nothing was proved either."""


class InputError(SkyctlError):
    """Wrong usage of a command, or input that can't be used."""

    exit_code = 2


class InventoryError(InputError):
    """cluster.yaml or lab.yaml is wrong; the message names file and line."""


class RecordError(InputError):
    """A JSON file of ours can't be read: malformed, of another kind, or of a newer version."""


class InvalidRecordError(RecordError, ValueError):
    """A record can't be made of what was given; the message names each field, what it takes and what it has.

    Args:
        errors: the same, a mapping each: ``loc`` (the field's path), ``msg``, ``type``, ``input``.
    """

    def __init__(self, message: str, *, errors: list[dict[str, object]], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self._errors = errors

    def errors(self, **_: object) -> list[dict[str, object]]:
        """Each wrong field: ``loc``, ``msg``, ``type`` and ``input``, as pydantic's error gives them."""
        return self._errors


class WorkloadError(InputError):
    """The model, its data, or the options that go with them are wrong."""


class InfeasibleError(SkyctlError):
    """Proved that no plan fits; the message says what is short."""

    exit_code = 3


class NodeError(SkyctlError):
    """Something is wrong with one node, whose name is ``node``."""

    exit_code = 4

    def __init__(self, message: str, *, node: str, hint: str | None = None, log: str | None = None) -> None:
        super().__init__(message, hint=hint, log=log)
        self.node = node


class UnreachableError(NodeError):
    """No connection: the name does not resolve, no route, port closed, time-out."""


class HostKeyError(NodeError):
    """The host's key is unknown (opt in with --accept-new-host-keys) or has changed (always refused)."""


class LoginError(NodeError):
    """Connected, but no key or password was accepted."""


class UnfitError(NodeError):
    """Logged in, but something the node needs is missing (Python, torch, disk, memory)."""


class PythonTooOldError(UnfitError):
    """A node's Python is older than skyctl needs; ``version`` is the one it has."""

    version = ""


class UnsupportedDtypeError(UnfitError):
    """The node's processor can't compute in the dtype that is asked for, however often it is tried."""


class SessionGoneError(NodeError):
    """The node has no such session any more, or another launcher has taken it over."""


class ProtocolError(NodeError):
    """The node sent something that skyctl would not send there: it counts as lost, and is not trusted."""

    def __init__(self, message: str, *, node: str, hint: str | None = None, log: str | None = None) -> None:
        hint = hint or f"see what runs on {node}: another skyctl, or somebody who is not to be trusted"
        super().__init__(message, node=node, hint=hint, log=log)


class MismatchError(SkyctlError):
    """Plan and cluster do not match."""

    exit_code = 5
