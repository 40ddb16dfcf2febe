#!/usr/bin/env bash
# The planner inside vLLM 0.26 on one GPU; needs the kit of bench/gpu_vllm in .kit/ and a folder $OUT.
set -u
ln -sfn "$PWD" /tmp/syncfree
KIT=.kit source .kit/enter.sh
export PYTHONPATH=/tmp:$PYTHONPATH SYNCFREE_SOCKET_DIR=/tmp/sfsock VLLM_LOGGING_LEVEL=ERROR
echo "== AITER builders above the double"
timeout 200 python3 bench/gpu/aiter_builders.py --json "$OUT/aiter_builders.json"; echo "rc $?"
for mode in "" "--async"; do
    echo "== llama $mode"
    timeout 420 python3 bench/gpu/vllm_planned.py "$OUT/llama$mode" /tmp/vl/models/llama TRITON_ATTN $mode; echo "rc $?"
done
# No plan is declared for TRITON_MLA: nothing may change.
echo "== mla"
timeout 420 python3 bench/gpu/vllm_planned.py "$OUT/mla" /tmp/vl/models/mla TRITON_MLA; echo "rc $?"
