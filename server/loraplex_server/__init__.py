"""The worker: engine, scheduler, KV cache, model runner, sampling, speculation, gRPC service, and the demo."""
