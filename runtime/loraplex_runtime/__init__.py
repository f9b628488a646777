"""What every server process and command needs: credentials, TLS, ports, flags, logs, metrics, shutdown."""
