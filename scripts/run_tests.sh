#!/usr/bin/env bash
# All tests but the fault matrix. $1: the Python; what follows goes to pytest. First those that can share the machine,
# two at a time (WORKERS=0: one), then the lab's, one at a time: they measure, and they need its network to themselves.
set -u
python=$1
shift

"$python" -m pytest -m 'not matrix and not lab' -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
shared=$?
[ $shared = 2 ] && exit 2  # pytest's code where it was interrupted, or could not read the tests
"$python" -m pytest -m 'lab and not matrix' "$@"
lab=$?

nothing=5  # where no test was chosen
[ $shared = $nothing ] && shared=$lab
[ $lab = $nothing ] && lab=$shared
exit $((shared > lab ? shared : lab))
