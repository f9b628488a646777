"""Generator of the parity table in docs/adapters.md.

python scripts/adapters_page.py    # after a change to tests/support/parity.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/adapters.md"
sys.path.insert(0, str(ROOT / "tests"))

from support.parity import markdown  # noqa: E402

BEGIN, END = "<!-- parity table: python scripts/adapters_page.py -->\n", "<!-- end of the parity table -->\n"


def page() -> str:
    """The whole page, with the table as the tests have it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + markdown() + END + rest.partition(END)[2]


if __name__ == "__main__":
    print(markdown(), end="")
    PAGE.write_text(page(), encoding="utf-8")
