"""Frozen target model: a base with or without a LoRA.

Owns loading, greedy generation, the post-norm hidden states and the model's own head, through Transformers and PEFT.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig

from loraplex_adapters.formats.templates import read_templates
from loraplex_adapters.sources.directory import open_folder
from loraplex_contracts.adapters import AdapterTemplates
from loraplex_contracts.errors import (
    InvalidArgument,
    NoChatTemplate,
    OutOfMemory,
    UnsupportedModel,
)
from loraplex_server.kv.rope import RopeScaling
from loraplex_server.layers.context import StepContext
from loraplex_server.library_errors import error_line
from loraplex_server.model.language import read_config, read_language_model
from loraplex_server.model.loader import eos_token_ids_of, reading_files
from loraplex_server.model.mxfp4 import dequantising
from loraplex_server.model.refusals import refuse_class, refuse_config
from loraplex_server.model.rope import lengths_given, scale_by_token
from loraplex_server.text.chat_template import chosen, rendered
from loraplex_server.text.tokenizer import processor_template
from loraplex_training.adapted import check_files, with_adapter
from loraplex_training.corpus import Prompt

_PAD_ID = 0  # masked, or behind the end; ids of tokens that end a text may lie outside the vocabulary
_MAX_GAP = 0.05  # of logits, by their largest: rounding stays below it


@dataclass(frozen=True, slots=True)
class Example:
    """A token sequence. The first `num_given` tokens were given; the heads have to predict the rest."""

    token_ids: list[int]
    num_given: int

    @property
    def first(self) -> int:
        """First position whose hidden state tokens are drafted from."""
        return max(0, self.num_given - 1)


@dataclass(frozen=True, slots=True)
class FrozenHead:
    """The model's own output head with its LoRA, which all Medusa heads share when they are served."""

    module: nn.Module
    scale: float  # logit scale of some models; it changes cross entropy, not argmax
    num_logits: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> float32 [..., num_logits]"""
        raw: Tensor = self.module(hidden.to(self.dtype))
        return raw.float() * self.scale


@dataclass(frozen=True, slots=True)
class Target:
    """A frozen model."""

    model: Any
    head: FrozenHead
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    templates: AdapterTemplates = AdapterTemplates()  # the adapter's own
    scaling: RopeScaling | None = None  # of rotary embeddings that depend on a text's length

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def hidden_size(self) -> int:
        return self.head.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens. Raises NoChatTemplate, and InvalidArgument for messages that the template refuses or
        for a token beyond the model's vocabulary."""
        if isinstance(prompt, str):
            return self._known(self.tokenizer.encode(prompt))
        tools = prompt["tools"] or None
        has_tools, own_templates = tools is not None, self.tokenizer.chat_template
        template = self.templates.chat_for(has_tools=has_tools) or chosen(own_templates, has_tools=has_tools)
        if not template:
            kind = "default chat template" if own_templates else "chat template"
            raise NoChatTemplate(f"the tokenizer has no {kind}; give plain prompts instead of messages")
        try:
            made = rendered(template, {**prompt, "arguments": self.tokenizer.special_tokens_map})
        except Exception as error:  # whatever templates raise
            raise InvalidArgument(
                f"the chat template cannot render messages of --prompts: {error_line(error)}", field="--prompts"
            ) from error
        return self._known(self.tokenizer.encode(made, add_special_tokens=False))

    def _known(self, ids: list[int]) -> list[int]:
        """The ids, if the model has embeddings of them all. Raises InvalidArgument."""
        num_known = self.model.get_input_embeddings().weight.shape[0]
        if (largest := max(ids, default=0)) >= num_known:
            name = self.tokenizer.convert_ids_to_tokens(largest)
            raise InvalidArgument(
                f"a prompt or text has the token {name!a} ({largest}), which the tokenizer has and the model has not: "
                f"its vocabulary ends at {num_known - 1}; leave it out"
            )
        return ids

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Example]:
        """The greedy continuation of each prompt, the end-of-text token included, as one batch."""
        width = max(len(prompt) for prompt in prompts)
        made: Tensor = self._generate(prompts, width, max_new_tokens)
        new_tokens = made[:, width:].tolist()
        return [
            Example([*prompt, *self._until_end(new)], len(prompt))
            for prompt, new in zip(prompts, new_tokens, strict=True)
        ]

    @torch.inference_mode()
    def takes_padding(self) -> bool:
        """True if prompts of several lengths have the answers in one batch that each has alone."""
        if self.scaling is not None:
            return False
        endless = replace(self, eos_token_ids=(self.head.num_logits,))
        made = [
            endless._generate([range(8)], width, 3, output_logits=True, return_dict_in_generate=True)
            for width in (8, 21)
        ]
        alone, padded = (torch.cat(each.logits).float() for each in made)
        return bool((alone - padded).abs().max() <= _MAX_GAP * alone.abs().max())

    def _generate(self, prompts: Sequence[Sequence[int]], width: int, max_new_tokens: int, **options: Any) -> Any:
        """The tokens that `generate()` gives for the prompts, which are padded on the left."""
        rows = [[_PAD_ID] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        # Every option is set: a model's own defaults may sample or penalize.
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0,
            eos_token_id=list(self.eos_token_ids) or None, pad_token_id=_PAD_ID,
            temperature=None, top_p=None, top_k=None, min_p=None, typical_p=None, **options,
        )  # fmt: skip
        with out_of_memory():
            return self.model.generate(
                input_ids=torch.tensor(rows, device=self.device),
                attention_mask=torch.tensor(mask, device=self.device),
                generation_config=config,
            )

    @torch.inference_mode()
    def hidden_states(self, examples: Sequence[Example]) -> list[Tensor]:
        """Inputs of the output head for each example, [num_tokens, hidden], in one forward pass; in one for each where
        rotary embeddings depend on a text's length."""
        if self.scaling is None:
            return self._states(examples)
        return [self._scaled_states(each, self.scaling) for each in examples]

    def _scaled_states(self, example: Example, scaling: RopeScaling) -> Tensor:
        """The states that generation has, which scales a prompt by its length and each token behind it by that so
        far."""
        num_tokens = len(example.token_ids)
        lengths = np.arange(1, num_tokens + 1).clip(min=example.num_given)
        if scaling.restarts:
            lengths = np.full_like(lengths, num_tokens)
        with lengths_given(self.model, lengths):
            (states,) = self._states([example])
        if not scaling.outgrown(example.num_given, num_tokens):
            return states
        before = self._scaled_states(replace(example, token_ids=example.token_ids[: scaling.limit]), scaling)
        return torch.cat([before, states[scaling.limit :]])

    def _states(self, examples: Sequence[Example]) -> list[Tensor]:
        width = max(len(each.token_ids) for each in examples)
        # Padding is on the right and the model is causal, so no counted position attends to it.
        rows = [each.token_ids + [0] * (width - len(each.token_ids)) for each in examples]
        with out_of_memory():
            hidden, _ = _run(self.model, self.head.module, torch.tensor(rows, device=self.device), with_logits=False)
        return [states[: len(each.token_ids)] for states, each in zip(hidden, examples, strict=True)]

    def _until_end(self, token_ids: list[int]) -> list[int]:
        ends = [idx for idx, token in enumerate(token_ids) if token in self.eos_token_ids]
        return token_ids[: ends[0] + 1] if ends else token_ids


