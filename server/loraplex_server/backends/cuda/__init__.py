"""The CUDA back end."""
