"""OpenAI's Python client: adapters are models. pip install openai

python examples/http/openai_client.py [URL]
"""

import sys

from openai import NotFoundError, OpenAI

PROMPT = "We have purchase FG-8644, now delivered, 42 pieces, costing 118.48, for a thin wall. =>"

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
base, *adapters = [card.id for card in client.models.list()]
for model in (base, *adapters[:5]):
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=96, temperature=0)
    print(f"{model}: {answer.choices[0].text}")

# Speculation changes the number of steps, never the text. Fields that OpenAI lacks go into `extra_body`.
stream = client.chat.completions.create(
    model=adapters[0],
    messages=[{"role": "user", "content": PROMPT}],
    max_tokens=96,
    temperature=0,
    stream=True,
    extra_body={"speculation": "prompt_lookup"},
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

try:
    client.completions.create(model="nobody", prompt=PROMPT)
except NotFoundError as error:
    print(f"an unknown adapter is an error, and the base model does not answer for it: {error.code}")
