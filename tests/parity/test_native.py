"""Models on native CPU kernels equal Transformers and PEFT.

In float32 they equal Transformers and PEFT. In every dtype, on every instruction set, a text is the same to the last
bit of its logits, whatever else is in the batch and however it was drafted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BOFTConfig, IA3Config, LoraConfig, OFTConfig, PeftConfig, PeftModel
from support.dense import check_logits, dense_logits, generated_logits, make_dense
from support.driver import Job, Rig, make_rig, random_prompts
from support.lora_cases import bits
from support.native_kernels import best_first, isas, native_kernels, using
from support.native_models import NOT_STACKED, OWN_MIXERS, STACKED, native_model, native_rig, rounded_model
from support.peft_files import RICH_SPECS, SPECS, LoraSpec, load_lora, save_adapter, save_variant
from support.speculation import World, draft_proposer, loopy, make_bench, request
from support.zoo import VOCAB_SIZE
from torch import nn
from transformers import PreTrainedModel

from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.plan import AdapterUse
from loraplex_contracts.request import OutputParams, Request, SamplingParams, SpeculationParams
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.layers.quantization import INT4, INT8, WeightFormat
from loraplex_server.model.loader import adopt_model
from loraplex_server.speculation.proposer import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP

NUM_TOKENS = 10
DTYPES = [torch.float32, torch.bfloat16]
MIXTURES = [(AdapterUse(1, 0.6), AdapterUse(2, -0.4)), (AdapterUse(5, 0.5), AdapterUse(0, 0.5), AdapterUse(1, 0.25))]


@pytest.fixture(params=best_first())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


@pytest.fixture
def best() -> Iterator[str]:
    with using(isas()[0]):
        yield isas()[0]


# --- float32 against Transformers -------------------------------------------------------------------------------------


def check_family(family: str, rig: Rig, model: PreTrainedModel, seed: int) -> None:
    jobs = [Job(prompt, NUM_TOKENS) for prompt in random_prompts(7, VOCAB_SIZE, seed=seed, longest=40)]
    rig.run(jobs)
    assert [job.error for job in jobs] == [None] * len(jobs)
    make_dense(model)
    for job in jobs:
        check_logits(rig.logits(job), dense_logits(model, job.prompt, job.tokens), job.tokens)
    assert len({tuple(job.tokens) for job in jobs}) > 4, "the model says the same to everything"


@pytest.mark.parametrize("family", [*STACKED, *OWN_MIXERS, *NOT_STACKED])
def test_equals_transformers(best: str, family: str) -> None:
    model = native_model(family, seed=3)
    rig = native_rig(model, native_kernels(), seed=3)
    assert (rig.loaded.decoder is None) == (family in NOT_STACKED)
    check_family(family, rig, model, seed=3)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 24,
            "short_factor": [1.0 + 0.1 * i for i in range(16)],
            "long_factor": [2.0 + 0.5 * i for i in range(16)],
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rotations_by_a_texts_length(family: str, rope: dict[str, Any]) -> None:
    """Texts pass the length from which on rotations are scaled, each at another step."""
    model = native_model(family, seed=3, rope_parameters=rope, max_position_embeddings=24 if "factor" in rope else 96)
    rig = native_rig(model, native_kernels(), seed=3)
    assert rig.loaded.decoder is not None
    assert rig.loaded.direct is None
    jobs = [Job(prompt, NUM_TOKENS) for prompt in random_prompts(7, VOCAB_SIZE, seed=3, longest=40)]
    rig.run(jobs)
    assert [job.error for job in jobs] == [None] * len(jobs)
    for job in jobs:
        check_logits(rig.logits(job), generated_logits(model, job.prompt, NUM_TOKENS).float(), job.tokens)


def test_equals_transformers_on_every_instruction_set(isa: str) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("llama", {"intermediate_size": 75, "hidden_size": 74}),  # in float32 features need not pack
        ("qwen3", {"num_attention_heads": 18, "num_key_value_heads": 1}),
        ("starcoder2", {"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 1}),
        ("mistral", {"head_dim": 96, "sliding_window": 20}),
        ("gpt_neox", {"hidden_size": 320, "num_attention_heads": 5}),  # positions turn 16 features of 64
        ("qwen2", {"hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}),
    ]
    for family, changes in cases:
        model = native_model(family, seed=4, **changes)
        rig = native_rig(model, native_kernels(3), seed=5, max_chunk=33)
        assert rig.loaded.decoder is not None, family
        check_family(family, rig, model, seed=6)


# --- float32 against PEFT ---------------------------------------------------------------------------------------------


@dataclass
class Adapted:
    """A base model, PEFT's models of all adapters, and their files as the server reads them."""

    base: PreTrainedModel
    peft: list[PeftModel]
    root: Path

    def load(self, rig: Rig) -> list[AdapterWeights]:
        targets = rig.loaded.base_targets(max_rank=16)
        return [load_lora(self.root, spec.name, targets) for spec in SPECS]

    def rig(self, num_threads: int = 2, **options: object) -> Rig:
        """A rig that holds adapter i in slot i."""
        rig = native_rig(self.base, native_kernels(num_threads), **options)
        for slot, weights in enumerate(self.load(rig)):
            rig.slots.install(slot, weights)
        return rig

    def reference(self, owner: int | None) -> nn.Module:
        return self.base if owner is None else self.peft[owner]


