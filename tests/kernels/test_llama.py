"""benchmarks/llama.py on a GPU: all providers compute one model, and decoding goes on where a prompt ends."""

from __future__ import annotations

import pytest
import torch

from benchmarks.llama import BACKENDS, Llama, attention_of, main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


@pytest.mark.parametrize("provider", BACKENDS)
def test_decoding_goes_on_where_a_prompt_ends(provider):
    torch.manual_seed(0)
    tokens = torch.randint(1000, (2, 65), device="cuda")
    with torch.inference_mode(), attention_of(provider):
        model = Llama.random(2, 2, 65)
        whole = model.logits(tokens, 0).float()
        model.logits(tokens[:, :64], 0)
        decoded = model.logits(tokens[:, 64:], 64).float()
    assert (decoded - whole).norm() <= 0.03 * whole.norm()


def test_a_line_for_every_provider(capsys):
    main(["--layers", "1", "--context", "256", "--batch", "2", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(BACKENDS) and all("tokens/s" in line for line in lines), lines
