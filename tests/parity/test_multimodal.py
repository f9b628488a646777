"""Multimodal checkpoints write the texts of the whole model, in any batch."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.dense import greedy
from support.driver import Job, Rig, make_rig, random_prompts
from support.exact_states import exact, whole_text_greedy
from support.multimodal import FAMILIES, MORE, STATEFUL, tensors_read, whole_model
from support.peft_files import load_lora
from support.zoo import VOCAB_SIZE
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from loraplex_contracts.errors import AdapterUnsupported, UnsupportedModel
from loraplex_contracts.plan import AdapterUse
from loraplex_server.model.loader import LoadedModel, load_model

NUM_TOKENS = 10
QUICK = ("qwen2_vl", "gemma3")
SLOWLY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in MORE]
MEDIA = re.compile("vis|audio|multi_modal|patch")


def load(model: PreTrainedModel, folder: Path) -> LoadedModel:
    model.save_pretrained(folder)
    return load_model(str(folder), dtype="float64", device="cpu")


def prompts() -> list[list[int]]:
    """Some longer than windows, none with tokens that stand for images."""
    found = random_prompts(4, VOCAB_SIZE - 20, seed=3, longest=50)
    return [[token + 20 for token in prompt] for prompt in found]


def written(family: str, model: nn.Module, prompt: list[int]) -> list[int]:
    return (whole_text_greedy if family in STATEFUL else greedy)(model, prompt, NUM_TOKENS)


@pytest.mark.parametrize("family", [*SLOWLY, *NIGHTLY])
def test_equals_the_whole_model(family: str, tmp_path: Path) -> None:
    """Texts equal the whole model's in chunks and beside each other; of the files, only the language model's weights
    are read."""
    whole = whole_model(family)
    with tensors_read() as names:
        loaded = load(whole, tmp_path)
    assert names
    assert not [name for name in names if MEDIA.search(name)]
    num_parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert num_parameters < whole.num_parameters() - 10_000
    rig = make_rig(loaded, seed=3, max_chunk=11)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts()]
    rig.run(jobs)
    assert [job.error for job in jobs] == [None] * len(jobs)
    assert [job.tokens for job in jobs] == [written(family, whole, job.prompt) for job in jobs]
    with torch.inference_mode(), exact(whole):
        for job in jobs:
            logits = whole(input_ids=torch.tensor([job.all_tokens]), use_cache=False).logits[0]
            torch.testing.assert_close(rig.logits(job), logits[len(job.prompt) - 1 : -1], rtol=1e-4, atol=1e-4)
    assert max(len(set(job.tokens)) for job in jobs) > 3


def save_adapters(whole: PreTrainedModel, root: Path, **fields: Any) -> dict[str, PeftModel]:
    """Saves adapters as PEFT writes them for the whole model: some linears of attention, and many with the head."""
    targets = {
        "r4": (4, r".*language_model\.(?!.*experts|.*router).*(q_proj|down_proj|in_proj_qkv)"),
        "r13": (13, r".*language_model\.(?!.*experts|.*router).*(k_proj|o_proj|up_proj|out_proj)|.*lm_head"),
    }
    found: dict[str, PeftModel] = {}
    for seed, (name, (rank, pattern)) in enumerate(targets.items()):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=8, target_modules=pattern, init_lora_weights=False, **fields)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tied heads: what is served is what PEFT computes
            peft = get_peft_model(copy.deepcopy(whole), config)
            with torch.no_grad():
                for path, parameter in peft.named_parameters():
                    if "lora_" in path:
                        parameter.copy_(torch.randn_like(parameter) * 0.25)
            peft.save_pretrained(str(root / name))
        found[name] = peft.eval()
    return found


def rig_with(loaded: LoadedModel, root: Path, names: list[str]) -> Rig:
    rig = make_rig(loaded, seed=4, max_rows=6)
    targets = loaded.base_targets(max_rank=16)
    for slot, name in enumerate(names):
        rig.slots.install(slot, load_lora(root, name, targets))
    return rig


@pytest.mark.parametrize("family", SLOWLY)
def test_mixed_adapters_equal_peft(family: str, tmp_path: Path) -> None:
    whole = whole_model(family)
    peft = save_adapters(whole, tmp_path)
    rig = rig_with(load(whole, tmp_path / "model"), tmp_path, list(peft))
    owners = (None, 0, 1, 0, None, 1)
    jobs = [
        Job(prompt, NUM_TOKENS, () if owner is None else (AdapterUse(owner),))
        for owner, prompt in zip(owners, [*prompts(), *prompts()[1:3]], strict=True)
    ]
    rig.run(jobs)
    models: list[nn.Module] = list(peft.values())
    for owner, job in zip(owners, jobs, strict=True):
        assert job.error is None
        assert job.tokens == written(family, whole if owner is None else models[owner], job.prompt)
    assert jobs[1].tokens != written(family, whole, jobs[1].prompt), "an adapter that changes nothing proves nothing"


def renamed_adapter(folder: Path, target: Path, rename: Callable[[str], str]) -> None:
    target.mkdir()
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())


# Where the language model is: before 4.52 in Transformers, and in 4.52; in the class for texts alone.
@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("qwen2_vl", "model."),
        ("gemma3", "language_model.model."),
        pytest.param("mistral3", "language_model.model.", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "model.", marks=pytest.mark.slow),
    ],
)
def test_knows_other_names_of_the_same_modules(family: str, place: str, tmp_path: Path) -> None:
    whole = whole_model(family)
    save_adapters(whole, tmp_path)
    renamed_adapter(tmp_path / "r4", tmp_path / "other", lambda name: name.replace("model.language_model.", place))
    first, second = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("r4", "other"))
    assert first != second
    loaded = load(whole, tmp_path / "model")
    targets = loaded.base_targets(max_rank=16)
    got = [load_lora(tmp_path, name, targets) for name in ("r4", "other")]
    assert got[0].factors.keys() == got[1].factors.keys()
    for path, factors in got[0].factors.items():
        assert torch.equal(factors.a, got[1].factors[path].a)


@pytest.mark.parametrize("kind", ["qwen2_5_omni", pytest.param("qwen3_omni_moe", marks=pytest.mark.slow)])
def test_serves_the_thinker_of_a_model_that_speaks(kind: str, tmp_path: Path) -> None:
    """So do adapters that name its modules as the whole model has them, in either release of Transformers."""
    thinker = whole_model(f"{kind}_thinker")
    own = thinker.config.to_dict() | {"eos_token_id": 7}
    config = CONFIG_MAPPING[kind](thinker_config=own, enable_audio_output=False)
    config.save_pretrained(tmp_path / "model")
    weights = {f"thinker.{name}": tensor for name, tensor in thinker.state_dict().items()}
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    loaded = load_model(str(tmp_path / "model"), dtype="float64", device="cpu")
    assert loaded.spec.eos_token_ids == ((151645,) if kind == "qwen3_omni_moe" else (7,))  # as its `generate()` has it
    # PEFT takes its pattern for ends of names where experts are in one tensor.
    peft = save_adapters(thinker, tmp_path, exclude_modules=r".*(audio_tower|visual)\..*")["r13"]
    prefix = "base_model.model."
    renamed_adapter(tmp_path / "r13", tmp_path / "v5", lambda name: name.replace(prefix, f"{prefix}thinker."))
    renamed_adapter(tmp_path / "v5", tmp_path / "v4", lambda name: name.replace("language_model.", ""))
    rig = rig_with(loaded, tmp_path, ["v5", "v4"])
    jobs = [Job(prompt, NUM_TOKENS, use) for prompt in prompts() for use in ((), (AdapterUse(0),), (AdapterUse(1),))]
    rig.run(jobs)
    for job in jobs:
        assert job.error is None
        assert job.tokens == greedy(peft if job.adapters else thinker, job.prompt, NUM_TOKENS)


@pytest.mark.parametrize("family", QUICK)
def test_refuses_an_adapter_with_weights_for_images(family: str, tmp_path: Path) -> None:
    whole = whole_model(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(copy.deepcopy(whole), LoraConfig(r=2, target_modules=["q_proj", "qkv", "fc1"]))
        peft.save_pretrained(str(tmp_path / "both"))
    targets = load(whole, tmp_path / "model").base_targets(max_rank=16)
    with pytest.raises(AdapterUnsupported, match=r"(visual|vision).* is served for texts alone"):
        load_lora(tmp_path, "both", targets)


def test_refuses_files_without_some_weights(tmp_path: Path) -> None:
    """Transformers would go on with random ones."""
    whole_model("mistral3").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    missing = next(name for name in tensors if "language_model" in name and name.endswith("q_proj.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, path, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lack 1 of the weights .*q_proj"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("family", ["blip-2", "instructblip", "kosmos-2", "idefics"])
def test_refuses_what_takes_no_text_without_an_image(family: str, tmp_path: Path) -> None:
    whole = whole_model(family)
    whole.config.save_pretrained(tmp_path)  # refused before weights are fetched
    with pytest.raises(UnsupportedModel) as caught:
        load_model(str(tmp_path), device="cpu")
    sentence = f"{type(whole).__name__} takes no text without an image, and images are not served"
    assert caught.value.message == f"{tmp_path} ({family}) cannot be served: {sentence}"
