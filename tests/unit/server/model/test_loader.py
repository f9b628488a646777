"""Model loading: probe results and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.zoo import MAX_LEN, WINDOW, random_model
from torch import Tensor, nn

from loraplex_contracts.errors import InvalidArgument, UnsupportedModel
from loraplex_server.layers.attention import (
    SERVING,
    AttentionSpec,
    KvCache,
    ModelSpec,
    Reach,
    describe_mask,
    kv_block_bytes,
    probing_mask,
)
from loraplex_server.model.loader import (
    adopt_model,
    eos_token_ids_of,
    generation_defaults,
    load_model,
    resolve_device,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "x"),
        ("hidden_size", 64),  # not that of the weights
        ("head_dim", -1),
        ("num_attention_heads", 0),
        ("num_hidden_layers", 0),
        ("max_position_embeddings", -1),
        ("rope_parameters", {"rope_type": "yarn", "factor": "x"}),
        ("rope_parameters", {"rope_type": "dynamic", "factor": float("inf"), "rope_theta": 1e4}),
        ("layer_types", ["full_attention"]),
        ("hidden_act", "no such function"),
        ("model_type", []),
        ("dtype", "no such dtype"),
        ("text_config", [1]),
        ("quantization_config", "x"),
    ],
)
def test_a_configuration_of_any_kind_is_read_or_refused(name: str, value: Any, tmp_path: Path) -> None:
    random_model("llama", torch.float32).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(UnsupportedModel, match=r"cannot be (loaded|served): .* .*"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        (
            "config.json",
            {"torch_dtype": "torch.bfloat16", "dtype": None},
            "has the dtype 'torch.bfloat16', which torch",
        ),
        ("config.json", {"dtype": "int8"}, "has the dtype torch.int8, which is not served; give another by --dtype"),
        ("generation_config.json", [], "its generation_config.json is not valid .*; mend or remove it"),
        ("generation_config.json", {"max_new_tokens": -1}, "is not valid .*must be greater than 0"),
        ("generation_config.json", {"watermarking_config": "x"}, "generation_config.json is not valid"),
    ],
)
def test_a_configuration_that_transformers_fails_on_is_named(
    file: str, fields: Any, reason: str, tmp_path: Path
) -> None:
    random_model("llama", torch.float32).save_pretrained(tmp_path)
    path = tmp_path / file
    said = json.loads(path.read_text()) | fields if isinstance(fields, dict) else fields
    path.write_text(json.dumps(said))
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(str(tmp_path), device="cpu")


def test_a_dtype_for_each_part_is_served(tmp_path: Path) -> None:
    random_model("llama", torch.float32).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": {"": "bfloat16", "model": "bfloat16"}}))
    assert load_model(str(tmp_path), device="cpu").model.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"[" * 100_000, b"\xff" * 64])
def test_damaged_files_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    random_model("llama", torch.float32).save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"cannot be loaded: .* .*"):
        load_model(str(tmp_path), device="cpu")


class Shifting(nn.Module):
    """A module that mixes each token with the one before it, as token shifts and short convolutions do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 0.5 * torch.roll(x, 1, dims=1))


