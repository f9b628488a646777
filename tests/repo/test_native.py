"""Native library of this checkout, where a C++ compiler exists."""

from __future__ import annotations

import ctypes

import pytest
from support.native import compiler_or_skip

from loraplex_server.backends.cpu.native.library import IDENTITY, KERNELS, Library, load

NO_SUCH_CPU = "this CPU has none"


@pytest.fixture
def library() -> Library:
    compiler_or_skip()
    library, status = load()
    if status.reason.startswith(NO_SUCH_CPU):
        pytest.skip(f"native kernels: {status.reason}")
    assert library is not None, f"native kernels: {status.reason}; or make native"
    return library


def test_it_is_that_of_the_present_sources(library: Library) -> None:
    assert library.isa in compiler_or_skip().variants


def test_every_function_has_its_prototype(library: Library) -> None:
    for name, prototype in {**IDENTITY, **KERNELS}.items():
        function = getattr(library.functions, name)
        assert (function.restype, function.argtypes) == (prototype.returns, prototype.arguments)
        assert isinstance(function, ctypes._CFuncPtr)


def test_another_variant_can_be_asked_for(library: Library) -> None:
    best, use = library.isa, library.functions.lp_use_isa
    try:
        assert use(b"avx2") == 0, "every CPU that runs another variant runs this one"
        assert library.isa == "avx2"
        for name in (b"none", b"avx9", b""):
            assert use(name) == -1
            assert library.isa == "avx2"
    finally:
        assert use(best.encode()) == 0
    assert library.isa == best
