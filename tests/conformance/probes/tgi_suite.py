"""TGI's own tests of its client."""

from __future__ import annotations

import sys

import pytest
import suite
from calls import facts
from huggingface_hub.utils import build_hf_headers


@pytest.fixture
def llama_7b_url() -> str:
    return facts.url


@pytest.fixture
def fake_url() -> str:
    return f"{facts.url}/models/fake/model"


@pytest.fixture
def hf_headers() -> dict[str, str]:
    return build_hf_headers(library_name="text-generation-tests", token=False)


if __name__ == "__main__":
    sys.exit(suite.run("tgi", sys.modules[__name__]))
