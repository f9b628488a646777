"""Speculation: the same text in fewer steps of the model.

python examples/speculation.py [ADDRESS]
"""

import sys

from loraplex import AnySpeculation, Client, DraftModel, Medusa, PromptLookup

PROMPT = "Person: age=36; name=Ada Keller; city=London. =>"

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(address) as client:
    kinds: dict[str, AnySpeculation] = {
        "off": "off",
        "auto (the server chooses)": "auto",
        "Medusa heads, adapter json-heads": Medusa("json-heads"),
        "prompt lookup, from 3 equal tokens on": PromptLookup(min_ngram=3),
    }
    kinds |= {f"draft model {name}": DraftModel(name) for name in client.info().draft_models}
    texts = set[str]()
    for name, kind in kinds.items():
        answer = client.generate(PROMPT, adapter_id="json", speculation=kind, max_tokens=96)
        texts.add(answer.text)
        print(f"{name:40} {answer.usage.tokens_per_step or 1:.2f} tokens per step, {answer.timings.total_s:.3f} s")
    print(*texts, sep="\n")
    if len(texts) > 1:
        sys.exit("the texts differ, which must not happen")
