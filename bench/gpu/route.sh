#!/usr/bin/env bash
# The choice of an MLA decode kernel on lengths of its own, on one GPU: all kernels timed on shapes of two seeds, then a
# fit to the first, judged by the second. Needs a folder $OUT, torch, Triton, NumPy and msgspec (or the kit of
# bench/gpu_vllm in .kit/). Usage: [SEEDS=11,12] route.sh [--seconds 240]
set -u
mkdir -p "$OUT" /tmp/link && ln -sfn "$PWD" /tmp/link/syncfree
bash bench/gpu/compile.sh planner/schedules/_native planner/_rows
[ -f .kit/enter.sh ] && KIT=.kit source .kit/enter.sh
export PYTHONPATH=/tmp/link:${PYTHONPATH:-}
seeds=${SEEDS:-11,12}
python3 bench/gpu/route_check.py "$OUT/route_check.json" --seeds "$seeds" --seconds 240 "$@" >"$OUT/route_check.log" 2>&1
rc=$?
grep -v '^{' "$OUT/route_check.log" | tail -20
echo "route_check rc $rc"
if [ "${seeds%,*}" != "$seeds" ]; then
    python3 bench/gpu/fit_times.py "$OUT/route_check-${seeds%%,*}.json" --against "$OUT/route_check-${seeds##*,}.json" |
        tee "$OUT/fit.log"
fi
exit $rc
