"""Model classes, and loading of their weights from checkpoints."""
