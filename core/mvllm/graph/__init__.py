"""Models as StepGraphs: tracing, the operations with their references, and the interpreter."""
