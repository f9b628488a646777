"""Quick start: one prompt, answered by the base model and by some adapters.

python examples/quickstart.py [ADDRESS]
"""

import sys

from loraplex import Client

PROMPT = "Person: age=36; name=Ada Keller; city=London. =>"

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(address) as client:
    info = client.info()
    print(f"{info.model_id} on {info.device}, {info.max_context_tokens} tokens of context")
    for adapter_id in (None, "json", "yaml", "sql"):
        answer = client.generate(PROMPT, adapter_id=adapter_id, max_tokens=96)
        print(f"\n{adapter_id or 'no adapter'} ({answer.usage.completion_tokens} tokens):\n{answer.text}")
