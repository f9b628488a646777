"""The wire between clients, router and workers: messages (v1), their validation, errors as statuses, pages.

Knows nothing of models, batches or adapters' weights, and never imports torch.
"""

__version__ = "0.1.0"  # of the distribution: pyproject.toml reads it here
