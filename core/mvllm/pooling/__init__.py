"""Pooling: turns the last hidden states of prompts into embedding vectors and scores."""
