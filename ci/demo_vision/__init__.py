"""Draws the pictures of the demo vision model and trains it. Not part of any distribution.

The trained model is in `core/mvllm/demo/vision_model`.
"""
