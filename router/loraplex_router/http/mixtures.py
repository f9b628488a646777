"""Mixtures of adapters in requests over HTTP: our own fields and LoRAX's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.mixtures import DEFAULT_WEIGHT, MAX_MEMBERS
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.fields import Fields, Member, Merge, MergedAdapters, MixtureFields, adapter_of, unicode_text

# Options of each of LoRAX's strategies; other options are left aside, as there.
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": (),
    "ties": ("density", "majority_sign"),
    "dare_linear": ("density",),
    "dare_ties": ("density", "majority_sign"),
    "magnitude_prune": ("density",),
}
EXACT: Final = "cat"  # PEFT's name of the exact sum


def put_mixture(request: pb.GenerateRequest, given: MixtureFields, base_names: Sequence[str]) -> None:
    """Puts the mixture into the request. Raises InvalidArgument, with the field's name. A worker checks the rest."""
    members, merge, merged = given.adapters, given.merge, given.merged_adapters
    if merged is not None:
        if members or merge is not None:
            raise InvalidArgument("give `merged_adapters` or `adapters`, not both", field="merged_adapters")
        _refuse_others(merged, "merged_adapters")
        members, merge = _translated(merged)
    field = "adapters" if merged is None else "merged_adapters"
    if not members:
        if merge is not None:
            raise InvalidArgument("`merge` goes with `adapters`: name those to merge", field="merge")
        return
    if request.adapter_id:
        raise InvalidArgument(f"give one adapter or `{field}`, not both", field=field)
    if len(members) > MAX_MEMBERS:
        raise InvalidArgument(f"`{field}` takes {MAX_MEMBERS} adapters; there are {len(members)}", field=field)
    for member in members:
        _refuse_others(member, field)
        adapter_id = adapter_of(unicode_text(member.id, field), base_names)
        if not adapter_id:
            raise InvalidArgument(f"`{field}` names the base model, which is not an adapter", field=field)
        request.adapters.add(id=adapter_id, weight=member.weight)
    if merge is not None:
        _refuse_others(merge, "merge")
        request.merge.strategy = unicode_text(merge.strategy, "merge.strategy")
        if merge.density is not None:
            request.merge.density = merge.density
        request.merge.majority_sign = unicode_text(merge.majority_sign or "", "merge.majority_sign")
        if merge.seed is not None:
            request.merge.seed = merge.seed


def recipe_of(request: pb.GenerateRequest) -> dict[str, Any]:
    """A mixture's recipe, for answers: its adapters, and how they were merged; empty for other requests."""
    if not request.adapters:
        return {}
    found: dict[str, Any] = {"adapters": [{"id": one.id, "weight": one.weight} for one in request.adapters]}
    if request.HasField("merge"):
        merge = request.merge
        found["merge"] = {
            "strategy": merge.strategy,
            **({"density": merge.density} if merge.HasField("density") else {}),
            **({"majority_sign": merge.majority_sign} if merge.majority_sign else {}),
            **({"seed": merge.seed} if merge.HasField("seed") else {}),
        }
    return found


def _refuse_others(fields: Fields, field: str) -> None:
    if extras := fields.extras():
        raise InvalidArgument(f"`{field}` has an unknown field {next(iter(extras))[:40]!a}", field=field)


def _translated(merged: MergedAdapters) -> tuple[list[Member], Merge | None]:
    """Members and merge of LoRAX's mixture, which is merged by `linear` where nothing else is said."""
    weights = merged.weights or [DEFAULT_WEIGHT] * len(merged.ids)
    if not merged.ids or len(weights) != len(merged.ids):
        raise InvalidArgument(
            f"`merged_adapters` has {len(merged.ids)} ids and {len(weights)} weights; give one weight for each of at "
            "least one id, or no weights",
            field="merged_adapters",
        )
    members = [Member(id=one, weight=weight) for one, weight in zip(merged.ids, weights, strict=True)]
    strategy = (merged.merge_strategy or "linear").lower()  # LoRAX reads these names in any case
    if strategy == EXACT:
        return members, None
    if strategy not in _OPTIONS:
        raise InvalidArgument(
            f"`merged_adapters` takes a merge_strategy of {', '.join((*_OPTIONS, EXACT))}; it is {strategy[:40]!a}",
            field="merged_adapters",
        )
    given = {
        "density": merged.density,
        "majority_sign": merged.majority_sign_method and merged.majority_sign_method.lower(),
    }
    return members, Merge.model_validate({"strategy": strategy} | {name: given[name] for name in _OPTIONS[strategy]})
