"""Pytest plugin for suites that run once more: keeps every `SAMPLED_STEP`-th test."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = items[:: int(os.environ.get("SAMPLED_STEP", "1"))]
