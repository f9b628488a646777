"""The tree of errors: unique reasons, plain data."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from loraplex_contracts import errors
from loraplex_contracts.errors import LoraplexError, by_reason


def all_classes(cls: type[LoraplexError] = LoraplexError) -> list[type[LoraplexError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in all_classes(sub))]


CLASSES = [cls for cls in all_classes() if cls is not LoraplexError]


def test_reasons_are_unique_and_found() -> None:
    reasons = [cls.reason for cls in CLASSES]
    assert len(set(reasons)) == len(reasons)
    assert by_reason() == {cls.reason: cls for cls in CLASSES}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_says_what_it_means(cls: type[LoraplexError]) -> None:
    assert "reason" in vars(cls), "a reason of its own, not an inherited one"
    assert cls.reason == cls.reason.upper()
    assert cls.__doc__
    parent = cls.__mro__[1]
    assert parent is LoraplexError or parent.code == cls.code, "a subclass narrows the reason, never the code"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_pickles_whole(cls: type[LoraplexError]) -> None:
    error = cls("what to do", field="a.b", resource="r", retry_after_s=1.5, metadata={"request_id": "q1", "k": "v"})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == again.message == "what to do"
    assert (again.field, again.resource, again.retry_after_s) == ("a.b", "r", 1.5)
    assert again.metadata == {"request_id": "q1", "k": "v"}
    assert again.request_id == "q1"
    assert again.retry_after == 1.5


@pytest.mark.parametrize("cls", [errors.InvalidArgument, errors.MessageTooLarge, errors.ListingTooLarge])
def test_commands_say_what_can_never_work(cls: type[LoraplexError]) -> None:
    assert (cls.exit_code, errors.ResourceExhausted.exit_code) == (2, 1)


def test_an_error_without_a_request_has_no_request_id() -> None:
    assert errors.QueueFull("wait").request_id is None


def test_metadata_is_not_shared_with_the_caller() -> None:
    given = {"a": "1"}
    error = errors.Internal("x", metadata=given)
    given["a"] = "2"
    assert error.metadata == {"a": "1"}


def test_errors_and_ids_need_only_the_standard_library() -> None:
    code = (
        "import sys; import loraplex_contracts.errors, loraplex_contracts.adapters; "
        "sys.exit(any(m.split('.')[0] in ('grpc', 'google', 'torch') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_typed_errors_stay_and_others_become_internal() -> None:
    error = errors.QueueFull("x")
    assert errors.as_typed(error, "testing") is error
    assert isinstance(errors.as_typed(ValueError("secret"), "testing"), errors.Internal)
    assert "secret" not in errors.as_typed(ValueError("secret"), "testing").message


def test_an_error_that_is_kept_holds_no_frames() -> None:
    try:
        try:
            raise ValueError("inner")
        except ValueError as inner:
            raise errors.QueueFull("x") from inner
    except errors.QueueFull as error:
        bare = errors.without_frames(error)
    assert bare.__traceback__ is bare.__cause__ is bare.__context__ is None
