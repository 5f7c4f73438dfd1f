"""KV connectors for mvllm that send blocks between engines: TCP, shared memory, NIXL."""
