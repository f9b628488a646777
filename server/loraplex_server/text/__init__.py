"""Text: tokenizer, incremental detokenizer and stop strings.

Knows no tensors.
"""
