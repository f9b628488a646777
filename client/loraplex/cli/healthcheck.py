"""Health check for containers: `python -m loraplex.cli.healthcheck HOST:PORT [SERVICE]`.

Exits with 0 when the server answers SERVING. Encodes grpc.health.v1 by hand (two bytes), so that images need no package
for it.
"""

from __future__ import annotations

import sys

import grpc

CHECK = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}
READY_SERVICE = "loraplex.v1.InferenceService"


def is_serving(address: str, service: str = READY_SERVICE, *, timeout_s: float = 4.0) -> bool:
    """True if the server at `address` answers that `service` is serving."""
    name = service.encode()
    request = b"\x0a" + bytes([len(name)]) + name if name else b""
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary(CHECK, request_serializer=bytes, response_deserializer=bytes)
        try:
            return check(request, timeout=timeout_s) == SERVING
        except grpc.RpcError:
            return False


if __name__ == "__main__":
    sys.exit(0 if is_serving(*sys.argv[1:3]) else 1)
