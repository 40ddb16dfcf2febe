#!/usr/bin/env bash
# The planner inside vLLM 0.26 on one GPU; needs the kit of bench/gpu_vllm in .kit/ and a folder $OUT. An engine starts
# in about a minute and a case starts five: name the case where one call may not take that long. All calls with the same
# $OUT fill one file, $OUT/planned.json.
# usage: planned.sh [builders | llama | llama-async | mla | mla-async]...   (default: all)
set -u
ln -sfn "$PWD" /tmp/syncfree
KIT=.kit source .kit/enter.sh
export PYTHONPATH=/tmp:$PYTHONPATH SYNCFREE_SOCKET_DIR=/tmp/sfsock VLLM_LOGGING_LEVEL=ERROR
[ $# -gt 0 ] || set -- builders llama llama-async mla mla-async
for what in "$@"; do
    echo "== $what"
    case $what in
        builders) timeout 200 python3 bench/gpu/aiter_builders.py --json "$OUT/aiter_builders.json" ;;
        *)
            backend=TRITON_ATTN scheduling=sync
            [ "${what%-async}" = mla ] && backend=TRITON_MLA
            [ "$what" = "${what%-async}" ] || scheduling=async
            python3 bench/gpu/vllm_planned.py "$OUT" "/tmp/vl/models/${what%-async}:$backend" --scheduling $scheduling
            ;;
    esac
    echo "rc $?"
done
