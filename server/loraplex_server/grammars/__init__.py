"""Grammars: the forms that texts must have.

Needs neither torch nor gRPC.
"""
