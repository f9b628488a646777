"""What can be known to be wrong with a server's ports and files before its model is loaded.

Nobody wants to hear of it afterwards. Needs no engine and no torch.
"""

from __future__ import annotations

from loraplex_runtime.auth import load_credentials
from loraplex_runtime.ports import check_free
from loraplex_runtime.reload import Reloader
from loraplex_runtime.tls import server_credentials
from loraplex_server.config import WorkerConfig


def check_door(config: WorkerConfig) -> None:
    """Raises InvalidArgument for files that cannot be used, FailedPrecondition for ports that cannot be had."""
    check_free(config.host, config.port)
    if config.metrics_port is not None:
        check_free(config.metrics_host or config.host, config.metrics_port)
    load_credentials(config.auth_file)
    server_credentials(Reloader(), config.tls_cert, config.tls_key)
