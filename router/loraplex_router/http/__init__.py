"""OpenAI routes over HTTP in the router."""
