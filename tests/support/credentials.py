"""Credentials files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraplex_runtime.auth import token_digest


def credential(token: str, tenant: str, *adapters: str, roles: tuple[str, ...] = ()) -> dict[str, Any]:
    """A row of the file, with patterns of adapters. Without `roles` it is a user's."""
    row: dict[str, Any] = {"sha256": token_digest(token), "tenant": tenant, "adapters": [*adapters]}
    return row | ({"roles": [*roles]} if roles else {})


def write_credentials(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps({"credentials": rows}))
    return path
