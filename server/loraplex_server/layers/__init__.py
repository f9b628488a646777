"""Layers of every model, and the state that they share in a step."""
