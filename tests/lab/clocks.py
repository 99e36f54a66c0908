"""A clock of the day that is off: Python's own, shifted by a ``sitecustomize.py``.

Files and OpenSSL have the true time: a time namespace shifts no clock of the day.
"""

from __future__ import annotations

_SHIFTED = """
import datetime
import os
import time


def shift_s():
    @body@


def shifted(real):
    return lambda seconds=None: real(time.time() if seconds is None else seconds)


_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + shift_s()
time.time_ns = lambda: _time_ns() + int(shift_s() * 10**9)
time.gmtime, time.localtime = shifted(time.gmtime), shifted(time.localtime)


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=shift_s())

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


datetime.datetime = Shifted
"""
_FROM_FILE = """try:
        with open(os.environ.get("CHAOS_CLOCK") or os.path.expanduser("~/clock-shift")) as file:
            return float(file.read())
    except (OSError, ValueError):
        return 0.0"""


def constant_shift(seconds: float) -> str:
    """A ``sitecustomize.py`` whose clock is ahead by so much, always."""
    return _SHIFTED.replace("@body@", f"return {seconds!r}")


def shift_from_file() -> str:
    """One whose clock is ahead by the seconds in ``$CHAOS_CLOCK``, else ``~/clock-shift``, as they stand."""
    return _SHIFTED.replace("@body@", _FROM_FILE)
