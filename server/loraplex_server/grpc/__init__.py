"""The worker's gRPC services: protobuf in, plain data behind it.

The only package of the worker that knows the wire.
"""
