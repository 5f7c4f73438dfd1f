"""What platforms share whose devices torch drives through a module like `torch.cuda`."""
