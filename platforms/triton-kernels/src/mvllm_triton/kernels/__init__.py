"""Device code. Each module holds the kernels of the module with the same name in the parent package."""
