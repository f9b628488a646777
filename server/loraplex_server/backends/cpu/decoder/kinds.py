"""Kinds of decoder layers: paths of their linears, norms and other parts.

A new kind is a row of KINDS. Layers of a kind may still compute something else: proof.py compares each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from torch import Tensor

MIXER_INPUTS: Final = ("mixer_in0", "mixer_in1", "mixer_in2", "mixer_in3")  # in the order of a mixer's `Layout`
HEAD_NORMS: Final = {part: f"self_attn.{part}" for part in ("q_norm", "k_norm", "v_norm")}


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Paths of a layer's parts, by the names that the kernels have for them."""

    # A layer that attends to keys and values of an earlier one has no k and v; one whose values are its keys has no v.
    linears: Mapping[str, str]
    norms: Mapping[str, str]  # of hidden states
    act: str = "mlp.act_fn"
    feed_forward: str = ""  # a module that is the model's own, in the place of gate, up, down and `act`
    is_parallel: bool = False  # the feed-forward part reads the states that attention reads
    # The rows of merged q, k and v lie by heads of keys: the queries of one, its key, its value.
    is_grouped: bool = False
    attention: str = "self_attn"
    input_act: str = ""  # the activation of what is computed of the layer's own input; "": it has none
    # Modules that are the model's own in the place of attention with its linears. A layer has one of them, or attention
    # where its linears are among these.
    own_mixers: tuple[str, ...] = ()
    mixer: str = ""  # in attention's place in some layers, with linears of these: one that has a `MixerSpec`
    head_norms: Mapping[str, str] = field(default_factory=lambda: HEAD_NORMS)  # of heads, which a layer may have
    # A module of the model's own that reads what `feed_forward` reads, one of the model's own too. Their outputs are
    # added.
    beside_feed_forward: str = ""
    answers_more: bool = False  # a layer answers with a pair, whose second is None

    @property
    def own_parts(self) -> tuple[str, ...]:
        """Paths of the parts that are the model's own."""
        return tuple(path for path in (*self.own_mixers, self.feed_forward, self.beside_feed_forward) if path)

    @property
    def attends(self) -> bool:
        """True if layers, or some of them, have attention with linears of these names."""
        return "q" in self.linears

    @property
    def keeps_states(self) -> bool:
        """True if some layers have a recurrence."""
        return bool(self.own_mixers or self.mixer)

    @property
    def token_mixers(self) -> tuple[str, ...]:
        """Paths of the modules of which each layer has one: attention, and what may stand in its place."""
        return tuple(path for path in (self.attention if self.attends else "", self.mixer, *self.own_mixers) if path)

    @property
    def merges_qkv(self) -> bool:
        """True if q, k and v are one linear."""
        return self.attends and "k" not in self.linears

    @property
    def merges_gate_up(self) -> bool:
        """True if gate and up are one linear."""
        return "gate" in self.linears and "up" not in self.linears

    def answer(self, hidden: Tensor) -> Tensor | tuple[Tensor, None]:
        """A layer's answer with these states."""
        return (hidden, None) if self.answers_more else hidden

    def without(self, *paths: str) -> LayerNames:
        """The same with these modules in attention's place as the model's own."""
        linears = {part: path for part, path in self.linears.items() if path.partition(".")[0] not in paths}
        mixer = "" if self.mixer in paths else self.mixer
        head_norms = {} if self.attention in paths else self.head_norms
        return replace(self, linears=linears, own_mixers=(*paths, *self.own_mixers), mixer=mixer, head_norms=head_norms)


