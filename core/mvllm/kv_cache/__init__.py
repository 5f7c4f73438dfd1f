"""Bookkeeping of the paged KV cache:

which blocks belong to which request, and which prefixes are cached. No tensors.
"""
