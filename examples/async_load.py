"""Asynchronous load: many requests at once, a bounded number in flight.

python examples/async_load.py [ADDRESS]
"""

import asyncio
import sys
import time

from loraplex import AsyncClient, ResourceExhausted

ADAPTERS = ("json", "yaml", "sql", "xml", "toml", "ini")
NUM_REQUESTS = 48
IN_FLIGHT = 16


async def main(address: str) -> None:
    """Sends all requests and prints the throughput."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async with AsyncClient(address) as client:

        async def ask(idx: int) -> int:
            """Number of new tokens; 0 if the server was too full."""
            async with slots:
                try:
                    answer = await client.generate(
                        f"Sensor: id=KX-{100 + idx}; room=attic; reading={idx}.25. =>",
                        adapter_id=ADAPTERS[idx % len(ADAPTERS)],
                        max_tokens=96,
                        timeout_s=60,
                    )
                except ResourceExhausted as error:  # overload is refused at once, with a hint when to come back
                    print(f"{error.reason}: {error}", file=sys.stderr)
                    return 0
                return answer.usage.completion_tokens

        start = time.perf_counter()
        counts = await asyncio.gather(*(ask(idx) for idx in range(NUM_REQUESTS)))
    seconds = time.perf_counter() - start
    done = sum(count > 0 for count in counts)
    print(
        f"{done} of {NUM_REQUESTS} answers, {sum(counts)} tokens in {seconds:.2f} s, {sum(counts) / seconds:.0f} per s"
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
