"""The engine's settings: built once from what the user asked and what the model folder says, then still."""
