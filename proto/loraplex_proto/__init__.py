"""The contract between clients, router and workers: messages (v1), errors, validation, credentials, telemetry.

Knows nothing of models, batches or adapters' weights, and never imports torch.
"""

__version__ = "0.1.0"
