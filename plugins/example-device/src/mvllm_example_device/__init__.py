"""A complete and strict platform plugin for mvllm: a device in the host's memory, on torch's PrivateUse1."""
