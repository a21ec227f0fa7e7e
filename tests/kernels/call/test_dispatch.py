"""Which kernel serves which call, and what `python -m fly paths` says about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fly.__main__ import main
from fly.backends.target import targets
from fly.errors import UnsupportedError
from kernels import commands, dispatch
from kernels.arguments.callers import plain
from kernels.problem import contract
from kernels.problem.catalogue import BY_NAME
from tests.kernels.stub import rows

REQUEST = contract.Request(
    head_dim=128,
    dtype="bf16",
    causal=True,
    cross_seqlen=False,
    return_lse=False,
    batch=1,
    seq_len=1024,
    seq_len_kv=1024,
    num_heads=8,
    num_kv_heads=8,
    softmax_scale=0.1,
)


@pytest.fixture
def table(monkeypatch):
    """Sets the table to `rows()` with changes to the named ones, which are built then; no variable is set."""
    for variable in ("FLY_KERNEL", "FLYDSL_DISABLE_DUALWAVE_SWP"):
        monkeypatch.delenv(variable, raising=False)

    def install(**built) -> None:
        found = [replace(k, module="kernels.built", **built[k.name]) if k.name in built else k for k in rows()]
        monkeypatch.setattr(dispatch, "KERNELS", tuple(found))

    install()
    return install


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_80", "sm_89", "sm_90a"])
def test_generic_serves_every_target(table, arch, monkeypatch):
    assert dispatch.choose(arch, REQUEST).name == "generic"
    table(gfx950={}, sm90={})
    monkeypatch.setenv("FLY_KERNEL", "generic")
    assert dispatch.choose(arch, REQUEST).name == "generic"


def test_the_first_kernel_that_can_is_chosen_and_can_be_switched_off(table, monkeypatch):
    table(gfx950={})
    assert dispatch.choose("gfx950", REQUEST).name == "gfx950"
    assert dispatch.choose("gfx942", REQUEST).name == "generic"
    monkeypatch.setenv("FLYDSL_DISABLE_DUALWAVE_SWP", "1")
    assert dispatch.choose("gfx950", REQUEST).name == "generic"
    monkeypatch.setenv("FLY_KERNEL", "gfx950")
    with pytest.raises(UnsupportedError, match="switched off by FLYDSL_DISABLE_DUALWAVE_SWP=1"):
        dispatch.choose("gfx950", REQUEST)


def test_the_generic_kernel_knows_the_same_targets_as_the_compiler():
    generic = next(k for k in dispatch.KERNELS if k.name == "generic")
    assert set(generic.archs) == {t.arch for t in targets()}


def test_every_row_names_known_features_and_a_reason():
    for kernel in dispatch.KERNELS:
        assert set(kernel.features) <= set(BY_NAME) and kernel.reason
        for archs in kernel.tuning.values():
            assert set(archs) <= set(kernel.archs)


@pytest.mark.parametrize("feature", BY_NAME)
def test_missing_features_are_refused_with_an_alternative(feature):
    generic = next(k for k in dispatch.KERNELS if k.name == "generic")
    bare = replace(generic, features=())
    what, instead = map(plain, BY_NAME[feature].told)
    assert dispatch.refusal(bare, "gfx942", replace(REQUEST, features=(feature,))) == (
        f"does not do {what} yet: {instead}"
    )


def test_the_generic_kernel_does_every_form():
    generic = next(k for k in dispatch.KERNELS if k.name == "generic")
    assert set(generic.features) >= {"packed", "split_kv"}


def test_head_dims_in_words():
    """A few are listed, many in equal steps are a range."""
    generic = rows()[-1]
    cases = {(64, 128): "64, 128", (32, 40, 48, 56, 64): "32 to 64 in steps of 8", (1, 2, 3, 4, 6): "1, 2, 3, 4, 6"}
    for dims, words in cases.items():
        kernel = replace(generic, head_dims=dims)
        assert dispatch.head_dims(kernel) == words
        assert dispatch.refusal(kernel, "sm_90a", replace(REQUEST, head_dim=5)).startswith(
            f"takes head_dim {words}, not 5: pad q, k and v with zeros"
        )


def test_alignment_is_a_need():
    need = dispatch.aligned(16)
    assert need.refuses(REQUEST) is None
    assert need.refuses(replace(REQUEST, alignment=8)) == (
        "takes tensors whose addresses and strides are multiples of 16 bytes, not of 8: make them contiguous, from "
        "an allocation of their own"
    )


def test_the_reach_of_offsets_is_a_need():
    need = dispatch.keys_within(2**32, ahead=192)
    near, far = (replace(REQUEST, kv_pitch=2**22, seq_len_kv=n) for n in (832, 833))
    assert need.refuses(near) is None
    assert plain(need.refuses(far)) == (
        "reaches 832 keys whose rows are 4194304 bytes apart, not 833: make k and v contiguous"
    )
    assert need.refuses(replace(far, kv_pitch=0)) is None  # one row for all


@pytest.mark.parametrize(("arch", "tuned"), [("gfx950", "gfx950"), ("sm_90a", "sm90")])
def test_pages_whose_rows_follow_no_pattern_are_the_generic_kernels(arch, tuned):
    pages = replace(REQUEST, features=("paged",), page_size=16)
    assert dispatch.choose(arch, pages).name == tuned
    assert dispatch.choose(arch, replace(pages, features=("paged", "kv_batch_idx"))).name == tuned
    for other in (
        *(replace(pages, page_size=size) for size in (1, 8, 24, 768)),
        replace(pages, features=("paged", "cache_leftpad")),
    ):
        assert dispatch.choose(arch, other).name == "generic"


def test_the_reach_of_offsets_in_pages_is_a_need():
    """The sequence may be any length, a page may not."""
    need = dispatch.unless_paged(dispatch.keys_within(2**32, ahead=192), dispatch.page_within(2**31, rows=512))
    far = replace(REQUEST, kv_pitch=2**22 - 2, seq_len_kv=10**6)
    assert "reaches 832 keys" in need.refuses(far)
    far = replace(far, features=("paged",), page_size=512)
    assert need.refuses(far) is None
    for changes, most in (({"kv_pitch": 2**22, "page_size": 16}, 2**22), ({"page_size": 1024}, 2**21)):
        wrong = replace(far, **changes)
        assert plain(need.refuses(wrong)) == (
            f"takes keys less than {most} bytes apart in pages of {wrong.page_size}, not {wrong.kv_pitch}: make "
            "k and v contiguous"
        )


def test_a_kernel_whose_needs_are_not_met_is_passed_over(table, monkeypatch):
    table(sm90={"needs": (dispatch.aligned(16),)})
    assert dispatch.choose("sm_90a", REQUEST).name == "sm90"
    assert dispatch.choose("sm_90a", replace(REQUEST, alignment=8)).name == "generic"
    monkeypatch.setenv("FLY_KERNEL", "sm90")
    with pytest.raises(UnsupportedError, match=r"FLY_KERNEL=sm90: the sm90 kernel takes tensors whose addresses"):
        dispatch.choose("sm_90a", replace(REQUEST, alignment=8))


def test_a_kernel_leaves_calls_to_later_ones_that_can(table, monkeypatch):
    short = dispatch.Preference("short calls", lambda request: request.seq_len <= 512)
    table(gfx950={"leaves": short})
    calls = {length: replace(REQUEST, seq_len=length) for length in (512, 1024)}
    chosen = {length: dispatch.choose("gfx950", call).name for length, call in calls.items()}
    assert chosen == {512: "generic", 1024: "gfx950"}
    # nobody else can, and it still does
    assert dispatch.choose("gfx950", replace(calls[512], features=("softcap",))).name == "gfx950"
    # a sequence is to have the same bits in every batch
    table(gfx950={"leaves": short}, generic={"features": ("split_keys",)})
    assert dispatch.choose("gfx950", replace(calls[512], features=("split_keys",))).name == "gfx950"
    monkeypatch.setenv("FLY_KERNEL", "gfx950")
    assert dispatch.choose("gfx950", calls[512]).name == "gfx950"


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "generic"),
        ({"batch": 28}, "gfx942"),  # 3584 blocks of 256 rows; 12 for each compute unit are 3648
        ({"batch": 14, "seq_len": 512, "seq_len_kv": 512}, "gfx942"),  # 896, and 3 for each are 912
        ({"batch": 15, "seq_len": 512, "seq_len_kv": 512}, "generic"),
        ({"batch": 15, "seq_len": 513, "seq_len_kv": 513}, "gfx942"),  # 1440, and 5 for each are 1520
        ({"batch": 16, "seq_len": 513, "seq_len_kv": 513}, "generic"),
        ({"seq_len": 1025, "seq_len_kv": 1025}, "gfx942"),
        ({"causal": False}, "gfx942"),
        ({"head_dim": 128}, "gfx942"),
        ({"cross_seqlen": True, "seq_len_kv": 1000}, "gfx942"),
        ({"features": ("split_keys",)}, "gfx942"),
        ({"features": ("window",)}, "gfx942"),
        ({"partial": True}, "gfx942"),
    ],
)
def test_short_causal_calls_that_fill_gfx942_are_the_generic_kernels(change, chosen, monkeypatch):
    for variable in ("FLY_KERNEL", "FLYDSL_DISABLE_DUALWAVE_SWP"):
        monkeypatch.delenv(variable, raising=False)
    request = replace(REQUEST, head_dim=64, batch=32, num_heads=32, num_kv_heads=32)
    assert dispatch.choose("gfx942", replace(request, **change)).name == chosen


def shown(capsys, *arguments: str) -> list[str]:
    """The lines that `python -m fly paths` prints."""
    assert main(["paths", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    return lines


def test_paths_shows_every_kernel_and_all_that_it_needs(capsys):
    text = " ".join(" ".join(shown(capsys)).split())
    for kernel in dispatch.KERNELS:
        assert kernel.name in text
    for column in commands.COLUMNS:
        assert column.title in text
    assert "split_kv" in text and "waves_per_eu" in text


@pytest.mark.parametrize("arch", dispatch.AMD + dispatch.NVIDIA)
def test_paths_of_one_target(capsys, arch):
    lines = shown(capsys, "--arch", arch)
    for kernel in dispatch.KERNELS:
        assert any(line.startswith(kernel.name) for line in lines) == (arch in kernel.archs)


def test_paths_says_what_is_chosen_and_why_the_others_are_not(table, capsys):
    table(gfx950={"features": (), "needs": (dispatch.aligned(4),)})
    plain = shown(capsys, "--arch", "gfx950", "--head-dim", "128")
    assert [line.split() for line in plain] == [
        ["gfx950", "gfx950", "chosen"],
        ["gfx950", "generic", "could", "serve", "it", "too"],
    ]
    packed = shown(capsys, "--arch", "gfx950", "--head-dim", "128", "--packed")
    assert packed[0].startswith("gfx950    gfx950    no: it does not do packed sequences")
    assert packed[-1].split() == ["gfx950", "generic", "chosen"]
    unaligned = shown(capsys, "--arch", "gfx950", "--alignment", "2")
    assert "not of 2: make them contiguous" in " ".join(" ".join(unaligned).split())


def test_paths_says_what_is_left_to_a_later_row(capsys, monkeypatch):
    monkeypatch.delenv("FLY_KERNEL", raising=False)
    flags = "--arch gfx942 --head-dim 64 --causal --batch 32 --num-heads 32 --seq-len 512"
    lines = shown(capsys, *flags.split())
    assert lines[0].startswith("gfx942    gfx942    could serve it too, and leaves to a row below: causal calls")
    assert lines[-1].split() == ["gfx942", "generic", "chosen"]
    assert "leaves to a row below: causal" in " ".join(commands.COLUMNS[6].show(row) for row in dispatch.KERNELS)


def test_paths_when_none_serves(table, capsys):
    lines = shown(capsys, "--arch", "sm_80", "--num-kv-splits", "4", "--tuning", "waves_per_eu", "--no-causal")
    assert "has no tuning option waves_per_eu on sm_80" in lines[0]
    assert lines[-1] == "sm_80     (none)    such a call raises an UnsupportedError"


def test_paths_tells_what_is_forced(table, capsys, monkeypatch):
    monkeypatch.setenv("FLY_KERNEL", "gfx950")
    lines = shown(capsys, "--arch", "gfx942", "--dtype", "f16")
    assert "FLY_KERNEL=gfx950: the gfx950 kernel runs on gfx950, not on gfx942" in " ".join(lines)
    assert lines[-1] == "FLY_KERNEL=gfx950 is set"


def test_the_flags_become_a_request():
    parser = commands.argparse.ArgumentParser()
    commands.add_commands(parser.add_subparsers())
    flags = (
        "--head-dim 64 --seq-len 10 --seq-len-kv 20 --num-heads 8 --num-kv-heads 2 --num-kv-splits 3 --debug-counts"
    )
    request = commands.request_of(parser.parse_args(["paths", *flags.split()]))
    assert request.features == ("split_kv", "debug_counts") and request.cross_seqlen and request.causal
    assert (request.head_dim, request.seq_len, request.seq_len_kv, request.kv_pitch) == (64, 10, 20, 256)
    assert commands.request_of(parser.parse_args(["paths", "--arch", "sm_80"])) is None
