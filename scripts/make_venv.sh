#!/usr/bin/env bash
# Makes or refreshes .venv in the current folder. $1: the interpreter to use; empty: the first that will do.
set -euo pipefail

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=${1:-}
if [ -z "$python" ]; then
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null && fits "$candidate"; then python=$candidate; break; fi
    done
fi
if [ -z "$python" ] || ! fits "$python"; then
    echo "skyctl needs Python >= 3.11; ${python:-python3} is $( ("${python:-python3}" --version 2>&1) || echo missing)." >&2
    echo "  next: install one and name it: make install PYTHON=python3.12" >&2
    exit 2
fi

# One that was moved, half made, or whose interpreter is gone is made anew.
if ! { [ -x .venv/bin/python ] && fits .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1 &&
    [ "$(.venv/bin/python -c 'import sys; print(sys.prefix)')" -ef .venv ]; }; then
    rm -rf .venv
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "$python can't make a virtual environment." >&2
        echo "  next: on Debian and Ubuntu, apt-get install python3-venv" >&2
        exit 2
    fi
fi

echo "installing into .venv ($(.venv/bin/python --version)); the first time takes a few minutes"
quiet=--quiet
[ -t 1 ] && quiet=
.venv/bin/python -m pip install --disable-pip-version-check $quiet -c constraints.txt -e '.[dev,docs]'
