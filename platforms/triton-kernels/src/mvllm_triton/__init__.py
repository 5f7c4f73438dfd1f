"""Triton kernels as functions over torch tensors. Importing this imports neither; each module of functions does."""
