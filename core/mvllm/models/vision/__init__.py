"""Vision towers, and the multimodal models that they belong to."""
