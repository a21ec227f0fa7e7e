"""FileCheck on strings, for tests of passes and generated code."""

from __future__ import annotations

import io

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts


def filecheck(text: str, checks: str) -> None:
    """Fail the test unless `text` matches `checks`, lines of FileCheck directives (`CHECK: …`, `CHECK-NOT: …`)."""
    options = Options(match_filename="checks")
    matcher = Matcher(options, FInput("text", text), Parser(options, io.StringIO(checks), *pattern_for_opts(options)))
    matcher.stderr = io.StringIO()
    if matcher.run() != 0:
        pytest.fail(f"{matcher.stderr.getvalue()}\n--- the text ---\n{text}")
