"""Adapter formats as found in the wild: from files to checked, kernel-ready tensors."""
