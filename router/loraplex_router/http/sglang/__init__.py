"""SGLang's dialect over HTTP."""
