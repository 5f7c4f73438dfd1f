"""The engine's settings: resolved once from the user's settings and the model folder, then immutable."""
