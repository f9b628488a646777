"""Services of every process: credentials, TLS, ports, flags, logs, metrics, shutdown."""
