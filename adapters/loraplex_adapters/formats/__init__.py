"""Adapter formats: from files to checked plans and kernel-ready bytes."""
