#!/usr/bin/env bash
# `syncfree profile --pid` on real vLLM engines with nothing of ours in them, on one or two GPUs. Needs a folder $OUT; the
# kit of bench/gpu_vllm in .kit/, which is all that the engines see; and in .gpu/ an enter.sh that puts the client's
# packages (frida, msgspec, pyzmq, rich, typer) and this checkout, as `syncfree`, on PYTHONPATH.
# usage: pid.sh [pid] [ranks] [more arguments of pid_vllm.py]   (default: pid)
set -u
engines=$(unset PYTHONPATH; KIT=.kit; . .kit/enter.sh >&2 || exit 1; echo "$PYTHONPATH") || exit 1
# vLLM imports every model's kernel warm-up, which needs compiled ops left out of the kit; also in processes that it spawns
grep -q '^kernel_warmup = ' /tmp/vl/vllm/model_executor/warmup/kernel_warmup.py ||
    echo 'kernel_warmup = lambda *a, **k: None' >>/tmp/vl/vllm/model_executor/warmup/kernel_warmup.py
. .gpu/enter.sh || exit 1
export PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
timeout -k 20 560 python3 bench/gpu/pid_vllm.py "$OUT" /tmp/vl/models/llama "$@" --engine-path "$engines"
rc=$?
echo "rc $rc"
exit $rc
