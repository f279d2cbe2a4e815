"""Random numbers: JAX's, PyTorch's and torchsde's, reproduced."""
