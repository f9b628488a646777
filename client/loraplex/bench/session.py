"""One load from beginning to end: plan, send, record."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from loraplex.aio import AsyncClient
from loraplex.bench.arrivals import LoadSpec, plan
from loraplex.bench.driver import Recording, run_load
from loraplex.types import GenerateOptions, ServerInfo
from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.flags import option

_option = partial(option, panel="Adapters")

# A server that lists its adapters for the first time may still be looking: asked so often, a little apart.
_NUM_LOOKS: Final = 5
_LOOK_PAUSE_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Selection:
    """Which adapters to ask for: those that are named, else those that the server lists."""

    named: tuple[str, ...] = _option(
        (),
        "Adapter to ask for, the most popular first; may be given several times. Default: all that the server lists.",
        "--adapter",
        "-a",
    )
    prefix: str = _option("", "Of what the server lists, only names that begin so.", "--adapters-prefix")
    num_adapters: int | None = _option(None, "Only the first so many of them.", "--num-adapters")
    base_only: bool = _option(False, "Ask for no adapter at all.", "--base")

    def __post_init__(self) -> None:
        if self.num_adapters is not None and self.num_adapters < 1:
            raise InvalidArgument("--num-adapters must be at least 1; --base asks for none", field="--num-adapters")
        if self.base_only and (self.named or self.prefix or self.num_adapters):
            raise InvalidArgument(
                "--base asks for no adapter; leave out --adapter, --adapters-prefix and --num-adapters", field="--base"
            )
        if self.named and self.prefix:
            raise InvalidArgument("give --adapter or --adapters-prefix, not both", field="--adapters-prefix")

    async def find(self, client: AsyncClient) -> tuple[str, ...]:
        """Raises InvalidArgument where there are not those that are meant."""
        if self.base_only:
            return ()
        names = self.named or tuple(await _list(client, self.prefix))
        if self.prefix and not names:
            raise InvalidArgument(
                f"the server lists no adapter that begins with {self.prefix!a}", field="--adapters-prefix"
            )
        if self.num_adapters is not None and self.num_adapters > len(names):
            raise InvalidArgument(
                f"--num-adapters asks for {self.num_adapters} adapters, and there are {len(names)}",
                field="--num-adapters",
            )
        return names[: self.num_adapters]


async def _list(client: AsyncClient, prefix: str) -> list[str]:
    """What a request can name; heads that only speculate are no choice of their own."""
    for look in range(_NUM_LOOKS):
        if look:
            await asyncio.sleep(_LOOK_PAUSE_S)
        if rows := await client.adapters.list(include_unloaded=True, prefix=prefix):
            return sorted({row.adapter_id for row in rows if row.kind != "medusa" and row.state != "failed"})
    return []


class Session:
    """Owns the recording, which is good at any moment; `run` once."""

    def __init__(self, spec: LoadSpec, selection: Selection, options: GenerateOptions) -> None:
        self.recording = Recording()
        self._spec = spec  # without what the server says, until it has said it
        self._selection = selection
        self._options = options
        self._info: ServerInfo | None = None

    async def run(self, client: AsyncClient) -> None:
        """Raises what the server answers to being asked, and InvalidArgument for a load that there is not. What happens
        to single requests is in the recording."""
        self._info = await client.info()
        self._spec = replace(
            self._spec,
            adapter_ids=await self._selection.find(client),
            vocab_size=self._info.vocab_size,
            excluded_ids=frozenset(self._info.eos_token_ids),
        )
        arrivals = plan(self._spec)
        if not arrivals:
            raise InvalidArgument("no request arrives within --duration; raise it, or --rate", field="--duration")
        await run_load(client, arrivals, self._options, self.recording, max_in_flight=self._spec.max_in_flight)

    def described(self) -> dict[str, Any]:
        """What was sent, and to whom, as plain data."""
        spec, info = self._spec, self._info
        return {
            "server": None if info is None else {"role": info.role, "model": info.model_id, "version": info.version},
            "load": {
                "rate": spec.rate if math.isfinite(spec.rate) else "inf",
                "cv": spec.cv,
                "duration_s": spec.duration_s,
                "num_requests": spec.num_requests,
                "popularity": str(spec.popularity),
                "num_adapters": len(spec.adapter_ids),
                "prompt_tokens": None if spec.texts else str(spec.prompt_tokens),
                "num_texts": len(spec.texts),
                "output_tokens": str(spec.output_tokens),
                "seed": spec.seed,
                "max_inflight": spec.max_in_flight,
            },
        }
