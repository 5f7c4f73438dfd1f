"""GLM-4, GLM-4V and their models with experts."""
