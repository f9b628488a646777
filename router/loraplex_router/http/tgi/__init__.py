"""LoRAX's and TGI's dialect over HTTP."""
