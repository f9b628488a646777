"""The worker: front end, engine, scheduler, KV cache, model, sampling and speculation."""
