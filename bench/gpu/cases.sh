#!/usr/bin/env bash
# The three field cases on one GPU. Needs a folder $OUT and, made where there is a package index and carried along, the
# kit of bench/gpu_vllm in .kit/ (make_kit.sh .kit) and upstream's files in .pack/ (bench/cases.py --pack .pack).
# Then the kernels' numerics, under compute-sanitizer where the machine has one (not with SANITIZER=0). Usage: cases.sh [more arguments of cases.py]
set -u
mkdir -p /tmp/link && ln -sfn "$PWD" /tmp/link/syncfree
bash bench/gpu/compile.sh planner/schedules/_native planner/_rows backends/_mla_context
KIT=.kit source .kit/enter.sh
export PYTHONPATH=/tmp/link:$PYTHONPATH SYNCFREE_RELEASED=$PWD/.pack VLLM_LOGGING_LEVEL=ERROR
timeout 400 python3 bench/cases.py --out "$OUT" --seconds 260 "$@" | tee "$OUT/cases.log"; rc=${PIPESTATUS[0]}
echo "cases rc $rc"
if [ "${SANITIZER:-1}" != 0 ]; then
    timeout 140 python3 bench/gpu/mla_h200.py "$OUT/sanitizer.json" --sanitizer --seconds 130; echo "sanitizer rc $?"
fi
exit "$rc"
