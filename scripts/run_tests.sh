#!/usr/bin/env bash
# The tests that a mark expression chooses. $1: the Python, $2: the expression; what follows goes to pytest. First those that can share the machine,
# three at a time (WORKERS=0: one), for half of what they take is waiting; then, unless it leaves them out, those that measure and need it alone.
set -u
python=$1
marks=$2
shift 2

# Images for CI often forbid it; then each of a thousand processes compiles skyctl anew, half a second of CPU time.
unset PYTHONDONTWRITEBYTECODE

# Torch's threads sleep while they wait: else they spin, on cores that the other tests need.
OMP_WAIT_POLICY=PASSIVE "$python" -m pytest -m "$marks and not alone" -n "${WORKERS:-3}" --dist loadfile --no-loadscope-reorder --durations=60 --durations-min=10 "$@"
shared=$?
[ $shared = 2 ] && exit 2  # pytest's code where it was interrupted, or could not read the tests
[[ $marks = *"not alone"* ]] && exit $shared
"$python" -m pytest -m "$marks and alone" "$@"
alone=$?

nothing=5  # where no test was chosen
[ $shared = $nothing ] && shared=$alone
[ $alone = $nothing ] && alone=$shared
exit $((shared > alone ? shared : alone))
