"""Loglikelihoods of lm-eval over HTTP beside its `hf` model, in float32."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from calls import call, equal, facts, run
from lm_eval.tasks import TaskManager

TASK = "words"
TASK_FILE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
WORDS = ("one day", "a king", "the sea", "twelve", "é", "nothing at all", "x")
MODELS = {facts.base: "", **{name: name for name in facts.adapters[:2]}}
TOLERANCE = 1e-3  # of a loglikelihood
folder = Path(tempfile.mkdtemp())


def write_task() -> TaskManager:
    rows = [
        {"question": f"{first}, {second}:", "choices": [f" {first}", f" {second}", " they were"], "label": index % 3}
        for index, first in enumerate(WORDS)
        for second in WORDS
        if first != second
    ]
    data = folder / "words.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.yaml").write_text(TASK_FILE.format(name=TASK, data=data))
    return TaskManager(include_path=str(folder))


tasks = write_task()


def evaluated(model: str, arguments: dict[str, Any]) -> tuple[float, list[tuple[float, bool]]]:
    """Accuracy, and each choice's loglikelihood with whether it is the greedy text."""
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[TASK],
        task_manager=tasks,
        batch_size=1,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    answers = [answer[0] for sample in found["samples"][TASK] for answer in sample["resps"]]
    return found["results"][TASK]["acc,none"], [(float(value), str(greedy) == "True") for value, greedy in answers]


def by_hf(adapter: str, **options: Any) -> tuple[float, list[tuple[float, bool]]]:
    peft = {"peft": str(Path(facts.adapters_folder) / adapter)} if adapter else {}
    return evaluated("hf", {"pretrained": facts.model_folder, "dtype": "float32", **peft, **options})


def by_server(model: str, **options: Any) -> tuple[float, list[tuple[float, bool]]]:
    arguments = {"model": model, "base_url": f"{facts.url}/v1/completions", "num_concurrent": 4, **options}
    return evaluated("local-completions", arguments)


def alike(found: tuple[float, list[tuple[float, bool]]], expected: tuple[float, list[tuple[float, bool]]]) -> None:
    equal(found[0], expected[0])
    equal(len(found[1]), len(expected[1]))
    for (value, greedy), (expected_value, expected_greedy) in zip(found[1], expected[1], strict=True):
        assert abs(value - expected_value) < TOLERANCE, f"{value} is not {expected_value}"
        equal(greedy, expected_greedy)


for name, adapter in MODELS.items():

    @call(f"loglikelihoods of {name}")
    def _(name: str = name, adapter: str = adapter) -> None:
        alike(by_server(name, tokenizer=facts.model_folder), by_hf(adapter))


@call("loglikelihoods with the server's tokenizer")
def _() -> None:
    # Through a remote tokenizer lm-eval adds no first token.
    name = facts.adapters[0]
    alike(by_server(name, tokenizer_backend="remote"), by_hf(name, add_bos_token=False))


run()
