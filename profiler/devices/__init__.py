"""Device facts: which GPUs are here and what they are doing."""
