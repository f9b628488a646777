"""Griffe extension: comments behind attributes as their documentation."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import Any

import griffe


class Comments(griffe.Extension):
    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        """Takes the comment at the end of the attribute's line."""
        if attr.docstring is not None or not isinstance(node, ast.AST) or attr.endlineno is None:
            return
        lines = attr.lines_collection[attr.filepath]
        if (text := comment_of(lines[attr.endlineno - 1])) and isinstance(attr.parent, griffe.Class):
            attr.docstring = griffe.Docstring(text[:1].upper() + text[1:], parent=attr)


def comment_of(line: str) -> str:
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip()).readline))
    except (tokenize.TokenError, IndentationError):
        return ""
    return next((token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT), "")
