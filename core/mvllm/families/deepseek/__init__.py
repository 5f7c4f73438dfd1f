"""DeepSeek V2, V3 and V3.2."""
