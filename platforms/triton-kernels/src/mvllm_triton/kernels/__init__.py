"""Device code. Each module is the kernels of the module of the same name one folder up, which checks and launches."""
