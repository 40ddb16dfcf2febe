"""How the GPU programs start their small vLLM engines. Imports nothing: an engine without syncfree uses it, too."""

# For `os.environ`, before vLLM is imported: one process, loopback only, nothing that the kit leaves out.
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# Arguments of `vllm.LLM`: random weights, and a token budget that prompts go past.
ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
}
# Those that only an engine on a GPU takes.
ON_GPU = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "compilation_config": {"custom_ops": ["none"]},
}
