"""Device code: each module holds the kernels of the module of the same name one folder up, which checks and launches."""
