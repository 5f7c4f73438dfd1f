"""Code shared by the platforms whose devices torch drives through a module like `torch.cuda`."""
