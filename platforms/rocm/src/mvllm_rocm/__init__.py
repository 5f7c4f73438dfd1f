"""mvllm on ROCm devices: the ROCm platform plugin."""
