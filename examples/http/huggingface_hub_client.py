"""huggingface_hub's client: adapters are models of the OpenAI routes. pip install huggingface_hub

python examples/http/huggingface_hub_client.py [URL]
"""

import sys

from huggingface_hub import InferenceClient

PROMPT = "We have purchase FG-8644, now delivered, 42 pieces, costing 118.48, for a thin wall. =>"

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = InferenceClient(base_url=f"{url}/v1", api_key="none")
for model in ("json", "sql"):
    answer = client.chat_completion([{"role": "user", "content": PROMPT}], model=model, max_tokens=96, temperature=0)
    print(f"{model}: {answer.choices[0].message.content}")

# An adapter of TGI's route, too, token by token.
endpoint = InferenceClient(url)
for part in endpoint.text_generation(PROMPT, adapter_id="json", max_new_tokens=96, stream=True):
    print(part, end="", flush=True)
print()
