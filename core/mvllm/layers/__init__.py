"""Layers of models (attention, linear, MoE, norms, embeddings), sharded over ranks."""
