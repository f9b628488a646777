"""The draw's kernel against its definition.

Not collected by itself: `test_interpreter.py` runs it in Triton's interpreter, in a process of its own. By hand:
`OMP_NUM_THREADS=1 TRITON_INTERPRET=1 pytest tests/unit/server/backends/cuda/draw_kernels.py`.
"""

from __future__ import annotations

import pytest
import torch
from support.draw_cases import SHAPES, rows_of, scores_of
from support.sampling_oracle import noise_field

from loraplex_server.backends.cuda import draw
from loraplex_server.sampling.draw import draw_dense


@pytest.mark.parametrize("vocab_size", [1, 65, 700, 9000])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_tokens(shape: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "BLOCK", 512)  # so that most rows have several
    scores, noise = scores_of(shape, vocab_size, torch.float32), noise_field(vocab_size)
    wide = torch.full((len(scores), vocab_size + 3), float("nan"))
    wide[:, :vocab_size] = scores
    top_k = [min(k, vocab_size) for k in (0, 1, 5, 0, 60, 0)]
    for rows, truncates in (
        (rows_of([0], [1.0], [0.0], torch.float32), False),
        (rows_of(top_k, [0.9, 0.5, 1.0, 1e-3], [0.0, 0.05, 1.0, 0.3], torch.float32), True),
    ):
        expected = draw_dense(scores, rows, noise, truncates=truncates)
        for given in (scores, wide[:, :vocab_size]):
            found = draw_dense(given, rows, noise, truncates=truncates, noisy_argmax=draw.draw_noisy)
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_of_nothing_but_nan_disturbs_no_other() -> None:
    scores, noise, rows = (
        scores_of("normal", 700, torch.float32),
        noise_field(700),
        rows_of([0], [1.0], [0.0], torch.float32),
    )
    expected = draw_dense(scores, rows, noise, truncates=False)[0]
    scores[3] = float("nan")
    scores[5] = float("inf")
    found = draw_dense(scores, rows, noise, truncates=False, noisy_argmax=draw.draw_noisy)[0]
    assert ((found >= 0) & (found < 700)).all()
    others = torch.tensor([row for row in range(len(scores)) if row not in (3, 5)])
    assert torch.equal(found[others], expected[others])


def test_other_dtypes_are_left_to_the_definition() -> None:
    scores, noise = scores_of("normal", 700, torch.float64), noise_field(700)
    rows = rows_of([0], [1.0], [0.0], torch.float64)
    found = draw_dense(scores, rows, noise, truncates=False, noisy_argmax=draw.draw_noisy)
    assert torch.equal(found[0], draw_dense(scores, rows, noise, truncates=False)[0])
