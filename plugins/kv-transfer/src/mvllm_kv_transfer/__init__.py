"""KV connectors for mvllm: blocks on disk, and blocks of another engine over TCP, shared memory or NIXL."""
