"""Frozen target: greedy text, hidden states and errors."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.multimodal import whole_model
from support.world import TinyWorld, byte_tokenizer
from support.zoo import ZOO, random_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    BaseMismatch,
    InvalidArgument,
    NoChatTemplate,
    OutOfMemory,
    ShapeMismatch,
    UnsafeFormat,
    UnsupportedModel,
)
from loraplex_server.model.language import absent_parts
from loraplex_training.corpus import Chat
from loraplex_training.progress import quiet_transformers
from loraplex_training.target import Example, Target, in_batches, load_target

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quiet() -> object:
    with quiet_transformers():
        yield


def load(world: TinyWorld, adapter: str | None = None) -> Target:
    path = None if adapter is None else world.adapters / adapter
    return load_target(str(world.model), path, dtype=torch.float64, device=CPU)


@pytest.mark.parametrize("adapter", [None, "a002"])
def test_generation_is_greedy_and_no_neighbour_matters(tiny_world: TinyWorld, adapter: str | None) -> None:
    target = load(tiny_world, adapter)
    prompts = [target.encode(text) for text in ("a", "a longer prompt", "one more")]
    together = target.generate(prompts, 12)
    for prompt, made in zip(prompts, together, strict=True):
        assert made.num_given == len(prompt)
        assert target.generate([prompt], 12) == [made]
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(target.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] in target.eos_token_ids:
                break
        assert made.token_ids == tokens


@pytest.mark.parametrize("family", ["minimax", "llama4", "phi3-longrope", "llama-dynamic", "llama"])
def test_no_neighbour_matters_in_the_batches_of_a_family(tmp_path: Path, family: str) -> None:
    """Batches have prompts of one length where padding changes answers; states are those of generation."""
    model = random_model(family, torch.float32, seed=1)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = load_target(str(tmp_path), None, dtype=None, device=CPU)
    assert target.takes_padding() == (family == "llama")
    prompts = [list(range(9, 9 + num)) for num in (3, 11, 20, 5, 11)]
    batches = list(in_batches([len(each) for each in prompts], 4, are_equal=not target.takes_padding()))
    assert len(batches) == (2 if family == "llama" else 4)
    for batch in batches:
        examples = target.generate([prompts[idx] for idx in batch], 12)
        for idx, example, states in zip(batch, examples, target.hidden_states(examples), strict=True):
            fresh: Any = copy.deepcopy(model)
            own = fresh.generate(
                torch.tensor([prompts[idx]]), do_sample=False, max_new_tokens=12, eos_token_id=-1,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            assert example.token_ids == own.sequences[0].tolist()
            found = target.head.logits(states)[len(prompts[idx]) - 1 : -1]
            torch.testing.assert_close(found, torch.cat(own.logits), rtol=1e-3, atol=1e-3)


def test_an_end_outside_the_vocabulary(tiny_world: TinyWorld) -> None:
    target = replace(load(tiny_world), eos_token_ids=(100_000,))
    prompts = [target.encode(text) for text in ("a", "a longer prompt")]
    assert [len(each.token_ids) - each.num_given for each in target.generate(prompts, 5)] == [5, 5]


def test_a_models_own_sampling_defaults_do_not_count(tiny_world: TinyWorld) -> None:
    target = load(tiny_world)
    wanted = target.generate([target.encode("abc")], 12)
    target.model.generation_config = GenerationConfig(
        do_sample=True, temperature=3.0, repetition_penalty=5.0, no_repeat_ngram_size=1, max_length=4, num_beams=1
    )
    assert target.generate([target.encode("abc")], 12) == wanted


def test_the_end_of_text_token_ends_an_example(tiny_world: TinyWorld) -> None:
    target = load(tiny_world)
    (long,) = target.generate([target.encode("abc")], 12)
    new = long.token_ids[long.num_given :]
    end = new[4]
    ending = Target(target.model, target.head, target.tokenizer, (end,), target.max_context_tokens)
    (short,) = ending.generate([target.encode("abc")], 12)
    assert short.token_ids[short.num_given :] == new[: new.index(end) + 1]


@pytest.mark.parametrize("adapter", [None, "a001"])
def test_hidden_states_are_what_the_head_reads(tiny_world: TinyWorld, adapter: str | None) -> None:
    target = load(tiny_world, adapter)
    examples = [Example(target.encode("short"), 0), Example(target.encode("much longer than that"), 3)]
    hidden = target.hidden_states(examples)
    for example, states in zip(examples, hidden, strict=True):
        assert states.shape == (len(example.token_ids), 32)
        logits = target.model(input_ids=torch.tensor([example.token_ids])).logits[0]
        torch.testing.assert_close(target.head.logits(states).double(), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["opt", "gemma2", "cohere", "granite", "mixtral", "gpt2"])
def test_families_that_project_scale_or_cap(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    config = ZOO[family]()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    dtype = torch.float32 if family == "mixtral" else torch.float64  # grouped products have no float64
    target = load_target(str(tmp_path), None, dtype=dtype, device=CPU)
    example = Example(list(range(5, 25)), 1)
    (states,) = target.hidden_states([example])
    assert states.shape == (20, target.hidden_size)
    logits = target.model(input_ids=torch.tensor([example.token_ids])).logits[0]
    assert torch.equal(target.head.logits(states).argmax(dim=-1), logits.argmax(dim=-1))
    if family != "gemma2":  # a soft cap is no factor
        torch.testing.assert_close(target.head.logits(states).double(), logits.double(), rtol=1e-4, atol=1e-4)
    assert 0 < target.head.scale < 1.001


@pytest.mark.parametrize("family", ["qwen2_vl", "mistral3", "smolvlm"])
def test_checkpoints_with_parts_for_images(tmp_path: Path, family: str) -> None:
    """Trains on what is served: the language model, without the other parts."""
    whole = whole_model(family).float()
    whole.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = load_target(str(tmp_path), None, dtype=torch.float32, device=CPU)
    assert absent_parts(target.model)
    (example,) = target.generate([[5, 6, 7]], 6)
    (states,) = target.hidden_states([example])
    logits = whole(input_ids=torch.tensor([example.token_ids])).logits[0]
    torch.testing.assert_close(target.head.logits(states), logits, rtol=1e-4, atol=1e-4)


def test_models_that_are_not_served(tmp_path: Path) -> None:
    ZOO["llama"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="use the unquantised checkpoint"):
        load_target(str(tmp_path), None, dtype=None, device=CPU)


def test_a_lora_on_the_head_is_part_of_it(tiny_world: TinyWorld, tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(tiny_world.model)
    lora = LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(str(tmp_path), save_embedding_layers=False)
    target = load_target(str(tiny_world.model), tmp_path, dtype=torch.float64, device=CPU)
    example = Example(target.encode("hello"), 0)
    (states,) = target.hidden_states([example])
    logits = target.model(input_ids=torch.tensor([example.token_ids])).logits[0]
    torch.testing.assert_close(target.head.logits(states).double(), logits, rtol=1e-5, atol=1e-5)
    plain = load(tiny_world)
    assert not torch.allclose(plain.head.logits(states), target.head.logits(states))


def test_the_adapter_is_the_one_that_peft_loads(tiny_world: TinyWorld) -> None:
    target = load(tiny_world, "a000")
    base = AutoModelForCausalLM.from_pretrained(tiny_world.model, dtype=torch.float64)
    wanted = PeftModel.from_pretrained(base, str(tiny_world.adapters / "a000")).eval()
    ids = torch.tensor([target.encode("hello there")])
    torch.testing.assert_close(target.model(input_ids=ids).logits, wanted(input_ids=ids).logits)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_tokens_that_the_model_does_not_know_are_refused(tiny_world: TinyWorld) -> None:
    target = load(tiny_world)
    target.tokenizer.add_tokens(["<|new|>"])
    with pytest.raises(InvalidArgument, match=r"'<\|new\|>' \(\d+\), .* leave it out"):
        target.encode("a<|new|>b")


def test_messages_by_the_template_of_a_processor(tiny_world: TinyWorld, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_world.model, tmp_path / "model")
    (folder / "chat_template.json").write_text('{"chat_template": "[{{ messages[0].content }}]"}')
    target = load_target(str(folder), None, dtype=torch.float64, device=CPU)
    assert (
        target.tokenizer.decode(target.encode({"messages": [{"role": "user", "content": "hi"}], "tools": []})) == "[hi]"
    )


def test_messages_need_a_chat_template(tiny_world: TinyWorld) -> None:
    target = load(tiny_world)
    messages: Chat = {"messages": [{"role": "user", "content": "hi"}], "tools": []}
    for templates, kind in ((None, "chat"), ({"tool_use": "x"}, "default chat")):
        target.tokenizer.chat_template = templates
        with pytest.raises(NoChatTemplate, match=f"the tokenizer has no {kind} template"):
            target.encode(messages)
    target.tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}>"
    assert target.tokenizer.decode(target.encode(messages)) == "<s>[hi]>"
    for template, words in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 + '' }}", ""),
    ):
        target.tokenizer.chat_template = template
        with pytest.raises(InvalidArgument, match=f"cannot render messages of --prompts: .*{words}") as refused:
            target.encode(messages)
        assert refused.value.field == "--prompts"


def test_messages_go_through_the_adapters_own_template(tiny_world: TinyWorld, tmp_path: Path) -> None:
    adapter = copy_of(tiny_world, tmp_path)
    (adapter / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    target = load_target(str(tiny_world.model), adapter, dtype=None, device=CPU)
    messages: Chat = {"messages": [{"role": "user", "content": "hi"}], "tools": []}
    assert target.tokenizer.decode(target.encode(messages)) == "<hi>"
    target.tokenizer.chat_template = "the base's"
    assert target.tokenizer.decode(target.encode(messages)) == "<hi>"
    assert target.encode("hi") == load(tiny_world).encode("hi")


def test_tools_reach_the_template(tiny_world: TinyWorld) -> None:
    target = load(tiny_world)
    target.tokenizer.chat_template = (
        "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Ulm"}}}
    chat: Chat = {
        "messages": [{"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    assert target.tokenizer.decode(target.encode(chat)) == "f;Ulm"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        pytest.param(
            "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
            "{% for c in m['tool_calls'] %}<{{ c['function']['arguments']['x'] }}>{% endfor %}"
            "{% else %}{{ m['content'] }}{% endif %}{% endfor %}",
            "q<1>r",
            id="asks-for-none",
        ),
        pytest.param(
            "{% for m in messages %}{% for c in m['tool_calls'] %}{{ '<' + c['function']['arguments'] + '>' }}"
            "{% endfor %}{{ m['content'] or '' }}{% endfor %}",
            'q<{"x": 1}>r',
            id="takes-texts",
        ),
    ],
)
def test_calls_reach_templates_as_from_a_server(tiny_world: TinyWorld, template: str, wanted: str) -> None:
    """DeepSeek's templates leave out calls beside a content that is not none, or join arguments to texts."""
    target = load(tiny_world)
    target.tokenizer.chat_template = template
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    chat: Chat = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "r"},
        ],
        "tools": [],
    }
    assert target.tokenizer.decode(target.encode(chat)) == wanted


