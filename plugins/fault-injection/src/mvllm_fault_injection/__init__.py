"""A platform whose workers fail on demand."""
