"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and ColQwen2."""
