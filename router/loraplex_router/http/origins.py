"""Origins of adapters in requests over HTTP: LoRAX's sources, vLLM's and SGLang's paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loraplex_contracts.adapters import HUB_SOURCE, S3_SOURCE, check_adapter_source
from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import HasOrigin
from loraplex_router.http.fields import MixtureFields, OriginFields, unicode_text
from loraplex_router.http.mixtures import put_mixture

LOCAL: Final = "local"
HUB: Final = "hub"
S3: Final = "s3"
BUCKET_SCHEME: Final = "s3://"


def put_origin(request: HasOrigin, given: OriginFields, adapter_id: str) -> None:
    """Puts the adapter's source into the request. Raises InvalidArgument, and Unimplemented for an unknown source."""
    source = given.adapter_source or LOCAL
    if source not in (LOCAL, HUB, S3):
        raise Unimplemented(
            f"`adapter_source` may be {LOCAL}, for adapters under the server's own roots, {HUB} or {S3}",
            field="adapter_source",
        )
    if source != HUB and given.adapter_revision:
        raise InvalidArgument(
            f"`adapter_revision` goes with `adapter_source` {HUB}: folders have none", field="adapter_revision"
        )
    if source == S3:
        request.in_bucket = bool(adapter_id)  # a token is for the Hub, and is not looked at
    elif source == HUB and adapter_id:
        request.hub.SetInParent()
        request.hub.revision = unicode_text(given.adapter_revision or "", "adapter_revision")
        request.hub.token = unicode_text(given.api_token or "", "api_token")


def put_adapters(request: pb.GenerateRequest, given: MixtureFields, base_names: Sequence[str]) -> None:
    """Puts the mixture into a request that has its `adapter_id`, then the origin of that adapter or of each in the
    mixture: its own where it says one, else the request's. Raises what `put_mixture` and `put_origin` raise."""
    put_mixture(request, given, base_names)
    if not request.adapters:
        put_origin(request, given, request.adapter_id)
    for idx, adapter in enumerate(request.adapters):
        own = given.adapters[idx] if given.adapters else OriginFields()
        origin = OriginFields(
            adapter_source=own.adapter_source or given.adapter_source,
            adapter_revision=own.adapter_revision or (None if own.adapter_source else given.adapter_revision),
            api_token=own.api_token or given.api_token,
        )
        put_origin(adapter, origin, adapter.id)


def names_origin(given: OriginFields) -> bool:
    """True if the caller says where the adapter is: then no listing shows it."""
    return given.adapter_source not in (None, "", LOCAL)


def put_tokenizer_origin(request: pb.TokenizeRequest, given: OriginFields, adapter_id: str) -> None:
    """Does what `put_origin` does, for a tokenizer's request. The worker looks for the adapter even where it gets a
    text."""
    put_origin(request, given, adapter_id)
    if names_origin(given):
        request.adapter_id = adapter_id


def source_word(message: HasOrigin) -> str:
    """The word of `adapter_source` for the adapter's origin."""
    return HUB if message.HasField("hub") else S3 if message.in_bucket else LOCAL


def source_of(path: str, name: str, root: Path | None) -> str:
    """`source` of the load that a `lora_path` means, "" for the folder of the adapter's own name. `root`: the workers'
    --adapters, where it is known; they look, too.

    Raises InvalidArgument for what is no path of a folder in there, and Unimplemented for an address."""
    folder = None if root is None else f"{root.absolute()}/"
    if path == name or (folder is not None and path.rstrip("/") == folder + name):
        return ""
    if path.startswith(BUCKET_SCHEME):
        path = S3_SOURCE + path.removeprefix(BUCKET_SCHEME)
    source = check_adapter_source(unicode_text(path, "lora_path"), field="lora_path")
    if source.startswith((HUB_SOURCE, S3_SOURCE)):
        return source
    if source.startswith("~") or (folder is not None and source.startswith("/") and not source.startswith(folder)):
        where = "the workers' --adapters" if folder is None else f"{folder!a}, the workers' --adapters"
        raise InvalidArgument(f"`lora_path` must be a folder in {where}", field="lora_path")
    return source
