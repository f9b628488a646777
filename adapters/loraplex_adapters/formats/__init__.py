"""Adapter formats as found in the wild: from files to checked plans and kernel-ready bytes."""
