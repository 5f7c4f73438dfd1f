"""The one place that holds the version of the `mvllm` distribution."""

__version__ = "0.1.0"
