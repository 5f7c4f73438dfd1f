"""Turns the last hidden states of prompts into vectors."""
