"""Code objects that Triton's wheel compiles for AMD GPUs, run on the emulator with all checks on."""

from __future__ import annotations

import importlib
import math
import re
import secrets
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from fly.__main__ import main
from fly.emulator import Program, Region, RunResult
from fly.errors import EmulatorError
from fly.runtime.emulate_arguments import pack, parse
from tests.kernels.reference import check, reference

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install fly-attention[peers]"),
]
ARCHS = ("gfx942", "gfx950")
HEAD_DIM, BLOCK_M = 128, 128
LOG2_E = math.log2(math.e)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(arch, causal) -> the compiled kernel; Triton's own cache is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        forward = importlib.import_module("tests.peers.triton_forward")
        made = {}

        def get(arch: str, causal: bool):
            if (arch, causal) not in made:
                made[arch, causal] = forward.compile_forward(arch, causal, HEAD_DIM, BLOCK_M)
            return made[arch, causal]

        yield get


def launch(kernel, q, k, v, out, lse, elements=()) -> RunResult:
    """Run one compiled forward on (B, S, H, D) tensors with all checks on; `elements` shortens allocations."""
    batch, seq_len, heads, head_dim = q.shape
    program = Program(kernel.code)
    machine = program.machine(kernel.symbol)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    strides = [f"i32:{s}" for t in (q, k, v, out) for s in t.stride()[:3]]
    texts = [f"ptr:{t.data_ptr()}" for t in tensors.values()]
    texts += [f"f32:{head_dim**-0.5 * LOG2_E}", f"i32:{heads}", f"i32:{seq_len}", *strides]
    texts += ["null"] * (len(machine.kernel.explicit) - len(texts))  # Triton's own scratch, which it does not use
    packed = pack([parse(t) for t in texts], machine.kernel.explicit, machine.kernel.kernarg_bytes, kernel.symbol)
    sizes = {name: t.numel() for name, t in tensors.items()} | dict(elements)
    regions = [Region(t.data_ptr(), sizes[name] * t.element_size(), name) for name, t in tensors.items()]
    grid = (seq_len // BLOCK_M, batch * heads, 1)
    return program.launch(
        kernel.symbol, grid, (kernel.threads, 1, 1), packed, regions,
        dynamic_lds=kernel.shared - machine.kernel.lds_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("arch", ARCHS)
def test_attention_forward(compiled, arch, causal):
    seed = secrets.randbits(31)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 384, 3, HEAD_DIM, generator=generator).bfloat16() for _ in range(3))
    out, lse = torch.zeros_like(q), torch.zeros(2, 3, 384)
    done = launch(compiled(arch, causal), q, k, v, out, lse)
    report = check(out, reference(q, k, v, causal=causal), lse / LOG2_E)
    assert report.ok, f"seed {seed}: {report}"
    assert sum(n for name, n in done.mix.items() if name.startswith("v_mfma")) > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_an_access_outside_its_tensors_is_found(compiled, arch):
    q, k, v = (torch.randn(1, 128, 1, HEAD_DIM).bfloat16() for _ in range(3))
    kernel, out, lse = compiled(arch, False), torch.zeros_like(q), torch.zeros(1, 1, 128)
    with pytest.raises(EmulatorError, match=r"out-of-bounds: attention_forward: `global_load.* behind k"):
        launch(kernel, q, k, v, out, lse, {"k": 100 * HEAD_DIM})


def assembly_lines(text: str) -> list[str]:
    """Instructions of a listing, without labels, directives, comments and encoding suffixes."""
    lines = [re.split(r"\s*(?:;|//)", line)[0].strip() for line in text.splitlines()]
    lines = [re.sub(r"\s+", " ", line) for line in lines if re.match(r"[a-z]+_", line) and line[-1] != ":"]
    return [re.sub(r"_(?:e32|e64|dpp|sdwa)\b", "", line) for line in lines]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("arch", ARCHS)
def test_instructions_read_as_in_tritons_listing(compiled, arch, causal):
    kernel = compiled(arch, causal)
    decoded = [i.text for i in Program(kernel.code).machine(kernel.symbol).instructions]
    listed = assembly_lines(kernel.listing)
    # what pads the kernel and its entry is not in the listing
    padding = ("s_nop 0", "s_code_end")
    mine = [re.sub(r"(branch\S*) .*", r"\1", line) for line in decoded if line not in padding]
    theirs = [re.sub(r"(branch\S*) .*", r"\1", line) for line in listed if line not in padding]
    assert len(theirs) > 1000 and mine[: len(theirs)] == theirs


def test_the_command_line_runs_it(compiled, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kernel = compiled("gfx950", True)
    (tmp_path / "forward.hsaco").write_bytes(kernel.code)
    tensors = [torch.randn(1, 128, 2, HEAD_DIM).bfloat16() for _ in range(3)]
    for name, tensor in zip("qkv", tensors):
        np.save(f"{name}.npy", tensor.view(torch.int16).numpy())
    strides = [f"i32:{s}" for s in tensors[0].stride()[:3]] * 4
    scalars = [f"f32:{HEAD_DIM**-0.5 * LOG2_E}", "i32:2", "i32:128", *strides, "null", "null"]
    pointers = ["q.npy", "k.npy", "v.npy", "out:out.npy:bf16[1,128,2,128]", "out:lse.npy:f32[1,2,128]"]
    options = ["--grid", "1,2", "--block", str(kernel.threads), "--lds", str(kernel.shared)]
    status = main(["emulate", "forward.hsaco", *options, "--args", *pointers, *scalars])
    assert status == 0, capsys.readouterr().err
    out = torch.from_numpy(np.load("out.npy").view(np.int16)).view(torch.bfloat16)
    report = check(out, reference(*tensors, causal=True), torch.from_numpy(np.load("lse.npy")) / LOG2_E)
    assert report.ok, str(report)
    assert "v_mfma_f32_32x32x16_bf16" in capsys.readouterr().out
