#!/usr/bin/env bash
# The planner inside vLLM 0.26 on one GPU; needs the kit of bench/gpu_vllm in .kit/ and a folder $OUT. First, alone, the
# AITER builders (times count there), then four cases of five engines, ten at a time: about six minutes on 16 cores.
# All calls with the same $OUT fill one file, $OUT/planned.json.
# usage: planned.sh [builders | llama | llama-async | mla | mla-async]...   (default: all)
set -u
ln -sfn "$PWD" /tmp/syncfree
KIT=.kit source .kit/enter.sh
export PYTHONPATH=/tmp:$PYTHONPATH SYNCFREE_SOCKET_DIR=/tmp/sfsock VLLM_LOGGING_LEVEL=ERROR
[ $# -gt 0 ] || set -- builders llama llama-async mla mla-async
for what in "$@"; do
    [ "$what" = builders ] || continue
    echo "== builders"
    timeout 240 python3 bench/gpu/aiter_builders.py --rows 8,64,256 --json "$OUT/aiter_builders.json"
    echo "rc $?"
done
for scheduling in sync async; do # all engines of one kind of scheduling together
    cases=()
    for what in "$@"; do
        case $scheduling:$what in
            sync:llama | async:llama-async) cases+=(/tmp/vl/models/llama:TRITON_ATTN) ;;
            sync:mla | async:mla-async) cases+=(/tmp/vl/models/mla:TRITON_MLA) ;;
        esac
    done
    [ ${#cases[@]} -gt 0 ] || continue
    echo "== vLLM, $scheduling"
    timeout 280 python3 bench/gpu/vllm_planned.py "$OUT" "${cases[@]}" --scheduling $scheduling --jobs 10
    echo "rc $?"
done
