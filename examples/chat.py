"""Chat that keeps its history, laid out by the model's own chat template.

python examples/chat.py [ADDRESS]
"""

import sys

from loraplex import Client

QUESTIONS = ("Name a city by the sea.", "And another one?")

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(address) as client:
    if not client.info().has_chat_template:
        sys.exit("this model has no chat template; try examples/quickstart.py, or serve an instruction-tuned model")
    chat = client.chat("Answer in one sentence.", max_tokens=48, temperature=0.7, seed=1)
    for question in QUESTIONS:
        print(f"> {question}\n{chat.send(question).text}")
