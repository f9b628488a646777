"""Tiny random checkpoints with parts for images or audio."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel, modeling_utils

from loraplex_server.model.language import make_language_model
from loraplex_server.model.tiny import Fields, tiny_config
from support.sweep import shorten

_FULL = "full_attention"
_SECTIONS: Fields = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_OF_QWEN: Fields = {"text_config": {"rope_parameters": _SECTIONS}}
_OF_GLM: Fields = {"text_config": {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 0.5}}}
_OF_OMNI: Fields = {"vision_start_token_id": 3, "audio_start_token_id": 4}  # `generate()` asks for them
# What the families' defaults lack.
FAMILIES: Final[Mapping[str, Fields]] = {
    "qwen2_vl": _OF_QWEN,
    "qwen2_5_vl": _OF_QWEN,
    "qwen3_vl": {},
    "mistral3": {},
    "gemma3": {},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "llama4": {"text_config": {"layer_types": ["full_attention"] * 48}},
    "qwen3_5": {},
    "voxtral": {},
}
# More that equal their whole model's texts.
MORE: Final = (
    *("aya_vision", "cohere2_vision", "cosmos3_edge", "cosmos3_omni", "deepseek_vl"),
    *("ernie4_5_vl_moe", "exaone4_5", "fuyu", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmasr", "got_ocr2"),
    *("granite_speech", "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus"),
    *("kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llava", "llava_next", "llava_next_video"),
    *("llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "moss_transcribe_diarize"),
    *("muse_glimmer", "nemotron_h_omni", "ovis2", "paddleocr_vl", "qianfan_ocr", "qwen2_5_omni_thinker"),
    *("qwen2_audio", "qwen3_5_moe", "qwen3_asr", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "smolvlm", "step3p7"),
    *("video_llava", "vipllava"),
)
_OF_MORE: Final[Mapping[str, Fields]] = {
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": _SECTIONS | {"mrope_section": [1, 1, 2]}}},
    **dict.fromkeys(("glm_ocr", "paddleocr_vl"), _OF_QWEN),
    "glm46v": {"text_config": {"model_type": "glm4v_text"} | _OF_GLM["text_config"]},
    **dict.fromkeys(("glm4v", "glm4v_moe"), _OF_GLM),
    "qwen2_5_omni_thinker": _OF_QWEN | _OF_OMNI,
    "qwen3_omni_moe_thinker": _OF_OMNI,
    "step3p7": {"text_config": {"sliding_window": 6, "layer_types": [_FULL, "sliding_attention", *[_FULL] * 43]}},
}


# `generate()` computes their recurrences in float32.
STATEFUL: Final = ("qwen3_5", "qwen3_5_moe", "lfm3_vl", "minicpmv4_6", "nemotron_h_omni")


def multimodal_config(family: str) -> PreTrainedConfig:
    changes: Any = copy.deepcopy(dict({**FAMILIES, **_OF_MORE}.get(family, {})))
    return tiny_config(CONFIG_MAPPING[family](**changes), amend=shorten)


def whole_model(family: str, seed: int = 3) -> PreTrainedModel:
    """A model in float64, with all its parts."""
    torch.manual_seed(seed)
    config = multimodal_config(family)
    model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if family.startswith("gemma"):
            cast(torch.Tensor, model.get_input_embeddings().weight).mul_(
                0.1
            )  # else they would repeat their last token for ever
    model.set_experts_implementation("eager")
    generation: Any = model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0
    return model.eval()


def language_model(family: str) -> PreTrainedModel:
    """The part of `whole_model` that is served."""
    whole = whole_model(family)
    model = make_language_model(copy.deepcopy(whole.config), dtype=torch.float64)
    model.load_state_dict(whole.state_dict(), strict=False)
    model.generation_config = whole.generation_config
    return model.eval()


class _Slice:
    """One tensor of a file, which notes its name when it is read."""

    def __init__(self, name: str, inner: Any, names: list[str]) -> None:
        self._name, self._inner, self._names = name, inner, names

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._names.append(self._name)
        return self._inner[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _File:
    def __init__(self, inner: Any, names: list[str]) -> None:
        self._inner, self._names = inner, names

    def get_slice(self, name: str) -> _Slice:
        return _Slice(name, self._inner.get_slice(name), self._names)

    def get_tensor(self, name: str) -> torch.Tensor:
        self._names.append(name)
        return self._inner.get_tensor(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> _File:
        return _File(self._inner.__enter__(), self._names)

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)


@contextmanager
def tensors_read() -> Generator[list[str]]:
    """Names of the tensors that Transformers reads from files within the block."""
    names: list[str] = []
    own = modeling_utils.safe_open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_utils, "safe_open", lambda *args, **options: _File(own(*args, **options), names))
        yield names