def load_target(base: str, adapter: Path | None, *, dtype: torch.dtype | None, device: torch.device) -> Target:
    """The frozen model. `base` is a directory or a Hub id; without `dtype` it is loaded as it is stored. Messages go
    through the adapter's own chat template, where it brings one. Raises UnsupportedModel, AdapterNotFound and
    AdapterInvalid."""
    templates = None
    if adapter is not None:
        check_files(adapter)
        with open_folder(adapter, adapter.name) as files:
            templates = read_templates(files)
    with reading_files(base):
        config = read_config(base)
        tokenizer: Any = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        tokenizer.chat_template = tokenizer.chat_template or processor_template(base)
        refuse_config(config, base)
        refuse_class(config, base)
        served = dtype or "auto"
        model: Any = read_language_model(
            base, copy.deepcopy(config), dtype=served, trust_remote_code=False, **dequantising(config, served)
        )
        limit = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 4096)
    with out_of_memory():
        model.to(device)
    eos_token_ids = eos_token_ids_of(model)
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModel(f"{base} has no language modelling head, so there is nothing to draft")
    num_logits, hidden_size = head.weight.shape
    head_dtype: torch.dtype = head.weight.dtype
    if adapter is not None:
        with out_of_memory():
            model = with_adapter(model, base, adapter)
        head = model.get_base_model().get_output_embeddings()  # perhaps wrapped now
    model.eval().requires_grad_(False)
    scaling = scale_by_token(model if adapter is None else model.get_base_model(), StepContext())
    frozen = FrozenHead(head, _logit_scale(model, head), num_logits, hidden_size, head_dtype, device)
    return Target(model, frozen, tokenizer, eos_token_ids, limit, templates or AdapterTemplates(), scaling)


@torch.inference_mode()
def _logit_scale(model: Any, head: nn.Module) -> float:
    """The model's factor on its head's output (approximate for a soft cap)."""
    device = next(head.parameters()).device
    _, (raw, logits) = _run(model, head, torch.arange(8, device=device).unsqueeze(0), with_logits=True)
    return float((raw * logits).sum() / (raw * raw).sum().clamp(min=1e-12))


def _run(model: Any, head: nn.Module, token_ids: Tensor, *, with_logits: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The head's input, [num_rows, num_tokens, hidden], and the raw and final logits in float32."""
    seen: list[Tensor] = []

    def before(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        seen.append(cast(Tensor, inputs[0]))
        return None if with_logits else (inputs[0][:, :0], *inputs[1:])  # skips the logits

    def after(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        seen.append(output.float())

    hooks = head.register_forward_pre_hook(before), head.register_forward_hook(after)
    try:
        logits: Tensor = model(input_ids=token_ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    hidden, raw = seen
    return hidden, (raw, logits.float())


@contextmanager
def out_of_memory() -> Generator[None]:
    """Turns torch's out-of-memory error into OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory("the device's memory is full; try a smaller --batch-size, or --device cpu") from error


def in_batches(lengths: Sequence[int], batch_size: int, *, are_equal: bool = False) -> Iterator[list[int]]:
    """Indices in batches of similar length, or of equal ones, longest first, so that running out of memory shows at
    once."""
    order = sorted(range(len(lengths)), key=lambda idx: lengths[idx], reverse=True)
    for _, same in groupby(order, lambda idx: lengths[idx] if are_equal else 0):
        group = list(same)
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]
