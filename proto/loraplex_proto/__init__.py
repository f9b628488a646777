"""The wire: messages (`v1`), validation, errors as statuses, paging.

Knows nothing of models, batches or adapters' weights, and never imports torch.
"""

__version__ = "0.2.0.dev0"  # of the distribution: pyproject.toml reads it here
