"""The engine: one loop that owns scheduler, adapter cache and runner, in a process of its own.

`engine` is the body of the loop, usable inline; `process` runs it behind a pipe; `client` is the asyncio side of that
pipe, and `pipe` what crosses it.
"""
