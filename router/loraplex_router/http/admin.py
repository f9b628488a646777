"""Routes that load and unload adapters, as vLLM and SGLang have them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from loraplex_contracts.adapters import check_adapter_id
from loraplex_contracts.errors import (
    AdapterNotFound,
    InvalidArgument,
    LoraplexError,
    NoWorker,
    PermissionDenied,
)
from loraplex_proto.v1 import adapter_pb2
from loraplex_router.adapters import is_bound
from loraplex_router.http.errors import note_refusal, status_of
from loraplex_router.http.fields import Fields, harmless_fields
from loraplex_router.http.openai.fields import ignored_fields
from loraplex_router.http.origins import source_of
from loraplex_router.http.router_calls import RouterCalls
from loraplex_router.http.streaming import Handle, json_bytes, json_in_parts


class LoadRequest(Fields):
    """Body of both servers' routes to load one; `load_inplace` and `base_model_name` are vLLM's, `pinned` SGLang's."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None
    base_model_name: str | None = None
    pinned: bool | None = None


class UnloadRequest(Fields):
    lora_name: str | None = None
    lora_int_id: int | None = None  # vLLM's, and not needed there either


class AdminRoutes:
    """The handlers, over one router."""

    def __init__(self, router: RouterCalls) -> None:
        self._router = router
        self._load = router.handler("LoadAdapter", router.adapters.load)
        self._unload = router.handler("UnloadAdapter", router.adapters.unload)

    def add_to(self, app: FastAPI) -> None:
        app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)(self.load)
        app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)(self.unload)
        app.post("/load_lora_adapter")(self.load_as_sglang)
        app.post("/unload_lora_adapter")(self.unload_as_sglang)

    # --- vLLM's ----------------------------------------------------------------------------------------------------

    async def load(self, body: LoadRequest, request: Request) -> Response:
        headers = self._begin(body)
        name = await self._load_one(body, request, again=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.", headers=headers)

    async def unload(self, body: UnloadRequest, request: Request) -> Response:
        headers = self._begin(body)
        name, was_loaded = await self._unload_one(body, request)
        done = f"LoRA adapter '{name}' removed successfully."
        if not was_loaded:
            done = f"LoRA adapter '{name}' was not loaded; its failed load is forgotten."
        return PlainTextResponse(f"Success: {done}", headers=headers)

    # --- SGLang's --------------------------------------------------------------------------------------------------

    async def load_as_sglang(self, body: LoadRequest, request: Request) -> Response:
        headers = self._begin(body)
        try:
            await self._load_one(body, request, again=False)
        except LoraplexError as error:
            return await self._failed(error, request)
        return await self._answer(request, headers)

    async def unload_as_sglang(self, body: UnloadRequest, request: Request) -> Response:
        headers = self._begin(body)
        try:
            await self._unload_one(body, request)
        except LoraplexError as error:
            return await self._failed(error, request)
        return await self._answer(request, headers)

    async def _failed(self, error: LoraplexError, request: Request) -> Response:
        """400 for whatever is wrong with the adapter, as SGLang has it."""
        if status_of(error) not in (400, 404):
            raise error
        note_refusal(error, request.scope)
        return await self._answer(request, {}, error.message)

    async def _answer(self, request: Request, headers: dict[str, str], error_message: str = "") -> Response:
        """Tells the adapters that are loaded, by name, with what `lora_path` may be for them."""
        content = {"success": not error_message, "error_message": error_message, "loaded_adapters": {}}
        parts, comma = [json_bytes(content).removesuffix(b"}}")], b""
        async for rows in self._router.adapter_pages(request):
            if found := {row.adapter_id: row.source or row.adapter_id for row in rows if _is_loaded(row)}:
                parts.append(comma + json_bytes(found)[1:-1])
                comma = b","
        return json_in_parts([*parts, b"}}"], 400 if error_message else 200, headers)

    # --- both ------------------------------------------------------------------------------------------------------

    def _begin(self, body: Fields) -> dict[str, str]:
        """Headers of the answer. Raises PermissionDenied where nobody is asked for a credential."""
        if self._router.credentials is None and not self._router.options.admin:
            raise PermissionDenied(
                "adapters are loaded and unloaded over HTTP where a credential is asked for: start the server with "
                "--auth-file, or with --http-admin to let every client do it"
            )
        return self._router.ignored(ignored_fields(body), harmless_fields(body))

    async def _load_one(self, body: LoadRequest, request: Request, *, again: bool) -> str:
        """The adapter's name. Raises what the workers raise, and InvalidArgument for one that is loaded, unless it is
        to be loaded `again`."""
        if not body.lora_name or not body.lora_path:
            raise InvalidArgument(
                "Both 'lora_name' and 'lora_path' must be provided.",
                field="lora_path" if body.lora_name else "lora_name",
            )
        name = self._name_of(body.lora_name)
        source = source_of(body.lora_path, name, self._router.options.adapter_root)
        rows = await self._rows(name, request)
        if not again and any(_is_loaded(row) for row in rows):
            raise InvalidArgument(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                field="lora_name",
            )
        if not source and any(row.source not in ("", name) for row in rows):
            source = name  # a load without one keeps to where the name was loaded from
        load = adapter_pb2.LoadAdapterRequest(adapter_id=name, pin=bool(body.pinned), source=source)
        await self._ask(self._load, load, request)
        return name

    async def _unload_one(self, body: UnloadRequest, request: Request) -> tuple[str, bool]:
        """The adapter's name, and whether a worker had more of it than a load that failed. Raises what they raise."""
        if not body.lora_name:
            raise InvalidArgument("'lora_name' must be provided.", field="lora_name")
        name = self._name_of(body.lora_name)
        raw = await self._ask(self._unload, adapter_pb2.UnloadAdapterRequest(adapter_id=name), request)
        rows = adapter_pb2.UnloadAdapterResponse.FromString(raw).adapters
        return name, any(row.tier != adapter_pb2.ADAPTER_TIER_SOURCE for row in rows)

    def _name_of(self, name: str) -> str:
        if name in self._router.base_names():
            raise InvalidArgument(f"'{name}' is the base model's name", field="lora_name")
        return check_adapter_id(name, field="lora_name")

    async def _rows(self, name: str, request: Request) -> list[adapter_pb2.Adapter]:
        try:
            return list(await self._router.adapter_rows(name, request))
        except (AdapterNotFound, NoWorker):  # the latter where those that have it do not respond
            return []

    async def _ask(self, handle: Handle, message: Any, request: Request) -> bytes:
        try:
            return await self._router.ask(handle, message.SerializeToString(), request)
        except LoraplexError as error:
            if type(error) is AdapterNotFound:
                raise AdapterNotFound(
                    f"The lora adapter '{message.adapter_id}' cannot be found.", field="lora_name"
                ) from error
            raise


def _is_loaded(row: adapter_pb2.Adapter) -> bool:
    return is_bound(row) and row.state != adapter_pb2.ADAPTER_STATE_FAILED
