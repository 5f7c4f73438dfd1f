"""Device code: each module holds the kernels that the module of the same name one folder up launches."""
