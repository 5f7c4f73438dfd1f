"""Example model plugin, found by the architecture's name in a checkpoint's config.json."""
