"""LoRAX's Python client: adapters are named by `adapter_id`. pip install lorax-client

python examples/http/lorax_client.py [URL]
"""

import sys

from lorax import Client
from lorax.errors import NotFoundError

PROMPT = "We have purchase FG-8644, now delivered, 42 pieces, costing 118.48, for a thin wall. =>"

client = Client(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
for adapter_id in (None, "json", "sql"):
    answer = client.generate(PROMPT, adapter_id=adapter_id, max_new_tokens=96)
    print(f"{adapter_id or 'the base model'}: {answer.generated_text}")

for event in client.generate_stream(PROMPT, adapter_id="json", max_new_tokens=96):
    if not event.token.special:
        print(event.token.text, end="", flush=True)
print()

try:
    client.generate(PROMPT, adapter_id="nobody")
except NotFoundError as error:
    print(f"an unknown adapter is an error, and the base model does not answer for it: {error}")
