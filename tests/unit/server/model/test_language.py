"""Language models of checkpoints with other parts."""

from __future__ import annotations

import transformers as tf
from transformers import AutoModel

from loraplex_server.model.language import absent_parts, make_language_model
from loraplex_server.model.tiny import tiny_config


def test_a_tower_needs_no_package() -> None:
    """Gemma 3n's is timm's, which the server does not need."""
    own = vars(AutoModel)["from_config"]
    model = make_language_model(tiny_config(tf.Gemma3nConfig()))
    assert absent_parts(model) == ("model.vision_tower", "model.audio_tower")
    assert vars(AutoModel)["from_config"] is own
