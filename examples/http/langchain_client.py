"""LangChain's chat model over the HTTP port. pip install langchain-openai

python examples/http/langchain_client.py [URL]
"""

import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
prompt = ChatPromptTemplate.from_messages(
    [("user", "We have purchase {number}, now delivered, {pieces} pieces, costing 118.48, for a thin wall. =>")]
)
for adapter in ("json", "sql"):
    chain = prompt | ChatOpenAI(model=adapter, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=96)
    for part in chain.stream({"number": "FG-8644", "pieces": 42}):
        print(part.content, end="", flush=True)
    print()
