"""Chat and response templates that an adapter brings, as Transformers saves them.

They are read, never run here. A chat template lies in a file of its own or in the tokenizer's configuration, a response
template there alone.
"""

from __future__ import annotations

import json
from typing import Any, Final, cast

from loraplex_adapters.formats.files import TEMPLATE_NAMES
from loraplex_adapters.io.source_files import AdapterFiles, parse_object, read_all
from loraplex_contracts.adapters import MAX_TEMPLATE_BYTES, AdapterTemplates
from loraplex_contracts.errors import AdapterInvalid

MAX_TOKENIZER_CONFIG_BYTES: Final = 16 << 20  # added tokens are in it


def read_templates(files: AdapterFiles) -> AdapterTemplates | None:
    """The templates that an adapter brings; None where there are none. Raises AdapterInvalid for a file that cannot be
    read as one."""
    jinja, of_processor, of_tokenizer = TEMPLATE_NAMES
    config: dict[str, Any] = {}
    if of_tokenizer in files.names:
        data = read_all(files.open(of_tokenizer), MAX_TOKENIZER_CONFIG_BYTES)
        config = parse_object(data, of_tokenizer, MAX_TOKENIZER_CONFIG_BYTES)
    if jinja in files.names:
        data = read_all(files.open(jinja), MAX_TEMPLATE_BYTES)
        try:
            named = {"default": data.decode("utf-8")}
        except UnicodeDecodeError:
            raise AdapterInvalid(f"{jinja} is not UTF-8") from None
    elif of_processor in files.names:
        data = read_all(files.open(of_processor), 2 * MAX_TEMPLATE_BYTES)  # as JSON it is longer
        named = _named(parse_object(data, of_processor, 2 * MAX_TEMPLATE_BYTES).get("chat_template"), of_processor)
    else:
        named = _named(config.get("chat_template"), of_tokenizer)
    response = config.get("response_template")
    if response is not None and not isinstance(response, dict):
        raise AdapterInvalid(f"`response_template` in {of_tokenizer} is not an object")
    found = AdapterTemplates(
        named.get("default", ""),
        named.get("tool_use", ""),
        "" if response is None else json.dumps(response, sort_keys=True),
    )
    for text in (found.chat, found.chat_with_tools, found.response):
        if len(text.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
            raise AdapterInvalid(f"a template has more than {MAX_TEMPLATE_BYTES} bytes")
    return None if found == AdapterTemplates() else found


def _named(value: Any, where: str) -> dict[str, str]:
    """Templates by name: one is "default"; several are a list of objects."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    found: dict[str, str] = {}
    for one in cast("list[Any]", value if isinstance(value, list) else [None]):
        given = cast("dict[str, Any]", one if isinstance(one, dict) else {})
        name, template = given.get("name"), given.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise AdapterInvalid(f"`chat_template` in {where} is neither a text nor a list of names and templates")
        found[name] = template
    return found
