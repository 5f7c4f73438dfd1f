"""mvllm on CUDA devices: the CUDA platform plugin."""
