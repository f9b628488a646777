"""The process for long texts alone: signals, what it loads, its end."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.tiny_tokenizers import tiny_tokenizer

from loraplex_runtime.shutdown import SIGNALS
from loraplex_server.frontend.tokenizer_process import Job, ProcessEnded, TokenizerProcess
from loraplex_server.grpc.protobuf import tokenize_response
from loraplex_server.text.tokenizer import TextTokenizer

TEXT = "The quick brown fox " * 10_000
TOKENIZER = TextTokenizer(tiny_tokenizer("byte_level"))


@pytest.fixture
def process() -> Iterator[TokenizerProcess]:
    serialized = TOKENIZER.serialized()
    assert serialized is not None
    one = TokenizerProcess(serialized)
    yield one
    one.end()
    assert not [child for child in multiprocessing.active_children() if child.name == "loraplex-tokenizer"]


def begun(process: TokenizerProcess, executor: ThreadPoolExecutor, text: str) -> Future[array[int] | int | bytes]:
    """The result of a job that the process has."""
    result = executor.submit(process.run, Job(text, True, 1 << 30))
    while process._conn is None:
        time.sleep(0.001)
    return result


def test_signals_to_the_whole_group_are_for_the_front_end_alone(process: TokenizerProcess) -> None:
    with ThreadPoolExecutor() as executor:
        result = begun(process, executor, TEXT)
        for number in SIGNALS:
            os.kill(process._process.pid, number)
        ids = result.result()
        assert isinstance(ids, array)
        assert list(ids) == TOKENIZER.encode(TEXT)


def test_only_a_number_comes_back_of_too_many_tokens(process: TokenizerProcess) -> None:
    assert process.run(Job("fox", True)) == len(TOKENIZER.encode("fox"))


def test_a_killed_process_ends_its_job_and_takes_no_other(process: TokenizerProcess) -> None:
    with ThreadPoolExecutor() as executor:
        result = begun(process, executor, TEXT * 30)
        process.kill()
        with pytest.raises(ProcessEnded):
            result.result()
    with pytest.raises(ProcessEnded):
        process.run(Job("fox", True))


def test_the_process_loads_neither_torch_nor_transformers() -> None:
    modules = f"{TokenizerProcess.__module__}, {tokenize_response.__module__}"
    program = f"import sys, {modules}; sys.exit(str({{'torch', 'transformers', 'grpc'}} & set(sys.modules) or ''))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr.strip() == ""
