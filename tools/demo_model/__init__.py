"""How the demo model is made: the corpus that it learns, and its training. Not part of any distribution.

The trained model is `mvllm.demo`.
"""
