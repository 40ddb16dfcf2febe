"""aiter's names of torch dtypes."""

import torch

fp8 = torch.float8_e4m3fn
bf16 = torch.bfloat16
fp16 = torch.float16
i32 = torch.int32
u64 = torch.uint64
fp32 = torch.float32

NAMES = {fp8: "fp8", bf16: "bf16", fp16: "fp16", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16"}
