"""The worker of models that run as graphs: the parts of core's worker that differ."""
