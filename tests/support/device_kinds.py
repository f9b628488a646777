"""Families of models, kinds of adapters and pooled values on a device.

Whole engines, against Transformers and PEFT in float64 on the CPU. Needs PEFT, and no pytest. All requests of a check
come to one engine, some with drafts, in steps of a few tokens, and more adapters than there are slots.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.mixtures import Member, Mixture
from loraplex_contracts.request import OutputParams, PoolingParams, PositionLogprobs, Request, SpeculationParams
from loraplex_server.speculation.proposer import PROMPT_LOOKUP
from support import device_checks
from support.dense import make_dense
from support.device_checks import Settings, count_replays
from support.exact_states import exact
from support.parity import FORMATS, INVOCATION, LIVE, Names
from support.peft_files import RICH_SPECS, SPECS, save_adapter, save_initialised, save_variant, weighted
from support.pooling_models import classifier, feature_extraction, hidden_states
from support.speculation import Bench, Outcome, make_bench, request
from support.world import byte_tokenizer
from support.zoo import MIXTURES, random_model

NUM_TOKENS = 10
# Their logits are smaller than those of the other checks' model.
TOLERANCES = device_checks.TOLERANCES | {torch.bfloat16: 0.5}
LONGEST = 60  # of prompts
PLAIN, SECOND, HEAD = SPECS[1], SPECS[2], SPECS[3]  # two LoRAs of linears, and one with terms of the head
LOOKUP = SpeculationParams("prompt_lookup", min_ngram=1, max_draft_tokens=3, fixed_length=True)
# PEFT compiles an extension for it where there is a GPU; to the server it is a rotation, as OFT is.
NOT_ON_DEVICES = ("BOFT",)


def base_model(family: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    """A random model in float64, whose numbers `dtype` and float32 can hold."""
    model = random_model(family, torch.float32, changes=changes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    model.set_experts_implementation("eager")  # grouped products have no float64
    return make_dense(model)


def device_bench(model: PreTrainedModel, settings: Settings, root: Path, **options: Any) -> Bench:
    """An engine for a copy of `model` as a server would have it."""
    served = copy.deepcopy(model).to(settings.dtype).to(settings.device)  # type: ignore[arg-type]
    if settings.dtype != torch.float64:
        served.set_experts_implementation(None)  # type: ignore[arg-type]  # Transformers' own choice
    bench = make_bench(served, root, verify=True, max_step_tokens=24, max_running=6, max_draft_tokens=3, **options)
    if settings.replays is not None:
        count_replays(bench.engine, settings.replays)
    return bench


def prompts(num: int, seed: int = 1) -> list[list[int]]:
    """From one token to some chunks, of few tokens, for lookup's sake; the last ones begin as those before."""
    dice = random.Random(seed)
    found = [[dice.randrange(2, 50) for _ in range(dice.randint(1, LONGEST))] for _ in range(num)]
    found[0] = found[0][:1]
    return [*found[:-2], *([*one[: LONGEST // 2], 5, 6] for one in found[:2])] if num > 4 else found


# --- what is right ----------------------------------------------------------------------------------------------------


def whole_logprobs(model: nn.Module, token_ids: Sequence[int]) -> Tensor:
    """Logprobs [num_tokens, vocab] of what follows each token."""
    with torch.inference_mode(), exact(model):
        logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), -1)


def check_answer(outcome: Outcome, model: nn.Module, tolerance: float) -> Tensor:
    """Raises AssertionError unless each token is the best one, or as good up to `tolerance`, and all logprobs are
    right. Returns the logprobs that the tokens should have been drawn from."""
    one, name = outcome.request, outcome.request.request_id
    assert outcome.error is None, f"{name}: {outcome.error}"
    tokens = outcome.tokens[0]
    assert len(tokens) == one.stopping.max_tokens, name
    whole = whole_logprobs(model, [*one.prompt_token_ids, *tokens])
    want = whole[len(one.prompt_token_ids) - 1 : -1]
    missing = float((want.amax(1) - want[range(len(tokens)), tokens]).max())
    assert missing <= tolerance, f"{name}: a token is {missing} worse than the best"
    check_positions(name, outcome.logprobs[0], tokens, want, tolerance)
    if one.output.prompt_logprobs:
        check_positions(name, outcome.prompt_logprobs, one.prompt_token_ids[1:], whole, tolerance)
    return want


def check_positions(
    name: str, found: Sequence[PositionLogprobs], tokens: Sequence[int], want: Tensor, tolerance: float
) -> None:
    """`want`: logprobs [at least num_tokens, vocab]."""
    assert [entry.token_id for entry in found] == list(tokens), name
    for entry, row in zip(found, want, strict=False):
        off = abs(entry.logprob - float(row[entry.token_id]))
        assert off <= tolerance, f"{name}: a logprob is off by {off}"
        best = row.topk(len(entry.top)).values.tolist() if entry.top else []
        for (token_id, logprob), wanted in zip(entry.top, best, strict=True):
            off = max(abs(logprob - float(row[token_id])), abs(logprob - wanted))
            assert off <= tolerance, f"{name}: an alternative is off by {off}"


def asked(name: str, idx: int, prompt: Sequence[int], **fields: Any) -> Request:
    """The `idx`-th request of a check: every other one speculates, every third wants its prompt's logprobs."""
    output = OutputParams(True, 3, prompt_logprobs=idx % 3 == 0)
    one = request(f"{idx} {name}", prompt, NUM_TOKENS, output=output, **fields)
    return replace(one, speculation=LOOKUP) if idx % 2 else one


def check_models(bench: Bench, ones: Mapping[str, tuple[Request, nn.Module]], base: nn.Module, tolerance: float) -> int:
    """Runs requests in one batch; each is what its model says. Then once more: drafts find what was said the first
    time, and prompts their blocks. Returns how many of those with adapters are far from the base model."""
    outcomes = bench.run([one for one, _ in ones.values()], random.Random(2))
    num_far = 0
    for name, (one, model) in ones.items():
        want = check_answer(outcomes[name], model, tolerance)
        if model is not base:
            plain = whole_logprobs(base, [*one.prompt_token_ids, *outcomes[name].tokens[0]])
            num_far += float((plain[len(one.prompt_token_ids) - 1 : -1] - want).abs().max()) > 3 * tolerance
    again = [replace(one, request_id=f"again {name}") for name, (one, _) in ones.items()]
    # Apart from the others, which may have terms of heads: behind these some families cap logits, in no graph.
    plain_ones = [one for one in again if one.adapter_id in ("", PLAIN.name)]
    others = [one for one in again if one not in plain_ones]
    for outcome in (*bench.run(plain_ones).values(), *bench.run(others, random.Random(3)).values()):
        check_answer(outcome, ones[outcome.request.request_id.removeprefix("again ")][1], tolerance)
    accepted, drafted = bench.speculator.accepted[PROMPT_LOOKUP], bench.speculator.drafted[PROMPT_LOOKUP]
    assert drafted > accepted > 10, (drafted, accepted)
    return num_far


# --- checks -----------------------------------------------------------------------------------------------------------


def check_family(settings: Settings, root: Path, family: str) -> None:
    """A family with a LoRA on all linears, one on the head, and where it has experts one on these."""
    base = base_model(family, settings.dtype)
    models: dict[str, nn.Module] = {"": base}
    for seed, spec in enumerate((PLAIN, HEAD)):
        models[spec.name] = save_adapter(base, spec, root / spec.name, seed)
    if family in MIXTURES:
        models["experts"] = save_variant(base, LoraConfig(r=3, target_modules="all-linear"), root / "experts")
    names = [*models, "", *models, *models]
    ones: dict[str, tuple[Request, nn.Module]] = {}
    for idx, (name, prompt) in enumerate(zip(names, prompts(len(names)), strict=True)):
        one = asked(name, idx, prompt, adapter_id=AdapterId(name))
        ones[one.request_id] = one, models[name]
    bench = device_bench(base, settings, root, num_slots=2)
    num_far = check_models(bench, ones, base, TOLERANCES[settings.dtype])
    bench.close()
    assert num_far == sum(bool(name) for name in names)


def check_formats(settings: Settings, root: Path, family: str) -> None:
    """Every kind of adapter that PEFT makes and the server serves, and sums of two; four requests run with six slots
    for three dozen adapters."""
    # The tokens of activated LoRA's invocation are beyond the zoo's vocabulary.
    base = base_model(family, settings.dtype, vocab_size=len(byte_tokenizer()))
    names = Names.of(base)
    models: dict[str, nn.Module] = {"": base}
    for idx, spec in enumerate((*SPECS, *RICH_SPECS)):
        models[spec.name] = save_adapter(base, spec, root / spec.name, seed=idx)
    for idx, kind in enumerate(LIVE[family]):
        if kind not in NOT_ON_DEVICES:
            models[f"kind-{idx}"] = _saved(base, FORMATS[kind](names), root / f"kind-{idx}")
    adapters = [name for name in models if name]
    first, second = PLAIN.name, SECOND.name
    sums = [((first, 0.7), (second, -1.3)), ((first, -0.4), (first, 0.9), (second, 0.5))]
    mixed = {f"sum-{idx}": weighted(base, root, members, "cat") for idx, members in enumerate(sums)}
    ones: dict[str, tuple[Request, nn.Module]] = {}
    every = [*models, *mixed, *adapters[::3], ""]
    for idx, (name, prompt) in enumerate(zip(every, prompts(len(every)), strict=True)):
        activated = [*prompt[:20], *INVOCATION, *prompt[20:40]]
        if name in mixed:
            members = tuple(Member(AdapterId(member), weight) for member, weight in sums[int(name[4:])])
            one = asked(name, idx, activated, mixture=Mixture(members))
        else:
            one = asked(name, idx, activated, adapter_id=AdapterId(name))
        ones[one.request_id] = one, (models | mixed)[name]
    bench = device_bench(base, settings, root, num_slots=6)
    num_far = check_models(bench, ones, base, TOLERANCES[settings.dtype])
    assert bench.engine._cache.usage().device_evictions > 10
    bench.close()
    assert num_far == len(every) - 2


def _saved(base: PreTrainedModel, config: Any, folder: Path) -> PeftModel:
    """PEFT's model of a configuration, also of one that takes parts out of the base, which PEFT does in float32."""
    if getattr(config, "init_lora_weights", True) is True:
        return save_variant(base, config, folder)
    save_initialised(copy.deepcopy(base).float(), config, folder)
    return PeftModel.from_pretrained(copy.deepcopy(base).float(), str(folder)).double().eval()


def check_pooling(settings: Settings, root: Path) -> None:
    """Embeddings, scores of next tokens and labels beside generation."""
    base = base_model("llama", settings.dtype)
    models: dict[str, nn.Module] = {"": base}
    models["lora"] = save_adapter(base, PLAIN, root / "lora")
    models["features"] = feature_extraction(base, root / "features")
    models["texts"] = classifier(base, root / "texts", 3)
    models["tokens"] = classifier(base, root / "tokens", 5, per_token=True)
    kinds: dict[str, tuple[PoolingParams | None, ...]] = {
        "": (
            PoolingParams("embed", "last"),
            PoolingParams("embed", "mean"),
            PoolingParams("next_token", None, (5, 60)),
        ),
        "lora": (PoolingParams("embed", "mean"), None, PoolingParams("next_token", None, (60, 7, 9))),
        "features": (PoolingParams("embed", "last"), PoolingParams("embed", "mean")),
        "texts": (PoolingParams("classify"), PoolingParams("embed", "last")),
        "tokens": (PoolingParams("classify"),),
    }
    wanted = [(name, kind) for name, these in kinds.items() for kind in these] * 2
    ones: list[Request] = []
    for idx, ((name, kind), prompt) in enumerate(zip(wanted, prompts(len(wanted)), strict=True)):
        one = request(f"{idx}", prompt, NUM_TOKENS, adapter_id=AdapterId(name), output=OutputParams(True, 2))
        ones.append(replace(one, pooling=kind, output=OutputParams() if kind else one.output))
    bench = device_bench(base, settings, root, num_slots=2)
    outcomes = bench.run(ones, random.Random(2))
    bench.close()
    tolerance = TOLERANCES[settings.dtype]
    for one in ones:
        outcome, model = outcomes[one.request_id], models[one.adapter_id]
        if one.pooling is None:
            check_answer(outcome, model, tolerance)
            continue
        assert outcome.error is None, outcome.error
        assert outcome.pooled is not None
        found = np.frombuffer(outcome.pooled.values).reshape(-1, outcome.pooled.num_columns)
        want = _pooled(model, one.prompt_token_ids, one.pooling)
        np.testing.assert_allclose(
            found, want, rtol=tolerance, atol=tolerance, err_msg=f"{one.adapter_id} {one.pooling}"
        )


def _pooled(model: nn.Module, prompt: Sequence[int], params: PoolingParams) -> np.ndarray:
    """Values [num_rows, num_columns] by the model's own code."""
    if params.task == "embed":
        states = hidden_states(model, prompt)
        return (states[-1] if params.positions == "last" else states.mean(axis=0))[None]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(prompt)])).logits
    if params.task == "next_token":
        return logits[0, -1, list(params.token_ids)].numpy()[None]
    return (logits[0] if logits.dim() == 3 else logits).numpy()