def make_adapted(root: Path, family: str, dtype: torch.dtype = torch.float32) -> Adapted:
    base = make_dense(native_model(family, dtype))
    return Adapted(base, [save_adapter(base, spec, root / spec.name, seed) for seed, spec in enumerate(SPECS)], root)


def mixed_jobs(seed: int = 8, longest: int = 30) -> list[Job]:
    """Every adapter, some mixtures, and none."""
    uses: list[tuple[AdapterUse, ...]] = [(), *((AdapterUse(slot),) for slot in range(len(SPECS))), *MIXTURES, ()]
    prompts = random_prompts(len(uses), VOCAB_SIZE, seed=seed, longest=longest)
    return [Job(prompt, NUM_TOKENS, adapters) for prompt, adapters in zip(prompts, uses, strict=True)]


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4-keys",
        "granite",
        "phi3",
        "mixtral",
        "llama-gelu",
        "starcoder2",
        "gpt_neox",
        "gpt_neox-sequential",
        "glm4",
        "ministral3",
        "llama-40",
        "gpt_neox-40",
        "qwen3_5",
        "granite4",
        "granite4-experts",
        "bamba",
    ],
)
def test_mixed_batch_equals_peft(best: str, family: str, tmp_path: Path) -> None:
    adapted = make_adapted(tmp_path, family)
    rig = adapted.rig(seed=4, max_rows=6)
    jobs = mixed_jobs()
    rig.run(jobs)
    torch_rig = make_rig(adopt_model(adapted.base), max_rows=6)  # for mixtures, which PEFT only merges
    for slot, weights in enumerate(adapted.load(torch_rig)):
        torch_rig.slots.install(slot, weights)
    for job in jobs:
        assert job.error is None
        if len(job.adapters) < 2:
            owner = job.adapters[0].adapter_slot if job.adapters else None
            peft = adapted.peft[owner] if owner is not None else None
            want = dense_logits(peft, job.prompt, job.tokens) if peft is not None else None
        else:
            want = None
        if want is None:
            twin = Job(job.prompt, NUM_TOKENS, job.adapters)
            torch_rig.run([twin])
            want = torch_rig.logits(twin)
            assert twin.tokens == job.tokens
        check_logits(rig.logits(job), want, job.tokens)


def test_saved_layer_norms_equal_peft(best: str, tmp_path: Path) -> None:
    """The stack computes the base model's alone; rows of an adapter that has its own go through the model's layers."""
    base = make_dense(native_model("starcoder2"))
    spec = next(spec for spec in RICH_SPECS if spec.name == "saved-norms")
    peft = save_adapter(base, spec, tmp_path / spec.name, seed=3)
    rig = native_rig(base, native_kernels(), max_rows=6)
    assert rig.loaded.decoder is not None
    rig.slots.install(0, load_lora(tmp_path, spec.name, rig.loaded.base_targets(max_rank=16)))
    jobs = [Job([5, 6, 7 + idx], NUM_TOKENS, adapters) for idx, adapters in enumerate([(), (AdapterUse(0),), ()])]
    rig.run(jobs)
    for job in jobs:
        want = dense_logits(peft if job.adapters else base, job.prompt, job.tokens)
        check_logits(rig.logits(job), want, job.tokens)


