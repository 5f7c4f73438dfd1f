"""The scheduler: plans each step as integers (requests, tokens, KV blocks), without tensors or devices."""
