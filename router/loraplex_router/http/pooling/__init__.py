"""Embeddings, classes and scores over HTTP, in six dialects."""
