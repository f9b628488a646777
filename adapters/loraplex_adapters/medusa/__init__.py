"""Medusa heads in the form that kernels read."""
