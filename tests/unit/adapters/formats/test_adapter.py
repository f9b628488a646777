"""Plans of whole adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.adapter_files import base_targets, write_adapter

from loraplex_adapters.formats.adapter import plan_adapter
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported

SERVED = r"; LORA, VERA, LOHA, LOKR, IA3, OFT, BOFT are$"


@pytest.mark.parametrize(
    ("peft_type", "error", "says"),
    [
        ("ADALORA", AdapterUnsupported, rf"peft_type 'ADALORA' is not served{SERVED}"),
        ("lora", AdapterUnsupported, rf"peft_type 'lora' is not served{SERVED}"),
        (["LORA"], AdapterUnsupported, rf"peft_type \['LORA'\] is not served{SERVED}"),
        (["OFT"], AdapterUnsupported, rf"peft_type \['OFT'\] is not served{SERVED}"),
        (None, AdapterInvalid, "has no peft_type; save the adapter with PEFT's save_pretrained"),
    ],
)
def test_other_kinds_are_refused_with_those_that_are_served(
    peft_type: Any, error: type[Exception], says: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "sql", peft_type=peft_type)
    with DirectorySource(tmp_path).open("sql") as files, pytest.raises(error, match=says):
        plan_adapter(files, base_targets())
