"""Direct forward pass: a model's embedding, native decoder, final norm and head.

Around these four modules Transformers' code checks arguments, prepares masks and caches that a step here does without,
and wraps its outputs. With few rows that takes longer than what it is around: 0.7 of 20 ms of a decode step of a 245M
model. A direct pass is used only where it gives the very bits of the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from loraplex_server.model.probe import CACHE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST_POSITIONS = 1024
# Most positions of the table: with more, a head of 128 features would need more than 17 MB.
MAX_POSITIONS = 1 << 14
# What stands beside the list of layers, by its name in Transformers' models.
EMBEDDINGS = "embed_tokens", "embed_in"
NORMS = "norm", "final_layer_norm", "final_layernorm", "embedding_norm"
ROTARY = "rotary_emb"


class Rotary(Protocol):
    """A model's rotary embedding, which turns queries and keys by their positions."""

    def __call__(self, x: Tensor, position_ids: Tensor, **named: str) -> tuple[Tensor, Tensor] | Tensor:
        """Cosines and sines, or complex numbers in which both are."""
        ...


def named_kind(kind: str) -> dict[str, str]:
    """The argument by which a rotary embedding is told a layer's kind; "" where it has one for all."""
    return {"layer_type": kind} if kind else {}


class RotaryTable:
    """Cosines and sines of a model's positions, computed once. Grows with the positions that come."""

    def __init__(self, rotary: Rotary, like: Tensor, kind: str = "") -> None:
        """`like`: a tensor of the model's dtype, in which the model rounds them. `kind`: of layers, where the model's
        turn them in several ways."""
        self._rotary = rotary
        self._like = like
        self._named = named_kind(kind)
        self._cos = self._sin = torch.empty(0, 0)

    def __call__(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rotation of position_ids [1, num_tokens]: cosines and sines [1, num_tokens, num_rotary] in float32."""
        highest = int(position_ids.max())
        if highest >= MAX_POSITIONS:
            return self._compute(position_ids)
        if highest >= self._cos.shape[0]:
            size = max(FIRST_POSITIONS, 1 << highest.bit_length())
            cos, sin = self._compute(torch.arange(size).unsqueeze(0))
            self._cos, self._sin = cos[0], sin[0]
        places = position_ids[0]
        return self._cos.index_select(0, places).unsqueeze(0), self._sin.index_select(0, places).unsqueeze(0)

    def _compute(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        found = self._rotary(self._like, position_ids=position_ids, **self._named)
        assert isinstance(found, tuple), "rotations by complex numbers have no table"
        cos, sin = found
        return cos.to(torch.float32).contiguous(), sin.to(torch.float32).contiguous()


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a model's code does to embeddings and logits beside its modules."""

    embedding: float = 1.0
    divisor: float = 1.0  # of logits
    factor: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(model: PreTrainedModel, stem: nn.Module) -> Scaling:
        """By the names in Transformers' models. `stem`: that has the embedding."""
        config: Any = model.config.get_text_config()
        return Scaling(
            embedding=getattr(stem, "embedding_multiplier", None) or 1.0,  # Granite
            divisor=getattr(config, "logits_scaling", None) or 1.0,
            factor=getattr(config, "logit_scale", None) or 1.0,  # Cohere
            cap=getattr(config, "final_logit_softcapping", None),  # Gemma
        )

    def of_embedding(self, x: Tensor) -> Tensor:
        return x if self.embedding == 1.0 else x * self.embedding

    def of_logits(self, y: Tensor) -> Tensor:
        y = y if self.divisor == 1.0 else y / self.divisor
        y = y if self.factor == 1.0 else y * self.factor
        return y if self.cap is None else torch.tanh(y / self.cap) * self.cap


class DirectForward:
    """Forward pass of embedding, decoder, norm and head, one after the other."""

    def __init__(
        self, model: nn.Module, embedding: str, layers: Sequence[tuple[nn.Module, str]], norm: str, head: str,
        rotary: Mapping[str, RotaryTable], scaling: Scaling,
    ) -> None:  # fmt: skip
        """`embedding`, `norm`, `head`: paths in the model. They are looked up in each pass, since adapters' saved
        modules may take their places. `layers`: modules of the native decoder, each with its kind of rotation.
        `rotary`: empty where layers do not turn queries and keys."""
        self._model = model
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._layers = layers
        self._rotary = rotary
        self._scaling = scaling

    def __call__(self, input_ids: Tensor, position_ids: Tensor, head_rows: Tensor | None) -> Tensor:
        """input_ids and position_ids [1, num_tokens] -> logits [1, len(head_rows), num_logits], of all rows for
        None."""
        hidden = self._scaling.of_embedding(self._model.get_submodule(self._embedding)(input_ids))
        rotations = {kind: table(position_ids) for kind, table in self._rotary.items()}
        for layer, kind in self._layers:
            answer = layer(
                hidden,
                attention_mask=None,
                position_ids=position_ids,
                use_cache=False,
                position_embeddings=rotations.get(kind),
                **{CACHE: None},
            )
            hidden = answer[0] if isinstance(answer, tuple) else answer
        hidden = self._model.get_submodule(self._norm)(hidden)
        hidden = hidden if head_rows is None else hidden.index_select(1, head_rows)
        return self._scaling.of_logits(self._model.get_submodule(self._head)(hidden))


def find_direct_forward(
    model: PreTrainedModel, layers_path: str, layers: Sequence[tuple[nn.Module, str]]
) -> DirectForward | None:
    """The pass through the native decoder at `layers_path`, of modules with their kinds of rotation; None where another
    module than the usual ones stands beside the list. It may still compute something else than the model."""
    stem_path, dot, name = layers_path.rpartition(".")
    stem = model.get_submodule(stem_path)
    beside = {own for own, one in stem.named_children() if not isinstance(one, nn.Dropout)} - {name, ROTARY}
    usual = [(embedding, norm) for embedding in EMBEDDINGS for norm in NORMS]
    found = [own for own in usual if beside == {*own}]
    if not found:
        return None
    embedding, norm = (f"{stem_path}{dot}{own}" for own in found[0])
    head = next(path for path, module in model.named_modules() if module is model.get_output_embeddings())
    scaling, rotary = Scaling.of(model, stem), cast(Rotary | None, getattr(stem, ROTARY, None))
    if rotary is None:
        return DirectForward(model, embedding, layers, norm, head, {}, scaling)
    like = next(model.get_submodule(norm).parameters()).detach()[:1].reshape(1, 1, 1)
    if not isinstance(
        rotary(like, position_ids=torch.zeros(1, 1, dtype=torch.int64), **named_kind(layers[0][1])), tuple
    ):
        return None  # rotations by complex numbers
    tables = {kind: RotaryTable(rotary, like, kind) for kind in {kind for _, kind in layers}}
    return DirectForward(model, embedding, layers, norm, head, tables, scaling)
