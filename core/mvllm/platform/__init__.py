"""The platform contract, and discovery, validation and choice of platform plugins."""