_ATTENTION: Final = {part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")}
_GATED: Final = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_DELTA: Final = {
    **{name: f"linear_attn.in_proj_{part}" for name, part in zip(MIXER_INPUTS, ("qkv", "z", "b", "a"), strict=True)},
    "mixer_out": "linear_attn.out_proj",
}
_DELTA_BY_KEY_HEADS: Final = {
    **{name: f"linear_attn.in_proj_{parts}" for name, parts in zip(MIXER_INPUTS, ("qkvz", "ba"), strict=False)},
    "mixer_out": "linear_attn.out_proj",
}
_MAMBA2: Final = {"mixer_in0": "mamba.in_proj", "mixer_out": "mamba.out_proj"}
_FEED_FORWARD: Final = {part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
_SHARED: Final = {"gate": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}
_SPLIT: Final = {**_ATTENTION, **_GATED}
_GATE_UP: Final = {"gate": "mlp.gate_up_proj", "down": "mlp.down_proj"}
_MERGED: Final = {"q": "self_attn.qkv_proj", "o": "self_attn.o_proj", **_GATE_UP}
_GROUPED: Final = {"q": "attention.query_key_value", "o": "attention.dense"}
_NORMS_BEFORE: Final = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_NORM_OF_BOTH: Final = {"norm1": "input_layernorm"}
_NORMS_BEHIND: Final = {"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}
_NORMS_AROUND: Final = {"norm1": "input_layernorm", "norm2": "pre_feedforward_layernorm", **_NORMS_BEHIND}
_OF_INPUT: Final = {"input_gate": "per_layer_input_gate", "input_projection": "per_layer_projection"}
_NORMS_OF_GLM: Final = {
    **_NORMS_BEFORE,
    "attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_mlp_layernorm",
}
_NORMS_OF_JAMBA: Final = {"norm1": "input_layernorm", "norm2": "pre_ff_layernorm"}
# Layers with attention beside layers with a mixer of known parts.
_MIXERS: Final = (
    LayerNames({**_ATTENTION, **_DELTA, **_GATED}, _NORMS_BEFORE, mixer="linear_attn"),  # Qwen 3.5
    LayerNames({**_ATTENTION, **_DELTA}, _NORMS_BEFORE, "", "mlp", mixer="linear_attn"),  # the same with experts
    LayerNames({**_ATTENTION, **_DELTA_BY_KEY_HEADS}, _NORMS_BEFORE, "", "mlp", mixer="linear_attn"),  # Qwen3-Next
    LayerNames(
        {**_ATTENTION, **_MAMBA2, **_SHARED}, _NORMS_BEFORE, "shared_mlp.activation", mixer="mamba"
    ),  # Granite 4
    LayerNames(
        {**_ATTENTION, **_MAMBA2},
        _NORMS_BEFORE,
        "",
        "block_sparse_moe",
        mixer="mamba",
        beside_feed_forward="shared_mlp",
    ),  # the same with experts
    LayerNames(
        {**_ATTENTION, **_MAMBA2, **_FEED_FORWARD},
        _NORMS_OF_JAMBA,
        "feed_forward.act_fn",
        mixer="mamba",
        answers_more=True,
    ),  # Bamba
)
# Layers with attention beside layers with another recurrence in its place.
_HYBRIDS: Final = (
    LayerNames(_SPLIT, _NORMS_BEFORE, own_mixers=("linear_attn",)),  # Qwen 3.5 of other sizes than a stack knows
    LayerNames(
        {**_ATTENTION, **_FEED_FORWARD}, _NORMS_OF_JAMBA, "feed_forward.act_fn", own_mixers=("mamba",)
    ),  # Jamba without experts
    # Granite 4 and Bamba with Mamba 2 of other sizes than a stack knows.
    *(kind.without("mamba") for kind in _MIXERS if kind.mixer == "mamba"),
    LayerNames(
        {
            **_ATTENTION,
            "o": "self_attn.out_proj",
            "gate": "feed_forward.w1",
            "up": "feed_forward.w3",
            "down": "feed_forward.w2",
        },
        {"norm1": "operator_norm", "norm2": "ffn_norm"},
        "",
        own_mixers=("conv",),
        head_norms={"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"},
    ),  # LFM2
    LayerNames(
        _ATTENTION, _NORMS_BEFORE, "", "mlp", own_mixers=("linear_attn",)
    ),  # the same with experts, and Qwen3-Next
)
KINDS: Final = (
    LayerNames(_SPLIT, _NORMS_BEFORE),  # Llama, Qwen, Gemma, Granite
    LayerNames(_SPLIT, _NORMS_AROUND),  # Gemma 2 and 3
    LayerNames(
        {**_SPLIT, **_OF_INPUT}, {**_NORMS_AROUND, "input_norm": "post_per_layer_input_norm"}, input_act="act_fn"
    ),  # Gemma 4
    LayerNames(_SPLIT, _NORMS_BEHIND),  # EXAONE 4, OLMo 2 and 3
    LayerNames(_MERGED, _NORMS_BEFORE, "mlp.activation_fn"),  # Phi-3
    LayerNames({**_ATTENTION, **_GATE_UP}, _NORMS_BEFORE, "mlp.activation_fn"),  # GLM
    LayerNames({**_ATTENTION, **_GATE_UP}, _NORMS_OF_GLM, "mlp.activation_fn"),  # GLM 4
    LayerNames(_SPLIT, _NORM_OF_BOTH, is_parallel=True),  # Cohere
    LayerNames(_ATTENTION, _NORMS_BEFORE, "", "mlp"),  # Mixtral, Qwen MoE, OLMoE, gpt-oss
    LayerNames(_ATTENTION, _NORMS_BEFORE, "", "block_sparse_moe"),  # Granite MoE
    LayerNames(
        _ATTENTION, _NORMS_BEFORE, "", "block_sparse_moe", beside_feed_forward="shared_mlp"
    ),  # the same with a shared expert
    LayerNames(_ATTENTION, _NORMS_BEHIND, "", "mlp"),  # FlexOlmo
    LayerNames({**_ATTENTION, "o": "self_attn.dense"}, _NORM_OF_BOTH, "", "mlp", is_parallel=True),  # Phi 1.5
    *(
        LayerNames(_GROUPED, _NORMS_BEFORE, "", "mlp", is_parallel, is_grouped=True, attention="attention")
        for is_parallel in (True, False)
    ),  # GPT-NeoX
    *_MIXERS,
    *(kind.without("self_attn") for kind in _MIXERS),
    *_HYBRIDS,
    *(kind.without("self_attn") for kind in _HYBRIDS),  # those with attention of another kind, and DeepSeek
)