@pytest.mark.parametrize("family", ["granite4", "bamba"])
def test_saved_norms_of_mixers_equal_peft(best: str, family: str, tmp_path: Path) -> None:
    """Those with gates, of Mamba 2, as well; rows beside keep the base's."""
    base = make_dense(native_model(family))
    norms = {path.rpartition(".")[2] for path, one in base.named_modules() if "norm" in type(one).__name__.lower()}
    config = LoraConfig(r=2, target_modules=["in_proj"], modules_to_save=sorted(norms))
    peft = save_variant(base, config, tmp_path / "norms")
    rig = native_rig(base, native_kernels(), max_rows=6)
    assert any(path.endswith(".mamba.norm") for path in rig.slots.norm_ptrs)
    rig.slots.install(1, load_lora(tmp_path, "norms", rig.loaded.base_targets(max_rank=16)))
    jobs = [Job([5, 6, 7 + idx], NUM_TOKENS, adapters) for idx, adapters in enumerate([(), (AdapterUse(1),), ()])]
    rig.run(jobs)
    for job in jobs:
        want = dense_logits(peft if job.adapters else base, job.prompt, job.tokens)
        check_logits(rig.logits(job), want, job.tokens)


# --- bits -------------------------------------------------------------------------------------------------------------


EMBEDDING = next(slot for slot, spec in enumerate(SPECS) if spec.targets == "embedding")
HEAD = 3  # SPECS[3]


