"""The front end: text to tokens, submission, tokens back to text.

Knows no protobuf and no tensors.
"""
