"""Generates the demo model's corpus and trains it. Not part of any distribution.

The trained model is `mvllm.demo`.
"""
