"""Commands whose parameters are dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.flags import arguments_of, flags_of, option, with_flags


@dataclass(frozen=True)
class Size:
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def parse_size(text: str) -> Size:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise InvalidArgument("--size takes WxH", field="--size")
    return Size(int(width), int(height))


@dataclass(frozen=True)
class Frame:
    size: Size = option(Size(2, 3), "How large.", "--size", "-s", parse=parse_size, metavar="WxH")
    inner: Size | None = option(None, "What is cut out.", "--inner", parse=parse_size)
    names: tuple[str, ...] = option((), "Names.", "--name", "-n")
    memory: int = option(1 << 20, "Memory.", "--memory", is_bytes=True)


@dataclass(frozen=True)
class Lights:
    lamp: bool = option(False, "A lamp.", "--lamp")
    sun: bool = option(True, "The sun.", "--sun")
    music: bool = option(True, "Music.", "--music", off="--silence", panel="Noise")
    token: str | None = option(None, "A token.", "--token", env="LAMP_TOKEN")


@dataclass(frozen=True)
class Room:
    """Nested, with a field that is no flag."""

    frame: Frame = field(default_factory=Frame)
    number: int = 7


@dataclass(frozen=True)
class Brush:
    hair: str = option("hog", "Hair.", "--hair")
    width: int = option(2, "Width.", "--width")
    length: int = option(9, "Length.", "--length")


@dataclass(frozen=True)
class WideBrush(Brush):
    width: int = option(8, "Width.", "--width")
    length: int = 3  # no flag here
    frame: Frame = field(default_factory=Frame)


def run(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    @with_flags
    def paint(
        what: Annotated[str, typer.Argument()],
        *,
        room: Room,
        twice: Annotated[bool, typer.Option("--twice")] = False,
        lights: Lights,
    ) -> None:
        """Paint."""
        seen.update(what=what, room=room, twice=twice, lights=lights)

    result = invoke(paint, *arguments, env=env)
    assert result.exit_code == 0, result.output
    return seen


def invoke(command: Callable[..., None], *arguments: str, env: dict[str, str] | None = None) -> Any:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_dataclasses_arrive_whole() -> None:
    assert run("wall") == {"what": "wall", "room": Room(), "twice": False, "lights": Lights()}


def test_every_kind_of_value() -> None:
    seen = run("wall", "-s", "4x5", "--inner", "1x1", "-n", "a", "--name", "b", "--memory", "2KiB", "--twice")
    assert seen["room"] == Room(Frame(Size(4, 5), Size(1, 1), ("a", "b"), 2048))
    assert seen["twice"] is True


def test_flags_of_a_class_go_before_those_of_its_base() -> None:
    flags = list(flags_of(WideBrush))
    assert [flag.flag for flag in flags] == ["--width", "--size", "--inner", "--name", "--memory", "--hair"]
    assert flags[0].default == 8


def test_arguments_make_the_same_configuration_again() -> None:
    room = Room(Frame(Size(4, 5), Size(1, 1), ("a", "b"), 2048))
    lights = Lights(lamp=True, sun=False, music=False, token="t")
    seen = run("wall", *arguments_of(room), *arguments_of(lights))
    assert (seen["room"], seen["lights"]) == (room, lights)
    assert arguments_of(Room()) == []


def test_switches_have_the_opposite_that_they_need() -> None:
    assert run("wall", "--lamp", "--no-sun", "--silence")["lights"] == Lights(True, False, False)
    for flag in ("--no-lamp", "--no-music"):
        with pytest.raises(AssertionError, match="No such option"):
            run("wall", flag)


def test_the_environment_may_give_a_value() -> None:
    assert run("wall", env={"LAMP_TOKEN": "t"})["lights"].token == "t"
    assert run("wall", "--token", "u", env={"LAMP_TOKEN": "t"})["lights"].token == "u"


def test_a_value_that_is_none_raises_what_its_parser_raises() -> None:
    with pytest.raises(InvalidArgument, match="WxH"):
        run("wall", "--size", "big")


@dataclass(frozen=True)
class Files:
    folder: Path | None = option(None, "A folder.", "--folder")


def test_a_path_is_not_empty() -> None:
    seen: list[Files] = []

    @with_flags
    def command(files: Files) -> None:
        seen.append(files)

    invoke(command, "--folder", "a/b")
    invoke(command)
    assert seen == [Files(Path("a/b")), Files()]
    with pytest.raises(InvalidArgument, match="--folder must not be empty; leave it out or give a path"):
        invoke(command, "--folder", "")
    assert "--folder PATH" in " ".join(invoke(command, "--help").output.split())


def test_the_help_has_defaults_names_and_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    @with_flags
    def paint(frame: Frame, lights: Lights) -> None:
        """Paint a room."""

    shown = invoke(paint, "--help").output
    for text in ("Paint a room.", "WxH", "[default: 2x3]", "[default: 1MiB]", "LAMP_TOKEN", "Noise", "--silence"):
        assert text in shown
