"""mvllm on the processor: the CPU platform plugin."""
