"""OpenAI's dialect over HTTP, with vLLM's further fields and ours."""
