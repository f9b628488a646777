"""Exact-match evaluation of the demo through Transformers and PEFT.

Uses nothing of the engine: the report must be true of the files, whatever serves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from loraplex_demo.formats import FORMATS
from loraplex_demo.world import MAX_NEW_TOKENS, Case, exact_match

Matrix = dict[str, dict[str, float]]


def exact_match_matrix(
    base: Path,
    adapters: Sequence[Path],
    cases: Sequence[Case],
    dtype: torch.dtype,
    on_adapter: Callable[[], None],
) -> Matrix:
    """Share of answers equal to each format's rendering. The row "" is the base model without an adapter."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    matrix: Matrix = {}
    for path in (None, *adapters):
        name = "" if path is None else path.name
        if path is not None and isinstance(model, PeftModel):
            model.load_adapter(str(path), adapter_name=name)
        elif path is not None:
            model = PeftModel.from_pretrained(model, str(path), adapter_name=name).eval()
        if path is not None:
            model.set_adapter(name)
        answers = greedy_answers(model, tokenizer, [case.prompt for case in cases])
        on_adapter()
        matrix[name] = {format_name: _share(answers, cases, format_name) for format_name in FORMATS}
    return matrix


def answered_by_all(
    base: Path, adapters: Mapping[str, Path], base_format: str, cases: Sequence[Case], dtype: torch.dtype
) -> list[int]:
    """Indices of the cases that the base model and every adapter answer correctly. `adapters`: path by format."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    right = set(range(len(cases)))
    for format_name, path in {base_format: None, **adapters}.items():
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
        if path is not None:
            model = PeftModel.from_pretrained(model, str(path)).eval()
        answers = greedy_answers(model, tokenizer, [case.prompt for case in cases])
        right &= {
            idx
            for idx, (answer, case) in enumerate(zip(answers, cases, strict=True))
            if exact_match(answer, case.expected(format_name))
        }
    return sorted(right)


@torch.inference_mode()
def greedy_answers(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[str]:
    """The greedy continuation of each prompt, up to the end-of-text token."""
    encoded = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
    output = model.generate(**encoded, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new_tokens = output[:, encoded["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new_tokens, skip_special_tokens=True)


def _share(answers: Sequence[str], cases: Sequence[Case], format_name: str) -> float:
    right = sum(exact_match(answer, case.expected(format_name)) for answer, case in zip(answers, cases, strict=True))
    return round(right / len(cases), 4)


def matrix_table(matrix: Matrix) -> str:
    """Rows are adapters, columns formats, in percent."""
    header = f"{'':12}" + "".join(f"{name:>10}" for name in FORMATS)
    rows = [
        f"{name or '(none)':12}" + "".join(f"{share:>10.1%}" for share in shares.values())
        for name, shares in matrix.items()
    ]
    return "\n".join([header, *rows])
