"""mvllm on TPUs, and on XLA's CPU device: the TPU platform plugin."""
