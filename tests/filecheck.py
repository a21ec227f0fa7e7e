"""FileCheck on a string: what LLVM's tool does, with the checks beside the kernel under test."""

from __future__ import annotations

import contextlib
import io
import re

from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts


def filecheck(text: object, checks: str) -> None:
    """Assert that `text` (a module, for example) meets the CHECK lines of `checks`.

    Raises:
        AssertionError: it does not; with FileCheck's own message and the whole text.
    """
    text = str(text)
    options = Options(match_filename="checks", input_file="text")
    parser = Parser(options, io.StringIO(checks), *pattern_for_opts(options))
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = Matcher(options, FInput("text", text), parser).run()
    if status != 0:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())
        raise AssertionError(f"{plain}\nin:\n{text}")
