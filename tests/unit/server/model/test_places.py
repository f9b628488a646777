"""Models in folders, in the Hub's cache, on a Hub that is away."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from loraplex_contracts.errors import AdapterNotFound, InvalidArgument, UnsupportedModel
from loraplex_server.config import AdaptersConfig, EngineConfig, ModelConfig, SpeculationConfig
from loraplex_server.model.places import check_places, reaching_hub

NAME = "org/model"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A port that takes no connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        yield endpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cached(cache: Path) -> None:
    folder = cache / "models--org--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("c0ffee")
    (folder / "snapshots/c0ffee").mkdir(parents=True)
    (folder / "snapshots/c0ffee/config.json").write_text("{}")


def test_without_a_hub_the_error_comes_once_and_soon(no_hub: str, cache: Path) -> None:
    start_s = time.monotonic()
    with pytest.raises(UnsupportedModel) as caught, reaching_hub([(NAME, None)]):
        raise AssertionError
    assert time.monotonic() - start_s < 5
    assert caught.value.message.startswith(
        f"org/model cannot be loaded: there is no such directory, and the Hub ({no_hub})"
    )
    assert caught.value.message.endswith("give a directory, or HF_ENDPOINT for another Hub")


@pytest.mark.parametrize(("text", "base"), [('{"base_model_name_or_path": "org/model"}', " (org/model)"), ("[]", "")])
def test_an_adapter_is_no_model(tmp_path: Path, text: str, base: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/adapter_config.json").write_text(text)
    with pytest.raises(UnsupportedModel) as caught:
        check_places(EngineConfig(model=ModelConfig(str(tmp_path / "mine"))))
    assert caught.value.message.endswith(
        f"it has an adapter, not a model; serve its base model{base} with --adapters {tmp_path}"
    )


def test_without_a_hub_its_cache_does(no_hub: str, cache: Path) -> None:
    cached(cache)
    with reaching_hub([(NAME, None)]):
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    with pytest.raises(UnsupportedModel), reaching_hub([(NAME, "another-revision")]):
        raise AssertionError


def test_a_misspelt_folder(tmp_path: Path, cache: Path, no_hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "bsaes"):  # the second one has no model
        Path(name).mkdir()
    Path("base/config.json").write_text("{}")
    for given in ("bsae", "./bsae", str(tmp_path / "bsae")):
        with pytest.raises(
            UnsupportedModel, match=rf"no such directory.*; did you mean {Path(given).parent / 'base'}\?$"
        ):
            check_places(EngineConfig(model=ModelConfig(given)))
    with pytest.raises(UnsupportedModel, match=r"for another Hub$"):
        check_places(EngineConfig(model=ModelConfig("unlike")))


def test_a_server_that_asks_no_hub_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch, no_hub: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnsupportedModel, match="HF_HUB_OFFLINE is set"), reaching_hub([(NAME, None)]):
        raise AssertionError
    cached(cache)
    with reaching_hub([(NAME, None)]):
        pass
    assert constants.HF_HUB_OFFLINE


def test_folders_are_never_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex_server.model.places._trouble", lambda _: pytest.fail("the Hub was asked"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text("{}")
    with reaching_hub([(str(tmp_path), None), (str(tmp_path / "lora"), None)]):
        pass
    for name in ("./nowhere", "~/nowhere", "/no/where", "a/b/c", "a b"):
        with pytest.raises(UnsupportedModel, match="there is no such directory"), reaching_hub([(name, None)]):
            raise AssertionError


def test_a_file_and_an_empty_folder_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UnsupportedModel, match="it is a file"), reaching_hub([(str(tmp_path / "model.gguf"), None)]):
        raise AssertionError
    with pytest.raises(UnsupportedModel, match=r"has no config\.json"), reaching_hub([(str(tmp_path), None)]):
        raise AssertionError


def test_a_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="MODEL must not be empty; give a directory or a Hub id"):
        check_places(EngineConfig(ModelConfig("")))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, whom tests may run as, may read all."""
    for one in ("config.json", "model.safetensors"):
        (tmp_path / one).touch()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != name)
    with (
        pytest.raises(UnsupportedModel, match=rf"the server's user \d+ may not read {name}; change its permissions"),
        reaching_hub([(str(tmp_path), None)]),
    ):
        raise AssertionError


def config_of(folder: Path, speculation: SpeculationConfig, adapters: Path | None = None) -> EngineConfig:
    (folder / "config.json").write_text("{}")
    return EngineConfig(ModelConfig(str(folder)), speculation=speculation, adapters=AdaptersConfig(root=adapters))


@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationConfig(draft_models=("small=./nowhere",)),
        SpeculationConfig(draft_models=("small=HERE",), draft_adapters=("small=./nowhere",)),
    ],
)
def test_draft_models_are_looked_for_first(tmp_path: Path, speculation: SpeculationConfig) -> None:
    here = tuple(one.replace("HERE", str(tmp_path)) for one in speculation.draft_models)
    speculation = SpeculationConfig(draft_models=here, draft_adapters=speculation.draft_adapters)
    with pytest.raises(UnsupportedModel, match=r"\./nowhere cannot be loaded"):
        check_places(config_of(tmp_path, speculation))


def test_default_heads_are_looked_for_first(tmp_path: Path) -> None:
    (tmp_path / "adapters/heads").mkdir(parents=True)
    speculation = SpeculationConfig(default_medusa="heads")
    check_places(config_of(tmp_path, speculation, tmp_path / "adapters"))
    shutil.rmtree(tmp_path / "adapters/heads")
    with pytest.raises(AdapterNotFound, match="--default-medusa"):
        check_places(config_of(tmp_path, speculation, tmp_path / "adapters"))
    with pytest.raises(AdapterNotFound, match="--default-medusa"):
        check_places(config_of(tmp_path, speculation))