class Stretching(nn.Module):
    """A rotation that depends on the longest position in sight."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.inner(x, position_ids * (2 if int(position_ids.max()) > 32 else 1))


def test_refuses_what_mixes_tokens_outside_attention() -> None:
    model = random_model("llama")
    model.model.layers[1].mlp = Shifting(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="neighbouring tokens"):
        adopt_model(model)


def test_refuses_positions_that_change_their_neighbours() -> None:
    model = random_model("llama")
    model.model.rotary_emb = Stretching(model.model.rotary_emb)
    with pytest.raises(UnsupportedModel, match="rotation"):
        adopt_model(model)


def test_refuses_attention_beside_the_interface() -> None:
    """One layer whose attention never reaches our function."""
    model = random_model("llama")

    class Own(nn.Module):
        def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
            return hidden_states, None

    model.model.layers[0].self_attn = Own()
    with pytest.raises(UnsupportedModel, match="1 of its 2 layers"):
        adopt_model(model)


def test_refuses_damaged_weights() -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(UnsupportedModel, match="NaN"):
        adopt_model(model)


def test_refuses_what_the_probe_does_not_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention option that nobody here knows: the comparison with Transformers' own attention notices."""
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def eager(module: nn.Module, query: Tensor, *args: Any, **options: Any) -> Any:
        return own(module, query * 1.5, *args, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager)
    with pytest.raises(UnsupportedModel, match="off by"):
        adopt_model(random_model("llama"))
    adopt_model(random_model("llama"), verify=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2"])
def test_every_dtype_passes_its_own_check(family: str, dtype: torch.dtype) -> None:
    assert adopt_model(random_model(family, dtype)).dtype is dtype


def test_a_missing_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_model(str(tmp_path / "nowhere"), device="cpu")


def test_options_are_checked(tmp_path: Path) -> None:
    random_model("llama", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgument, match="dtype"):
        load_model(str(tmp_path), dtype="int3", device="cpu")
    with pytest.raises(InvalidArgument, match="device"):
        load_model(str(tmp_path), device="toaster")
    told: list[str] = []
    with pytest.raises(InvalidArgument, match="--max-context"):
        load_model(str(tmp_path), device="cpu", max_context_tokens=MAX_LEN + 1, progress=told.append)
    assert told == [], "no weights were read for it"
    assert load_model(str(tmp_path), device="cpu", max_context_tokens=64).spec.max_context_tokens == 64


@pytest.mark.parametrize(
    ("rope", "usual", "most"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": MAX_LEN}, 4 * MAX_LEN, 4 * MAX_LEN),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": MAX_LEN // 4}, MAX_LEN, MAX_LEN),
        ({"rope_type": "linear", "factor": 4.0}, MAX_LEN, 4 * MAX_LEN),
        ({"rope_type": "dynamic", "factor": 2.0}, 2 * MAX_LEN, 2 * MAX_LEN),
        ({"rope_type": "dynamic", "factor": 0.01}, MAX_LEN, MAX_LEN),
    ],
    ids=["yarn", "yarn within", "linear", "dynamic", "dynamic below one"],
)
def test_contexts_of_scaled_rotations(tmp_path: Path, rope: dict[str, Any], usual: int, most: int) -> None:
    random_model("llama", torch.float32, changes={"rope_parameters": {**rope, "rope_theta": 1e4}}).save_pretrained(
        tmp_path
    )
    assert load_model(str(tmp_path), device="cpu").spec.max_context_tokens == usual
    assert load_model(str(tmp_path), device="cpu", max_context_tokens=most).spec.max_context_tokens == most
    with pytest.raises(InvalidArgument, match=f"must be 2 to {most}"):
        load_model(str(tmp_path), device="cpu", max_context_tokens=most + 1)


@pytest.mark.parametrize(
    ("family", "windows", "softcap"),
    [
        ("llama", (None, None), None),
        ("mistral", (WINDOW, WINDOW), None),
        ("qwen2-window", (None, WINDOW), None),
        ("gemma2", (WINDOW, None), 5.0),
        ("gemma3", (WINDOW, None), None),
        ("starcoder2", (WINDOW, WINDOW), None),
        ("cohere2", (WINDOW, None), None),
        ("gpt_oss", (WINDOW, None), None),
        ("llama4-chunks", (None, None), None),
    ],
)
def test_probe_finds_windows_and_caps(family: str, windows: tuple[int | None, ...], softcap: float | None) -> None:
    spec = adopt_model(random_model(family)).spec
    assert tuple(layer.window for layer in spec.layers) == windows
    assert {layer.softcap for layer in spec.layers} == {softcap}


def test_probe_finds_chunks_and_sinks() -> None:
    chunked = adopt_model(random_model("llama4-chunks")).spec
    assert [layer.chunk for layer in chunked.layers] == [WINDOW + 1, None]
    model = random_model("gpt_oss", torch.bfloat16)
    want = [layer.self_attn.sinks.float() for layer in model.model.layers]
    got = [layer.sinks for layer in adopt_model(model).spec.layers]
    assert all(one is not None and torch.equal(one, sinks) for one, sinks in zip(got, want, strict=True))


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_probe_finds_whose_keys_a_layer_is_given(family: str) -> None:
    spec = adopt_model(random_model(family)).spec
    assert [layer.source for layer in spec.layers] == [None, None, 0, 1]
    assert kv_block_bytes(spec, 4, 2) == kv_block_bytes(replace(spec, layers=spec.layers[:2]), 4, 2)
    cache = KvCache(spec, 3, 4, torch.float32, torch.device("cpu"))
    assert cache.num_bytes == 3 * kv_block_bytes(spec, 4, 4)
    assert [one.k.data_ptr() for one in cache.layers[:2]] == [one.k.data_ptr() for one in cache.layers[2:]]
    assert cache.layers[0].k.data_ptr() != cache.layers[1].k.data_ptr()


@pytest.mark.parametrize(("sinks", "reason"), [("computed", "no parameter"), ("elsewhere", "another module")])
def test_sinks_that_may_change_are_refused(sinks: str, reason: str) -> None:
    model = random_model("gpt_oss")
    own = model.model.layers[0].self_attn
    del own.sinks
    others = model.model.layers[1].self_attn.sinks
    object.__setattr__(own, "sinks", others if sinks == "elsewhere" else others.data * 2)
    with pytest.raises(UnsupportedModel, match=reason):
        adopt_model(model)


def test_probe_finds_heads_and_scaling() -> None:
    spec = adopt_model(random_model("gemma2")).spec
    assert spec.layers[0] == AttentionSpec(4, 2, 16, 16, 24**-0.5, WINDOW, 5.0)
    assert (spec.vocab_size, spec.num_logits, spec.hidden_size, spec.max_context_tokens) == (101, 101, 32, MAX_LEN)
    narrow = adopt_model(random_model("deepseek_v3")).spec.layers[0]
    assert (narrow.k_dim, narrow.v_dim) == (16, 12)


def test_kv_block_bytes_counts_every_layer() -> None:
    layers = (AttentionSpec(4, 2, 16, 8, 1.0), AttentionSpec(4, 4, 4, 4, 1.0))
    spec = ModelSpec(layers, 10, 10, 8, 64)
    assert kv_block_bytes(spec, 16, 2) == 16 * 2 * (2 * (16 + 8) + 4 * (4 + 4))


def test_what_the_generation_config_recommends(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("llama")
    assert generation_defaults(model) == {}
    for name, value in {"temperature": 0.6, "top_k": 20, "top_p": 2.0, "min_p": -0.5, "num_beams": 1}.items():
        setattr(model.generation_config, name, value)
    assert generation_defaults(model) == {"temperature": 0.6, "top_k": 20}, "and nothing that a request could not send"
    assert all(f"has {one}, which cannot be used" in caplog.text for one in ("top_p = 2.0", "min_p = -0.5"))
    model.generation_config.repetition_penalty = 1.1
    model.generation_config.do_sample = False
    assert generation_defaults(model) == {"temperature": 0.0, "repetition_penalty": 1.1}
    model.generation_config.do_sample = True
    model.generation_config.temperature = 1e-6
    assert generation_defaults(model)["temperature"] == 0.0, "not the default of HTTP's routes, which is 1"


def test_a_generation_config_seeds_no_text_and_may_raise_what_was_said(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("llama")
    for name, value in {"seed": 7, "frequency_penalty": -0.5, "presence_penalty": 1.5, "top_k": -1}.items():
        setattr(model.generation_config, name, value)
    assert generation_defaults(model) == {"frequency_penalty": -0.5, "presence_penalty": 1.5}
    assert caplog.messages == ["the generation config has top_k = -1, which cannot be used: the default holds"]


def test_what_is_not_applied_of_the_generation_config_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("llama")
    for name, value in {"num_beams": 1, "min_length": 0, "max_new_tokens": 5, "guidance_scale": None}.items():
        setattr(model.generation_config, name, value)
    assert generation_defaults(model) == {}
    assert not caplog.text
    model.generation_config.suppress_tokens, model.generation_config.no_repeat_ngram_size = [5], 2
    model.generation_config.watermarking_config = {"greenlist_ratio": 0.5}
    model.generation_config.encoder_no_repeat_ngram_size = 2
    assert generation_defaults(model) == {}
    names = "encoder_no_repeat_ngram_size, no_repeat_ngram_size, suppress_tokens, watermarking_config"
    assert f"has {names}, which a server does not apply" in caplog.text


@pytest.mark.parametrize(
    ("eos", "expected"), [(2, (2,)), ([2, 7], (2, 7)), (-1, ()), ([-1, 3], (3,)), ([], ()), (None, (1,))]
)
def test_ends_of_sequence(eos: Any, expected: tuple[int, ...]) -> None:
    model = random_model("llama")
    model.config.eos_token_id = 1
    model.generation_config.eos_token_id = eos
    assert eos_token_ids_of(model) == expected


@pytest.mark.parametrize("eos", ["2", 2.0, True, ["</s>"], [None, 3], {"a": 1}])
def test_ends_of_sequence_that_are_no_ids_are_refused(eos: Any, tmp_path: Path) -> None:
    random_model("llama", torch.float32).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UnsupportedModel, match=r"`eos_token_id` has .* no token id; write an integer"):
        load_model(str(tmp_path), device="cpu")


def test_weights_in_pytorchs_own_files(tmp_path: Path) -> None:
    model = random_model("llama", torch.float32)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert torch.equal(load_model(str(tmp_path), device="cpu").targets["lm_head"].weight, model.lm_head.weight)
    torch.save(model, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="more than tensors, which is never run here"):
        load_model(str(tmp_path), device="cpu")


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    model = random_model("llama", torch.float32)
    model.save_pretrained(tmp_path)
    size, width = model.lm_head.weight.shape
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": size + 8}))
    said = rf"lm_head\.weight of shape \[{size}, {width}\].* asks for \[{size + 8}, {width}\]"
    with pytest.raises(UnsupportedModel, match=said):
        load_model(str(tmp_path), device="cpu")


def test_code_beside_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="code beside the checkpoint, which is never run"):
        load_model(str(tmp_path), device="cpu")


def test_loading_from_a_directory_keeps_weights_and_dtype(tmp_path: Path) -> None:
    model = random_model("llama", torch.bfloat16)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert loaded.dtype is torch.bfloat16
    assert loaded.spec.eos_token_ids == (2, 7)
    assert torch.equal(loaded.targets["lm_head"].weight, model.lm_head.weight)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert load_model(str(tmp_path), device="cpu", dtype="float32").dtype is torch.float32


def test_serving_builds_no_masks() -> None:
    """Transformers must find no mask function under the serving name."""
    model = adopt_model(random_model("gemma2")).model
    assert model.config._attn_implementation == SERVING
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    assert SERVING not in ALL_MASK_ATTENTION_FUNCTIONS
    assert not any(word in SERVING for word in ("sdpa", "flex_attention", "paged|"))


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda _b, _h, q, kv: kv <= q, Reach()),
        (lambda _b, _h, q, kv: (kv <= q) & (kv > q - 100), Reach(window=100)),
        (lambda _b, _h, q, kv: (kv <= q) & (kv > q - 600_000), Reach(window=600_000)),
        (lambda _b, _h, q, kv: (kv <= q) & (kv > q - 1_000_000), Reach(window=1_000_000)),
        (lambda _b, _h, q, kv: (kv <= q) & (kv // 64 == q // 64), Reach(chunk=64)),
        (lambda _b, _h, q, kv: (kv <= q) & (kv // 8192 == q // 8192), Reach(chunk=8192)),
        (lambda _b, _h, q, kv: (kv <= q) & (kv // 77 == q // 77), Reach(chunk=77)),
        (lambda _b, _h, q, kv: (kv <= q) & (kv // 500_000 == q // 500_000), Reach(chunk=500_000)),
        (lambda _b, _h, q, kv: (kv <= q) & ((kv + 5) // 77 == (q + 5) // 77), "a mask that is neither window nor"),
        (lambda _b, _h, q, kv: (kv <= q) & (kv >= q // 2), "a mask that is neither window nor chunks"),
        (lambda _b, _h, q, kv: kv >= 0, "later tokens"),
        (lambda _b, _h, q, kv: (kv <= q) & (kv % 2 == q % 2), "a mask with holes"),
        (lambda _b, _h, q, kv: kv < 0, "a mask with holes"),
    ],
)
def test_masks_are_told_apart(function: Any, found: object) -> None:
    told = describe_mask(function)
    assert told.startswith(found) if isinstance(found, str) and isinstance(told, str) else told == found


def test_masks_are_evaluated_where_the_model_is() -> None:
    """A function's own tensors are there: on a GPU they do not mix with tensors of the CPU."""
    seen: list[str] = []

    def function(*places: Tensor) -> Tensor:
        seen.extend(one.device.type for one in places)
        raise RuntimeError("a tensor of this device cannot be read")

    probing_mask(mask_function=function, device="meta")
    assert seen == ["meta"] * 4


def test_a_gpu_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InvalidArgument, match=r"cuda:2: PyTorch sees 2 GPUs, from cuda:0 on"):
        resolve_device("cuda:2")
    with pytest.raises(InvalidArgument, match="from 0 to 127"):
        resolve_device("cuda:256")  # PyTorch takes it for cuda:0
