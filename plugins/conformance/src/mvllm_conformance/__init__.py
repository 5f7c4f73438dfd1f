"""The conformance suite for platform plugins of mvllm: `mvllm conformance`."""
