"""Names of the gRPC services, paths of their methods, and their port."""

from __future__ import annotations

from typing import Final

INFERENCE: Final = "loraplex.v1.InferenceService"
POOLING: Final = "loraplex.v1.PoolingService"
ADAPTERS: Final = "loraplex.v1.AdapterService"
WORKER: Final = "loraplex.v1.WorkerService"
STATUS: Final = "loraplex.v1.StatusService"

DEFAULT_PORT: Final = 50051


def path_of(service: str, method: str) -> str:
    """The method's path in HTTP/2, by which gRPC calls it."""
    return f"/{service}/{method}"
