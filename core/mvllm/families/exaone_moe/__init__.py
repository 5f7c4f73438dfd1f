"""EXAONE MoE."""
