#!/usr/bin/env bash
# A real vLLM on one GPU, profiled through its agent; needs the kit of bench/gpu_vllm in .kit/ and a folder $OUT.
# usage: first.sh COLLECTORS [more arguments of vllm_steps.py]
set -u
mkdir -p /tmp/link && ln -sfn "$PWD" /tmp/link/syncfree
KIT=.kit source .kit/enter.sh
export PYTHONPATH=/tmp/link:$PYTHONPATH SYNCFREE_SOCKET_DIR=/tmp/sfsock
collectors=$1
shift
timeout 170 python3 bench/gpu/vllm_steps.py "$OUT" /tmp/vl/models/llama TRITON_ATTN --collectors "$collectors" "$@"
