"""LlamaIndex over the HTTP port: a chat model of each adapter. pip install llama-index-llms-openai-like

python examples/http/llamaindex_client.py [URL]
"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
said = "We have purchase FG-8644, now delivered, 42 pieces, costing 118.48, for a thin wall. =>"
for adapter in ("json", "sql"):
    model = OpenAILike(
        model=adapter, api_base=f"{url}/v1", api_key="none", is_chat_model=True, temperature=0, max_tokens=96
    )
    for part in model.stream_chat([ChatMessage(role="user", content=said)]):
        print(part.delta, end="", flush=True)
    print()
