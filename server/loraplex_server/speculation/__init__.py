"""Speculation: proposers of draft tokens, and the policy that picks them.

Verification is in `sampling`.
"""
