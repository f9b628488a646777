"""Routes of OpenAI, LoRAX, TGI and SGLang over HTTP in the router."""
