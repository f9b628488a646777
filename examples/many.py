"""Many prompts at once: ordered answers, and errors in their places.

python examples/many.py [ADDRESS]
"""

import sys

from loraplex import Client, LoraplexError

PROMPT = "Person: age=36; name=Ada Keller; city=London. =>"

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
prompts = [{"prompt": PROMPT, "adapter_id": name} for name in ("json", "yaml", "nobody")]
with Client(address) as client:
    answers = client.generate_many(prompts, max_concurrency=4, max_tokens=64)
for prompt, answer in zip(prompts, answers, strict=True):
    shown = f"{type(answer).__name__}: {answer}" if isinstance(answer, LoraplexError) else answer.text.strip()
    print(f"{prompt['adapter_id']}: {shown}")
