"""A task of a node's agent: one rank of a script. The secret comes by the session, and goes on by a pipe."""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

from skyctl.transport.torch_backend import register


def main(payload, channel):
    register()
    read, write = os.pipe()
    os.write(write, payload["secret"].encode())
    os.close(write)
    os.environ.update(payload["environment"], SKYCTL_SECRET_FD=str(read))
    sys.argv = [payload["name"], payload["backend"]]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(Path(__file__).parent / f"{payload['name']}.py"), run_name="__main__")
    return {"said": printed.getvalue()}
