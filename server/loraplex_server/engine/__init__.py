"""The engine: one loop that owns scheduler, adapter cache and runner, in a process of its own.

`core` is the loop's body, usable inline; `process` runs it behind a pipe; `client` is the asyncio side of that pipe.
"""
