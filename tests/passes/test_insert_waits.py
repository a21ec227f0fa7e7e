"""`insert-waits`: how many newer copies each wait allows, and that tokens are gone."""

from __future__ import annotations

import pytest

from fly.errors import CompileError
from fly.passes.insert_waits import InsertWaits
from tests.filecheck import filecheck
from tests.passes.modules import apply, parse


def waits(body: str, *, groups: bool = False) -> str:
    return apply(InsertWaits(groups=groups), parse(body))


def pipelined(stages: int) -> str:
    """The loop of a tile ring: `stages - 1` copies in flight, the oldest waited for in each iteration."""
    ahead = stages - 1
    carried = [f"%p{k}" for k in range(ahead)]
    init = ", ".join(f"{p} = %t{k}" for k, p in enumerate(carried))
    types = ", ".join(["!fly.token"] * ahead)
    start = "\n".join(f"%t{k} = copy" for k in range(ahead))
    return f"""
    {start}
    %r:{ahead} = scf.for %j = %c0 to %n step %c1 iter_args({init}) -> ({types}) {{
      wait %p0
      %new = copy
      scf.yield {", ".join([*carried[1:], "%new"])} : {types}
    }}
    wait %r#0
    """


def test_straight_line_counts_newer_copies():
    text = waits("%a = copy\n%b = copy\n%d = copy\nmark 1\nwait %a\nmark 2\nwait %d")
    filecheck(
        text,
        """
        CHECK-LABEL: func.func @kernel
        CHECK-COUNT-3: "fly.copy_async"
        CHECK: value = 1 : i64
        CHECK-NEXT: "fly.wait_count"() {newer = 2 : i64}
        CHECK: value = 2 : i64
        CHECK-NEXT: "fly.wait_count"() {newer = 0 : i64}
        CHECK-NOT: fly.wait
        """,
    )


def test_second_wait_for_the_same_copies_is_dropped():
    filecheck(
        waits("%a = copy\n%b = copy\nwait %a\nwait %a\nmark 1"),
        """
        CHECK: "fly.wait_count"() {newer = 1 : i64}
        CHECK-NEXT: "fly.sched"
        CHECK-NOT: fly.wait
        """,
    )


def test_wait_covers_what_is_older():
    """Copies complete in order: waiting for the newer one makes the older one's wait void."""
    filecheck(
        waits("%a = copy\n%b = copy\nwait %b\nwait %a\nmark 1"),
        """
        CHECK: "fly.wait_count"() {newer = 0 : i64}
        CHECK-NEXT: "fly.sched"
        CHECK-NOT: fly.wait
        """,
    )


def test_join_is_as_new_as_its_newest_part():
    filecheck(
        waits("%a = copy\n%b = copy\n%d = copy\n%j = join %a, %b\n%k = join %j\nwait %k"),
        """
        CHECK-NOT: fly.join
        CHECK: "fly.wait_count"() {newer = 1 : i64}
        CHECK-NOT: fly.join
        """,
    )


def test_join_of_nothing_needs_no_wait():
    filecheck(waits("%j = join\nwait %j\nmark 1"), "CHECK-NOT: fly.wait\nCHECK: fly.sched\nCHECK-NOT: fly.wait")


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_tile_ring(stages, groups):
    """A ring of s stages waits with s - 2 newer copies in flight, in the loop and after it."""
    filecheck(
        waits(pipelined(stages), groups=groups),
        f"""
        CHECK-COUNT-{stages - 1}: "fly.copy_async"
        CHECK: scf.for
        CHECK: "fly.wait_count"() {{newer = {stages - 2} : i64}}
        CHECK: "fly.copy_async"
        CHECK: scf.yield
        CHECK: "fly.wait_count"() {{newer = {stages - 2} : i64}}
        """,
    )


def test_carried_tokens_become_integers():
    filecheck(
        waits(pipelined(3)),
        """
        CHECK: %[[ZERO:.*]] = arith.constant 0 : i32
        CHECK: scf.for {{.*}} iter_args({{.*}} = %[[ZERO]], {{.*}} = %[[ZERO]]) -> (i32, i32)
        CHECK: scf.yield {{.*}}, %[[ZERO]] : i32, i32
        """,
    )


@pytest.mark.parametrize("started", [0, 1, 2])
def test_branches_count_the_fewest(started):
    """Without an else branch, the path that starts nothing decides."""
    copies = "\n".join(f"%x{k} = copy" for k in range(started))
    filecheck(
        waits(f"%a = copy\nscf.if %c {{\nmark 1\n{copies}\n}}\nmark 2\nwait %a"),
        """
        CHECK: value = 1
        CHECK-NOT: fly.wait
        CHECK: value = 2
        CHECK-NEXT: "fly.wait_count"() {newer = 0 : i64}
        """,
    )


def test_branches_that_both_start_copies():
    body = """
    %a = copy
    scf.if %c {
      %x = copy
      %y = copy
    } else {
      %x = copy
    }
    wait %a
    """
    filecheck(waits(body), 'CHECK: "fly.wait_count"() {newer = 1 : i64}')


def test_token_from_a_branch():
    """The result is as new as the newer of the two; here that of the else branch, with nothing after it."""
    body = """
    %r = scf.if %c -> (!fly.token) {
      %x = copy
      %y = copy
      scf.yield %x : !fly.token
    } else {
      %z = copy
      scf.yield %z : !fly.token
    }
    %after = copy
    wait %r
    """
    filecheck(
        waits(body),
        """
        CHECK: scf.if %{{.*}} -> (i32)
        CHECK: "fly.wait_count"() {newer = 1 : i64}
        """,
    )


