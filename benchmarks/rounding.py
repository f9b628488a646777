"""Accuracy of `--quantize` beside the model as it is, in Transformers.

    python benchmarks/rounding.py demo             # the demo's base and adapters, on records they were not trained on
    python benchmarks/rounding.py demo --quantize int4
    python benchmarks/rounding.py MODEL_DIR        # any model, on random tokens

By position of a text that both are given: the divergence between the two distributions of the next token, and how often
both find the same token most likely; beside it how far the model is from itself in float32. Of the demo also how many
answers are right, for each adapter; adapters were trained beside the weights as they were. What the server computes
with is the rounded model (docs/adr/0012), so nothing is served here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from results import add_json_option, recording
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from loraplex_demo.evaluation import exact_match_matrix
from loraplex_demo.world import committed_world
from loraplex_server.layers.quantization import FORMATS, WeightFormat
from loraplex_server.model.rounding import round_weights

RANDOM_TEXTS, RANDOM_TOKENS = 16, 64


def load_model(path: Path, dtype: str = "auto") -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def load_rounded(path: Path, form: WeightFormat) -> Any:
    model = load_model(path)
    round_weights(model, form)
    return model


def distances(path: Path, form: WeightFormat, texts: list[list[int]]) -> dict[str, Any]:
    """Distances of the rounded model from the model, and, as a yardstick, of the model from itself in float32."""
    model = load_model(path)
    return {
        "positions": sum(map(len, texts)),
        "rounded": distance(model, load_rounded(path, form), texts),
        "float32": distance(model, load_model(path, "float32"), texts),
    }


@torch.inference_mode()
def distance(model: Any, other: Any, texts: list[list[int]]) -> dict[str, float]:
    """Distance of two models' distributions of the next token, as a mean over all positions of the texts."""
    divergence, apart, agreed = 0.0, 0.0, 0
    for text in texts:
        ids = torch.tensor([text])
        want, got = (one(input_ids=ids).logits[0].float() for one in (model, other))
        p, q = want.log_softmax(-1), got.log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum())
        agreed += int((want.argmax(-1) == got.argmax(-1)).sum())
        apart += float((got - want).norm() / want.norm()) * len(text)
    num_positions = sum(map(len, texts))
    return {
        "divergence_nats": round(divergence / num_positions, 6),
        "same_token": round(agreed / num_positions, 4),
        "logits_apart": round(apart / num_positions, 4),
    }


def demo(num_cases: int, form: WeightFormat) -> dict[str, Any]:
    world = committed_world()
    cases = world.cases(num_cases, "rounding")
    tokenizer = AutoTokenizer.from_pretrained(world.base_path)
    texts = [tokenizer(case.prompt + case.expected())["input_ids"] for case in cases]
    paths = [world.adapter_path(adapter.name) for adapter in world.adapters]
    with tempfile.TemporaryDirectory() as folder:
        rounded = Path(folder)
        load_rounded(world.base_path, form).save_pretrained(rounded)
        tokenizer.save_pretrained(rounded)
        dtype = load_model(world.base_path).dtype
        right = {
            name: exact_match_matrix(base, paths, cases, dtype, lambda: None)
            for name, base in (("as_it_is", world.base_path), ("rounded", rounded))
        }
    return {
        "model": "demo",
        "quantize": form.name,
        "dtype": str(dtype).removeprefix("torch."),
        **distances(world.base_path, form, texts),
        "right": {
            adapter or "(none)": {
                name: matrix[adapter][world.format_of(adapter or None)] for name, matrix in right.items()
            }
            for adapter in right["as_it_is"]
        },
    }


def any_model(path: Path, form: WeightFormat) -> dict[str, Any]:
    torch.manual_seed(0)
    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    texts = torch.randint(10, vocab_size, (RANDOM_TEXTS, RANDOM_TOKENS)).tolist()
    return {"model": path.name, "quantize": form.name, **distances(path, form, texts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="demo, or a model's directory")
    parser.add_argument("--quantize", choices=FORMATS, default="int8")
    parser.add_argument("--cases", type=int, default=512, help="held-out records of the demo")
    add_json_option(parser)
    args = parser.parse_args()
    disable_progress_bar()
    with recording(args.json) as record:
        form = FORMATS[args.quantize]
        record(demo(args.cases, form) if args.model == "demo" else any_model(Path(args.model), form))


if __name__ == "__main__":
    main()
