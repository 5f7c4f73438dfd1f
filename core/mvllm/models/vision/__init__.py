"""Encoders of images and videos."""
