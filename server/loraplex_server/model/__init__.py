"""The base model: loading, adapted linears, paged attention, and the runner of steps."""
