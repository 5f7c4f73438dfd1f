"""Tool-call and reasoning parsers of model families for mvllm."""
