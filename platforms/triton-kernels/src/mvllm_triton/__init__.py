"""Triton kernels as functions over torch tensors.

Only the modules with functions import torch and Triton; this package imports neither.
"""
