#!/usr/bin/env bash
# The tests that a mark expression chooses. $1: the Python, $2: the expression; what follows goes to pytest. First those that can share the machine,
# two at a time (WORKERS=0: one), then the lab's, one at a time: they measure, and they need its network to themselves.
set -u
python=$1
marks=$2
shift 2

"$python" -m pytest -m "$marks and not lab" -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
shared=$?
[ $shared = 2 ] && exit 2  # pytest's code where it was interrupted, or could not read the tests
"$python" -m pytest -m "$marks and lab" "$@"
lab=$?

nothing=5  # where no test was chosen
[ $shared = $nothing ] && shared=$lab
[ $lab = $nothing ] && lab=$shared
exit $((shared > lab ? shared : lab))
