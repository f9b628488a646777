"""PEFT models for pooled values: embeddings and classifiers.

Their files are beside those of other adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel

from support.peft_files import linear_names


def hidden_states(model: nn.Module, prompt: Sequence[int]) -> np.ndarray:
    """Hidden states [num_tokens, hidden] behind the last norm, by the model's own code."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    backbone = getattr(base, base.base_model_prefix, base)
    with torch.no_grad():
        return backbone(input_ids=torch.tensor([list(prompt)])).last_hidden_state[0].numpy()


def feature_extraction(base: PreTrainedModel, folder: Path) -> PeftModel:
    """PEFT's model over the base model without its head; its files are in `folder` afterwards."""
    torch.manual_seed(7)
    backbone = copy.deepcopy(getattr(base, base.base_model_prefix))
    return _saved(backbone, base, TaskType.FEATURE_EXTRACTION, 3, folder)


def classifier(base: PreTrainedModel, folder: Path, num_labels: int, *, per_token: bool = False) -> PeftModel:
    """PEFT's model over the base model with a classifier in the place of its head."""
    torch.manual_seed(num_labels)
    config = copy.deepcopy(base.config)
    config.num_labels = num_labels
    kind = AutoModelForTokenClassification if per_token else AutoModelForSequenceClassification
    model = kind.from_config(config).to(torch.float64)
    prefix = base.base_model_prefix
    getattr(model, prefix).load_state_dict(getattr(base, prefix).state_dict())
    return _saved(model, base, TaskType.TOKEN_CLS if per_token else TaskType.SEQ_CLS, 2, folder)


def _saved(model: PreTrainedModel, base: PreTrainedModel, task: TaskType, rank: int, folder: Path) -> PeftModel:
    """PEFT's model over one with the linears of `base`."""
    config = LoraConfig(
        task_type=task,
        r=rank,
        target_modules=linear_names(base)[0],
        init_lora_weights=False,
        fan_in_fan_out=base.config.model_type == "gpt2",
    )
    peft = get_peft_model(model, config)
    peft.save_pretrained(folder)
    return peft.eval()
