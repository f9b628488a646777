"""What can be known to be wrong with a server's ports and files before its model is loaded.

Nobody wants to hear of it afterwards. Needs no engine and no torch.
"""

from __future__ import annotations

from loraplex_proto.auth import load_credentials
from loraplex_proto.listen import check_free, read_file
from loraplex_server.config import WorkerConfig


def check_door(config: WorkerConfig) -> None:
    """Raises InvalidArgument for files that cannot be read, FailedPrecondition for ports that cannot be had."""
    check_free(config.host, config.port)
    if config.metrics_port is not None:
        check_free(config.metrics_host or config.host, config.metrics_port)
    load_credentials(config.auth_file)
    for path, flag in ((config.tls_cert, "--tls-cert"), (config.tls_key, "--tls-key")):
        if path is not None:
            read_file(path, flag)
