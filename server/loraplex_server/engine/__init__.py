"""The engine: one loop over scheduler, adapter cache and runner, in its process.

`engine` is the body of the loop, usable inline; `process` runs it behind a pipe; `client` is the asyncio side of that
pipe, and `pipe` what crosses it.
"""
