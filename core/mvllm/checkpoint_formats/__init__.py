"""Formats of checkpoints that are not Hugging Face folders: their interface, and the installed ones."""
