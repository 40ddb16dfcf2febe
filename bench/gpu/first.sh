#!/usr/bin/env bash
# Collectors, demo and a real vLLM on one GPU; needs the kit of bench/gpu_vllm in .kit/ and a folder $OUT.
set -u
ln -sfn "$PWD" /tmp/syncfree
KIT=.kit source .kit/enter.sh
export PYTHONPATH=/tmp:$PYTHONPATH SYNCFREE_SOCKET_DIR=/tmp/sfsock
echo "== demo"; timeout 90 python3 cli.py profile --demo --collectors auto --json "$OUT/demo.json"; echo "rc $?"
echo "== corpus"; timeout 150 python3 bench/gpu/corpus.py "$OUT/corpus_kineto.json" --collectors kineto; echo "rc $?"
for mode in "" "--async"; do
    echo "== vllm llama $mode"
    timeout 150 python3 bench/gpu/vllm_steps.py "$OUT" /tmp/vl/models/llama TRITON_ATTN $mode --collectors kineto; echo "rc $?"
done
