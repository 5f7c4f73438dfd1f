"""mvllm on Intel GPUs: the XPU platform plugin."""
