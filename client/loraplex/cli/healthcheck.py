"""Health check for containers: `python -m loraplex.cli.healthcheck HOST:PORT [SERVICE]`.

Says what it found on one line, and exits with 0 when the server answers SERVING. Encodes grpc.health.v1 by hand (two
bytes), so that images need no package for it.
"""

from __future__ import annotations

import sys
from typing import Any, Final, cast

import grpc

from loraplex_proto.services import INFERENCE

CHECK = "/grpc.health.v1.Health/Check"
TIMEOUT_S: Final = 4.0
SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}

USAGE: Final = "Usage: python -m loraplex.cli.healthcheck HOST:PORT [SERVICE]"
HELP: Final = f"""{USAGE}

Ask a server whether it takes requests. Prints what it answers, and exits with 0 for SERVING, else with 1.

HOST:PORT  The server's gRPC address. TLS is not spoken.
SERVICE    The service that is asked about, '' for the server itself. [default: {INFERENCE}]"""

_STATUSES: Final = {SERVING: "SERVING", b"\x08\x02": "NOT_SERVING", b"\x08\x03": "SERVICE_UNKNOWN", b"": "UNKNOWN"}


def health_of(address: str, service: str = INFERENCE) -> str:
    """SERVING, another status of the health protocol, or why there is none."""
    name = service.encode()
    request = b"\x0a" + bytes([len(name)]) + name if name else b""
    # A container that fetches through a proxy checks itself directly all the same.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(CHECK, request_serializer=bytes, response_deserializer=bytes)
        try:
            return _STATUSES.get(check(request, timeout=TIMEOUT_S), "an answer that is none of the health protocol")
        except grpc.RpcError as error:
            call: Any = cast("Any", error)
            match call.code():
                case grpc.StatusCode.DEADLINE_EXCEEDED:
                    return f"no answer within {TIMEOUT_S:g} s"
                case grpc.StatusCode.NOT_FOUND:
                    return "the server does not know this service"
                case grpc.StatusCode.UNIMPLEMENTED:
                    return "the server has no health service"
                case grpc.StatusCode.UNAVAILABLE:
                    return "no server can be reached, or it wants TLS, which this check does not speak"
                case code:
                    return f"the call ended with {code.name}"


def main(address: str, service: str = INFERENCE) -> int:
    """Prints what was found; 0 where it is SERVING, else 1."""
    found = health_of(address, service)
    is_serving = found == _STATUSES[SERVING]
    print(f"{service or 'the server'} at {address}: {found}", file=sys.stdout if is_serving else sys.stderr)
    return 0 if is_serving else 1


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(HELP)
        sys.exit()
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(USAGE)
    sys.exit(main(*sys.argv[1:]))