def test_wait_in_one_branch_does_not_count_after_it():
    body = "%a = copy\n%b = copy\nscf.if %c {\nwait %a\n}\nwait %a"
    filecheck(
        waits(body),
        """
        CHECK: scf.if
        CHECK: "fly.wait_count"() {newer = 1 : i64}
        CHECK: }
        CHECK: "fly.wait_count"() {newer = 1 : i64}
        """,
    )


def test_carried_token_is_as_new_as_on_any_iteration():
    """Three copies are newer on the first iteration, none on later ones; after zero iterations, three again."""
    body = """
    %a = copy
    %b = copy
    %d = copy
    %e = copy
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%p = %a) -> (!fly.token) {
      wait %p
      %new = copy
      scf.yield %new : !fly.token
    }
    wait %r
    """
    filecheck(waits(body), "CHECK: scf.for\nCHECK: newer = 0\nCHECK: scf.yield\nCHECK: newer = 0")


def test_a_loop_that_may_not_run_hands_on_a_newer_token_than_any_of_its_own():
    """In the loop one copy follows what is yielded; after zero iterations the last copy is waited for."""
    body = """
    %a = copy
    %r = scf.for %j = %c0 to %n step %c1 iter_args(%p = %a) -> (!fly.token) {
      %x = copy
      %y = copy
      scf.yield %x : !fly.token
    }
    wait %r
    """
    filecheck(waits(body), 'CHECK: scf.yield\nCHECK: }\nCHECK: "fly.wait_count"() {newer = 0 : i64}')


def test_swapped_tokens_take_the_newer_age():
    """Through nested loops that exchange what they carry."""
    body = """
    %a = copy
    %b = copy
    %r:2 = scf.for %j = %c0 to %n step %c1 iter_args(%p = %a, %q = %b) -> (!fly.token, !fly.token) {
      %s:2 = scf.for %k = %c0 to %n step %c1 iter_args(%x = %p, %y = %q) -> (!fly.token, !fly.token) {
        mark 1
        wait %x
        scf.yield %y, %x : !fly.token, !fly.token
      }
      scf.yield %s#1, %s#0 : !fly.token, !fly.token
    }
    """
    filecheck(waits(body), 'CHECK: value = 1\nCHECK-NEXT: "fly.wait_count"() {newer = 0 : i64}')


def test_loop_that_may_not_run_ages_nothing():
    body = "%a = copy\nscf.for %j = %c0 to %n step %c1 {\n%x = copy\n}\nwait %a"
    filecheck(waits(body), 'CHECK: scf.for\nCHECK: }\nCHECK: "fly.wait_count"() {newer = 0 : i64}')


def test_groups_count_joins_not_copies():
    body = "%a = copy\n%b = copy\n%j = join %a, %b\n%x = copy\n%y = copy\n%k = join %x, %y\nwait %j\nwait %k"
    filecheck(
        waits(body, groups=True),
        """
        CHECK-COUNT-2: "fly.copy_async"
        CHECK: "fly.commit"
        CHECK-COUNT-2: "fly.copy_async"
        CHECK: "fly.commit"
        CHECK-NEXT: "fly.wait_count"() {newer = 1 : i64}
        CHECK-NEXT: "fly.wait_count"() {newer = 0 : i64}
        CHECK-NOT: fly.commit
        """,
    )
    filecheck(waits(body), "CHECK-NOT: fly.commit\nCHECK: newer = 2\nCHECK: newer = 0\nCHECK-NOT: fly.commit")


def test_copy_that_is_waited_for_before_it_is_joined_has_its_own_group():
    filecheck(
        waits("%a = copy\nwait %a\n%b = copy\n%j = join %a, %b\nwait %j", groups=True),
        """
        CHECK: "fly.copy_async"
        CHECK: "fly.commit"
        CHECK: "fly.wait_count"() {newer = 0 : i64}
        CHECK: "fly.copy_async"
        CHECK: "fly.commit"
        CHECK: "fly.wait_count"() {newer = 0 : i64}
        """,
    )


@pytest.mark.parametrize(
    ("before", "inside"), [("", "%x = copy"), ("%a = copy", "wait %a"), ("%a = copy", "scf.if %c {\nwait %a\n}")]
)
def test_copies_and_waits_in_loops_of_unknown_length_are_refused(before, inside):
    loop = (
        f"%w = scf.while (%j = %i) : (i32) -> i32 {{\nscf.condition(%c) %j : i32\n}} do {{\n^bb0(%k: i32):\n{inside}"
    )
    body = f"{before}\n{loop}\nscf.yield %k : i32\n}}"
    with pytest.raises(CompileError, match=r"copies and waits inside fly\.while_ cannot be counted; use fly\.range"):
        waits(body)


def test_tokens_are_not_carried_through_loops_of_unknown_length():
    loop = "%w = scf.while (%j = %a) : (!fly.token) -> !fly.token {\nscf.condition(%c) %j : !fly.token\n} do {"
    with pytest.raises(CompileError, match=r"inside fly\.while_ cannot be counted; use fly\.range"):
        waits(f"%a = copy\n{loop}\n^bb0(%k: !fly.token):\nscf.yield %k : !fly.token\n}}\nwait %w")


def test_a_loop_of_unknown_length_without_copies_ages_nothing():
    loop = "%w = scf.while (%j = %i) : (i32) -> i32 {\nscf.condition(%c) %j : i32\n} do {\n^bb0(%k: i32):\nmark 1"
    filecheck(
        waits(f"%a = copy\n%b = copy\n{loop}\nscf.yield %k : i32\n}}\nwait %a"),
        'CHECK: scf.while\nCHECK: }\nCHECK: "fly.wait_count"() {newer = 1 : i64}',
    )


def test_kernels_without_copies_are_left_alone():
    module = parse("barrier")
    before = str(module)
    assert apply(InsertWaits(groups=True), module) == before
