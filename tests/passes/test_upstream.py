"""Upstream pipelines as passes."""

from __future__ import annotations

import pytest

from fly.passes.upstream import Upstream
from tests.filecheck import filecheck
from tests.passes.modules import apply, parse


def test_runs_the_named_passes():
    body = "%1 = arith.addi %i, %i : i32\n%2 = arith.addi %i, %i : i32\n%3 = arith.muli %1, %2 : i32\n"
    body += "llvm.store %3, %dst : i32, !llvm.ptr<3>"
    filecheck(
        apply(Upstream("tidy", "cse"), parse(body)),
        """
        CHECK: %[[SUM:.*]] = arith.addi
        CHECK-NOT: arith.addi
        CHECK: arith.muli %[[SUM]], %[[SUM]]
        """,
    )


def test_an_unknown_pass_is_an_error():
    with pytest.raises(ValueError, match="no-such-pass"):
        apply(Upstream("tidy", "no-such-pass"), parse(""))