def test_the_longest_come_first() -> None:
    assert list(in_batches([3, 9, 1, 7, 5], 2)) == [[1, 3], [4, 0], [2]]
    assert list(in_batches([3, 9, 3, 3, 9], 2, are_equal=True)) == [[1, 4], [0, 2], [3]]


# --- what cannot be loaded ------------------------------------------------------------------------------------------


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_target(str(tmp_path), None, dtype=None, device=CPU)


def copy_of(world: TinyWorld, folder: Path) -> Path:
    return Path(shutil.copytree(world.adapters / "a000", folder / "adapter"))


def test_no_adapter(tiny_world: TinyWorld, tmp_path: Path) -> None:
    def refused(path: Path, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            load_target(str(tiny_world.model), path, dtype=None, device=CPU)

    refused(tmp_path / "none", AdapterNotFound, "there is no adapter in")
    refused(tmp_path, AdapterInvalid, "has no adapter_config.json")
    adapter = copy_of(tiny_world, tmp_path)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    refused(adapter, UnsafeFormat, "can run code")
    (adapter / "adapter_model.bin").unlink()
    refused(adapter, AdapterInvalid, "has no adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").write_bytes(b"nonsense" * 10)
    refused(adapter, AdapterInvalid, "claims a header of")


def test_an_adapter_of_another_kind(tiny_world: TinyWorld, tmp_path: Path) -> None:
    adapter = copy_of(tiny_world, tmp_path)
    config = adapter / "adapter_config.json"
    config.write_text("[")
    with pytest.raises(AdapterInvalid, match="is not valid JSON"):
        load_target(str(tiny_world.model), adapter, dtype=None, device=CPU)
    config.write_text(json.dumps({"peft_type": "NONSENSE"}))
    with pytest.raises(AdapterUnsupported, match="peft_type 'NONSENSE' is not served"):
        load_target(str(tiny_world.model), adapter, dtype=None, device=CPU)


def test_an_adapter_of_another_base(tiny_world: TinyWorld, tmp_path: Path) -> None:
    adapter = copy_of(tiny_world, tmp_path)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(name for name in tensors if "layers.1.self_attn.q_proj.lora_A" in name)
    save_file({name.replace("layers.1.", "layers.7."): tensor for name, tensor in tensors.items()}, path)
    with pytest.raises(BaseMismatch, match=r"layers\.\d"):
        load_target(str(tiny_world.model), adapter, dtype=None, device=CPU)
    save_file(tensors | {key: torch.zeros(2, 5)}, path)
    with pytest.raises(ShapeMismatch, match=r"q_proj\.lora_A.* has shape \[2, 5\]"):
        load_target(str(tiny_world.model), adapter, dtype=None, device=CPU)


def test_a_full_device_is_said_so(tiny_world: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load(tiny_world)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(target.model, "generate", full)
    with pytest.raises(OutOfMemory, match="--batch-size"):
        target.generate([[1, 2]], 4)


def test_the_tokenizer_comes_with_the_base(tiny_world: TinyWorld) -> None:
    wanted = AutoTokenizer.from_pretrained(tiny_world.model)
    assert load(tiny_world).encode("abc") == wanted.encode("abc")
