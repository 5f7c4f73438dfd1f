"""What platforms share whose devices torch drives through `torch.cuda`: CUDA's, and ROCm's under the same names."""
