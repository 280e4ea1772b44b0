"""The Python examples of the docs."""

from __future__ import annotations

import re

from tests.support.launched import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text()
SCRIPT, CALLBACKS, TUNE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
