"""The version of the `mvllm` distribution."""

__version__ = "0.9.0"
