"""Generation of images over HTTP."""
