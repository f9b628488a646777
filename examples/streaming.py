"""Streaming: text as it is written, and the reason why it ended.

python examples/streaming.py [ADDRESS]
"""

import sys

from loraplex import Client, LoraplexError

PROMPT = "Book: title=Silent Harbour; author=Mei Novak; year=1987. =>"

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(address) as client:
    try:
        for chunk in client.stream(PROMPT, adapter_id="yaml", max_tokens=96, timeout_s=30):
            print(chunk.text, end="", flush=True)
            if chunk.finish_reason is not None and chunk.usage is not None:  # the last chunk
                print(f"\n[{chunk.finish_reason}, {chunk.usage.completion_tokens} tokens]")
    except LoraplexError as error:  # every error says what happened, and some when to try again
        sys.exit(f"{error.reason}: {error}")

    # Leaving the block early cancels the request: the server stops computing it.
    with client.stream(PROMPT, max_tokens=96) as stream:
        print(f"first words of another: {next(stream).text!r}")
