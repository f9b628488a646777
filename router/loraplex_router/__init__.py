"""The router: one address in front of several workers."""
