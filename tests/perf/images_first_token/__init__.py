"""Time to the first token of a prompt with an image, beside other engines."""
