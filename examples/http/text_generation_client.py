"""TGI's Python client, which knows the base model alone. pip install text-generation

python examples/http/text_generation_client.py [URL]
"""

import sys

from text_generation import Client
from text_generation.types import Grammar, GrammarType

PROMPT = "We have purchase FG-8644, now delivered, 42 pieces, costing 118.48, for a thin wall. =>"

client = Client(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
answer = client.generate(PROMPT, max_new_tokens=96)
print(answer.generated_text)
print(f"{answer.details.generated_tokens} tokens; it ended by {answer.details.finish_reason.value}")

for event in client.generate_stream(PROMPT, max_new_tokens=96):
    if not event.token.special:
        print(event.token.text, end="", flush=True)
print()

digits = Grammar(type=GrammarType.Regex, value="[0-9]{4}")
print(client.generate(PROMPT, max_new_tokens=16, grammar=digits).generated_text)