def in_both(families: Sequence[str], quick: Sequence[str], also_quick: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Families in both dtypes. `quick`: those whose float32 is not slow; bfloat16 is not slow in these, nor in
    `also_quick`."""

    def marks(family: str, dtype: torch.dtype) -> Sequence[pytest.MarkDecorator]:
        is_quick = family in quick or (dtype == torch.bfloat16 and family in also_quick)
        return () if is_quick else (pytest.mark.slow,)

    return pytest.mark.parametrize(
        ("family", "dtype"),
        [pytest.param(family, dtype, marks=marks(family, dtype)) for family in families for dtype in DTYPES],
    )


def same_bits(rig: Rig, job: Job, other_rig: Rig, other: Job) -> bool:
    return torch.equal(bits(rig.logits(job)), bits(other_rig.logits(other))) and job.tokens == other.tokens


BITWISE = (
    *("llama", "qwen3", "gemma3", "gemma4", "llama-gelu", "qwen3_moe", "gpt_neox", "glm4", "deepseek_v2"),
    *("qwen3-40", "qwen3_5", "granite4", "granite4-channels"),
)


@in_both(BITWISE, quick=("llama", "qwen3_5"), also_quick=BITWISE)
def test_logits_have_the_same_bits_in_any_batch(isa: str, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A text has the same bits alone and together, cut into chunks of any size, in steps of a few tokens and of more
    than a hundred, with and without drafts, by one thread and by three."""
    adapted = make_adapted(tmp_path, family, dtype)
    calm = adapted.rig(1, max_rows=1, max_chunk=200, num_blocks=400)
    assert (calm.loaded.decoder is None) == (family in NOT_STACKED)
    alone = bitwise_jobs()
    for job in alone:
        calm.run([job])
    for seed, (num_threads, max_rows, max_chunk) in enumerate([(3, 10, 5), (2, 4, 200), (1, 10, 90), (3, 10, 200)]):
        rig = adapted.rig(num_threads, seed=seed, max_rows=max_rows, max_chunk=max_chunk, num_blocks=400)
        jobs = bitwise_jobs()
        for job, twin in zip(jobs, alone, strict=True):
            job.propose = drafting(twin, seed) if seed % 2 else None
        rig.run(jobs)
        for job, twin in zip(jobs, alone, strict=True):
            assert same_bits(rig, job, calm, twin), (seed, job.adapters)
        assert (sum(job.num_accepted for job in jobs) > 10) == bool(seed % 2)


OTHER_INPUTS: dict[str, PeftConfig] = {
    "ia3": IA3Config(target_modules=["k_proj", "up_proj", "down_proj"], feedforward_modules=["up_proj", "down_proj"]),
    "oft": OFTConfig(oft_block_size=8, target_modules=["q_proj", "v_proj", "down_proj"], num_cayley_neumann_terms=6),
    "oft-shared": OFTConfig(oft_block_size=4, target_modules=["o_proj", "gate_proj"], block_share=True),
    "oft-of-one": OFTConfig(oft_block_size=1, target_modules=["q_proj", "down_proj"], block_share=True),
    "boft": BOFTConfig(boft_block_size=8, target_modules=["q_proj", "down_proj"]),
}


@in_both(
    ("llama", "gemma3", "gemma4", "gemma4-keys", "llama-gelu", "ministral3"), quick=("llama",), also_quick=("gemma4",)
)
def test_rows_beside_richer_adapters_have_the_same_bits(
    best: str, family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Some rows of a linear are computed by the model's own layers; DoRA, biases, saved norms and linears, scaled and
    rotated inputs and the adapters beside them by the stack."""
    base = make_dense(native_model(family, dtype))
    specs = (
        SPECS[0],
        *(spec for spec in RICH_SPECS if spec.name in ("dora", "saved-norms", "saved-head", "lora-bias")),
        LoraSpec("saved-linear", 3, 4, "attention", {"modules_to_save": ["linear"]}),
    )
    assert len(specs) == 6
    peft = [save_adapter(base, spec, tmp_path / spec.name, seed) for seed, spec in enumerate(specs)]
    peft += [save_variant(base, config, tmp_path / name) for name, config in OTHER_INPUTS.items()]
    last = LoraSpec("linear-rows", 3, 4, "attention", {"trainable_token_indices": {"up_proj": [3, 5]}})
    peft.append(save_adapter(base, last, tmp_path / last.name))
    names = [*(spec.name for spec in specs), *OTHER_INPUTS, last.name]
    adapted = Adapted(base, peft, tmp_path)

    def make(max_rows: int, max_chunk: int) -> Rig:
        rig = native_rig(
            base, native_kernels(), seed=5, max_rows=max_rows, max_chunk=max_chunk, num_blocks=400, num_slots=len(names)
        )
        for slot, name in enumerate(names):
            rig.slots.install(slot, load_lora(tmp_path, name, rig.loaded.base_targets(max_rank=16)))
        return rig

    def jobs() -> list[Job]:
        uses = [(), *((AdapterUse(slot),) for slot in range(len(names))), (), (AdapterUse(0, 0.5),)]
        prompts = random_prompts(len(uses), VOCAB_SIZE, seed=9, longest=60)
        return [Job(prompt, NUM_TOKENS, use) for prompt, use in zip(prompts, uses, strict=True)]

    calm, alone = make(1, 200), jobs()
    assert calm.loaded.decoder is not None
    for job in alone:
        calm.run([job])
        assert job.error is None
        if dtype is torch.float32 and len(job.adapters) == 1 and job.adapters[0].weight == 1.0:
            want = dense_logits(adapted.peft[job.adapters[0].adapter_slot], job.prompt, job.tokens)
            check_logits(calm.logits(job), want, job.tokens)
    tolerance = (1e-5 if dtype == torch.float32 else 4e-2) * float(calm.logits(alone[-3]).abs().max())
    for max_rows, max_chunk in ((12, 5), (12, 200), (3, 17)):
        rig, together = make(max_rows, max_chunk), jobs()
        rig.run(together)
        for job, twin in zip(together, alone, strict=True):
            by_torch = job.adapters == (AdapterUse(len(names) - 1),)  # products by torch depend on their rows
            if family == "llama-gelu":  # feed-forward modules of the model's own
                by_torch = job.adapters not in ((), (AdapterUse(0),))
            if by_torch:
                torch.testing.assert_close(rig.logits(job)[0], calm.logits(twin)[0], rtol=0, atol=tolerance)
            else:
                assert same_bits(rig, job, calm, twin), (max_rows, max_chunk, job.adapters)


def bitwise_jobs() -> list[Job]:
    return mixed_jobs(longest=90)


def drafting(twin: Job, seed: int):  # type: ignore[no-untyped-def]
    """Proposes the truth, with mistakes."""
    dice = random.Random(seed)
    text = twin.all_tokens

    def propose(so_far: list[int]) -> list[int]:
        truth = text[len(so_far) : len(so_far) + dice.randint(0, 4)]
        return [(token + 1) % VOCAB_SIZE if dice.random() < 0.3 else token for token in truth]

    return propose


def test_adapters_come_and_go_while_others_run(isa: str, tmp_path: Path) -> None:
    """Slots that nobody uses change between any two steps, and ranks with them; those who run notice nothing."""
    adapted = make_adapted(tmp_path, "llama", torch.bfloat16)
    calm = adapted.rig()
    alone = mixed_jobs()[:3]
    for job in alone:
        calm.run([job])
    rig = native_rig(adapted.base, native_kernels(), max_rows=3)
    weights = adapted.load(rig)
    for slot in (0, 1):
        rig.slots.install(slot, weights[slot])
    dice = random.Random(1)
    ranks: list[int] = []

    def churn(_: object) -> None:
        rig.slots.install(dice.randrange(2, 4), dice.choice([None, *weights]))
        ranks.append(rig.slots.max_rank)

    rig.on_plan = churn
    for _ in range(3):
        jobs = [Job(job.prompt, NUM_TOKENS, job.adapters) for job in alone]
        rig.run(jobs)
        for job, twin in zip(jobs, alone, strict=True):
            assert same_bits(rig, job, calm, twin)
    assert len(set(ranks)) > 2
    # A slot that was cleared and filled with another adapter serves that one from the next step on.
    rig.on_plan = None
    for slot in (5, 4, 1):
        rig.slots.install(0, weights[slot])
        got, want = Job([5, 6, 7], NUM_TOKENS, (AdapterUse(0),)), Job([5, 6, 7], NUM_TOKENS, (AdapterUse(slot),))
        rig.run([got])
        calm.run([want])
        assert same_bits(rig, got, calm, want)


# --- weights in few bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "family", "dtype"),
    [
        # Every family in both forms, each in one dtype, and in the other in the long suite.
        pytest.param(form, family, DTYPES[(i + j + k) % 2], marks=pytest.mark.slow if k else ())
        for i, form in enumerate((INT8, INT4))
        for j, family in enumerate(
            ("llama", "qwen2", "qwen3", "gemma2", "gemma4", "gpt2", "phi3", "qwen3_moe", "qwen3_5", "granite4")
        )
        for k in range(2)
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_few_bits_are_the_rounded_model(
    isa: str, form: WeightFormat, family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Logits equal the rounded model's to the last bit, adapters and drafts included; in float32 they equal
    Transformers' within rounding."""
    adapted = make_adapted(tmp_path, family, dtype)
    kernels = native_kernels()
    rounded = rounded_model(adapted.base, form)
    rigs = native_rig(adapted.base, kernels, form, max_rows=6), native_rig(rounded, kernels, max_rows=6)
    assert (rigs[0].loaded.decoder is None) == (family in NOT_STACKED)
    # PEFT saves a copy of the head or embedding beside an adapter of it: of the model itself, not the rounded one.
    saved = {HEAD, EMBEDDING} if adapted.base.config.tie_word_embeddings else {HEAD}
    ran: list[list[Job]] = []
    for seed, rig in enumerate(rigs):
        for slot, weights in enumerate(adapted.load(rig)):
            rig.slots.install(slot, weights)
        ran.append([job for job in mixed_jobs() if not saved.intersection(use.adapter_slot for use in job.adapters)])
        for job, twin in zip(ran[-1], ran[0], strict=True):
            job.propose = drafting(twin, seed) if seed else None
        rig.run(ran[-1])
    for job, twin in zip(*ran, strict=True):
        assert job.error is None
        assert same_bits(rigs[0], job, rigs[1], twin)
        if dtype == torch.float32 and not job.adapters:
            check_logits(rigs[0].logits(job), dense_logits(rounded, job.prompt, job.tokens), job.tokens)


# --- whole engines ----------------------------------------------------------------------------------------------------

KINDS = (
    ("", SpeculationParams("medusa", medusa_id="heads", fixed_length=True)),
    ("", SpeculationParams("prompt_lookup", min_ngram=1, max_ngram=3, fixed_length=True)),
    ("", SpeculationParams("draft_model", draft_name="same", max_draft_tokens=3)),
    ("", SpeculationParams("auto", medusa_id="heads")),
    ("", SpeculationParams("off")),
    ("lora", SpeculationParams("medusa", medusa_id="heads")),
    ("lora", SpeculationParams("prompt_lookup", min_ngram=1)),
    ("lora", SpeculationParams("draft_model", draft_name="same")),
    ("head", SpeculationParams("auto", medusa_id="heads", max_draft_tokens=5)),
    ("head", SpeculationParams("off")),
)


@pytest.mark.parametrize(
    ("dtype", "form"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, INT8), (torch.bfloat16, INT4)],
    ids=["float32", "bfloat16", "int8", "int4"],
)
def test_texts_survive_scheduling_and_every_proposer(
    isa: str, dtype: torch.dtype, form: WeightFormat | None, tmp_path: Path
) -> None:
    """Prefix hits, forks, preemption, drafts of every kind, sampling: token for token, and logprob for logprob, what
    the same request gets alone. In few bits, alone from the rounded model."""
    kernels = native_kernels()
    model = make_dense(loopy(native_model("llama", dtype), 0.2))
    world = World(rounded_model(model, form) if form is not None else model, tmp_path, CpuBackend(kernels))
    world.add_lora("lora", SPECS[1], seed=1)
    # PEFT saves a copy of the head beside an adapter of it; an adapter of the rounded head is of another model.
    world.add_lora("head", SPECS[2 if form is not None else 3], seed=2)
    dice = random.Random(3)
    opening = [dice.randrange(2, VOCAB_SIZE) for _ in range(21)]
    asked: list[Request] = []
    for number in range(4):
        prompt = [*opening[: dice.randint(0, 21)], dice.randrange(2, VOCAB_SIZE)]
        sampling = SamplingParams(temperature=0.7 * (number % 2), seed=number, top_k=40)
        asked += [
            request(
                f"{number}: {adapter_id} {kind}",
                prompt,
                14,
                sampling=sampling,
                adapter_id=adapter_id,
                output=OutputParams(True, 2),
                n=1 + (number == 2),
            )
            for adapter_id, kind in KINDS
        ]
    world.add_heads("heads", [one for one in asked if not one.adapter_id][:2], 3)
    asked = [replace(one, speculation=KINDS[idx % len(KINDS)][1]) for idx, one in enumerate(asked)]
    dice.shuffle(asked)
    drafts = {"same": draft_proposer(model, num_target_ids=VOCAB_SIZE)}
    sizes: dict[str, Any] = {"num_blocks": 22, "max_running": 7, "max_step_tokens": 13}
    bench = make_bench(model, tmp_path, backend=CpuBackend(kernels), drafts=drafts, form=form, **sizes)
    assert bench.engine._runner._loaded.decoder is not None  # type: ignore[attr-defined]
    bench.load("lora", "head", "heads")
    outcomes = bench.run(asked, dice)
    world.check(outcomes)
    assert bench.num_preemptions > 0
    assert any(end.num_cached_tokens for outcome in outcomes.values() for end in outcome.ends.values())
    accepted = bench.speculator.accepted
    assert all(accepted[kind] > 0 for kind in (MEDUSA, PROMPT_LOOKUP, DRAFT_MODEL)), accepted
    bench.close()
    world.close()
