"""The worker's edge: protobuf in, plain data behind it. The only package of the worker that knows the wire."""
