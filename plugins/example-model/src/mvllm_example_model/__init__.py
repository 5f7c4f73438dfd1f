"""A model that comes with a package of its own: found by the architecture's name in a checkpoint's config.json."""
