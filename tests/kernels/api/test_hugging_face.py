"""Models of transformers and diffusers, tiny and random: what they compute and learn on fly, and without it.

Models are bfloat16. As far as one with its own attention is from the same in float32, one on fly may be twice.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.peers
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
needs_diffusers = pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # scores large enough for what is done to them to matter
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# (configuration, what it has besides)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen3, with a window": (
        "Qwen3Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "Gemma 2, with softcap": (
        "Gemma2Config",
        {"sliding_window": 5, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 1.0},
    ),
    "Gemma 3, with windows": (
        "Gemma3TextConfig",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt-oss, with sinks": (
        "GptOssConfig",
        {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
}


@pytest.fixture(autouse=True)
def gfx950(emulate):
    emulate("gfx950", "generic")


def tokens(kind: str) -> dict[str, torch.Tensor]:
    """A model's arguments; labels are left out where a prediction's query is padding."""
    ids = torch.randint(3, 64, (1 if kind == "packed" else 2, 12))
    if kind == "packed":
        return {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[*range(5), *range(7)]])}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    labels = ids.masked_fill(mask * mask.roll(1, 1) == 0, -100)
    return (
        {"input_ids": ids, "labels": labels, "attention_mask": mask}
        if kind == "padded"
        else {"input_ids": ids, "labels": ids}
    )


def learned(make: Callable[[], Any], given: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(what a model computes, the gradients of its loss)."""
    model = make().train()
    for name, parameter in model.named_parameters():
        if "sink" in name:  # zeros otherwise
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    result = model(**given)
    loss = result.loss if "labels" in given else result.sample.float().square().mean()
    loss.backward()
    found = {name: x.grad.float() for name, x in model.named_parameters() if x.grad is not None}
    return (result.logits if "labels" in given else result.sample).detach().float(), found


def compare(make: Callable[[str], Any], own: str, given: dict[str, Any], seen: torch.Tensor | slice) -> None:
    """`make` makes a model with the attention of that name, `own` being another than fly's; `seen` of its results."""
    wide = {name: x.float() if x.is_floating_point() else x for name, x in given.items()}
    exact, plain = learned(lambda: make(own).float(), wide), learned(lambda: make(own), given)
    found = learned(lambda: make("fly"), given)

    def distance(result) -> tuple[float, float]:
        every = zip(result[1].values(), exact[1].values(), strict=True)
        return (result[0] - exact[0])[seen].norm(), torch.cat([(a - b).flatten() for a, b in every]).norm()

    assert all(fly <= 2 * bound for fly, bound in zip(distance(found), distance(plain)))
    sinks = [name for name in exact[1] if "sink" in name]
    if sinks:
        # of all layers together: one layer's two numbers may be small differences of large ones
        wanted, ours, plainly = (torch.cat([result[1][name] for name in sinks]) for result in (exact, found, plain))
        assert all(exact[1][name].any() for name in sinks)
        assert (ours - wanted).norm() <= max(0.2 * wanted.norm(), 2 * (plainly - wanted).norm())


def model_of(name: str, seed: int, attention: str) -> Any:
    """A model of transformers, the same for every attention."""
    transformers = importlib.import_module("transformers")
    importlib.import_module("fly_attention.integrations.transformers").register()
    config, more = MODELS[name]
    torch.manual_seed(seed)
    settings = getattr(transformers, config)(**SIZES, **more)
    model = transformers.AutoModelForCausalLM
    return model.from_config(settings, attn_implementation=attention, dtype=torch.bfloat16)


@needs_transformers
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(seed, name, kind):
    torch.manual_seed(seed)
    given = tokens(kind)
    seen = given["attention_mask"].bool() if kind == "padded" else slice(None)
    compare(lambda attention: model_of(name, seed, attention), "eager", given, seen)


def check_tokens(name: str, seed: int, prompt: list[int], found: list[int]) -> None:
    """Each of the tokens that follow a prompt is what "eager" takes there, or as likely as far as that can tell."""
    ids = torch.tensor([prompt + found])
    with torch.no_grad():
        plain, exact = model_of(name, seed, "eager").eval(), model_of(name, seed, "eager").float().eval()
        logits, right = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in (plain, exact))
    slack = 4 * (logits - right).abs().max()
    assert (right.max(-1).values - right.gather(-1, ids[0, len(prompt) :, None])[:, 0] <= slack).all(), f"seed {seed}"


GENERATED = 5


@needs_transformers
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_generate(seed, name, cache):
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(seed))
    model = model_of(name, seed, "fly").eval()
    options = {"max_new_tokens": GENERATED, "do_sample": False, "eos_token_id": -1, "cache_implementation": cache}
    result = model.generate(ids, attention_mask=torch.ones_like(ids), disable_compile=True, **options)
    for prompt, row in zip(ids.tolist(), result.tolist()):
        assert row[: len(prompt)] == prompt and len(row) == len(prompt) + GENERATED
        check_tokens(name, seed, prompt, row[len(prompt) :])


@needs_transformers
@pytest.mark.parametrize("name", ["Llama", "Gemma 3, with windows", "gpt-oss, with sinks"])
def test_tokens_of_continuous_batching(seed, name, monkeypatch):
    transformers = importlib.import_module("transformers")
    ours = importlib.import_module("fly_attention.integrations.transformers")
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, ours.PAGED, None)
    ours.register(continuous_batching=True)
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 64, (n,), generator=draw).tolist() for n in (5, 3, 9)]
    results = model_of(name, seed, ours.PAGED).eval().generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(max_new_tokens=GENERATED, do_sample=False, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32),
    )  # fmt: skip
    found = sorted((result.prompt_ids, result.generated_tokens) for result in results.values())
    assert [prompt for prompt, _ in found] == sorted(prompts)
    for prompt, generated in found:
        assert len(generated) == GENERATED
        check_tokens(name, seed, prompt, generated)


@needs_diffusers
def test_a_model_of_diffusers(seed):
    diffusers = importlib.import_module("diffusers")
    importlib.import_module("fly_attention.integrations.diffusers").register()

    def make(backend: str) -> Any:
        torch.manual_seed(seed)
        model = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[8, 8, 16],
        ).bfloat16()
        model.set_attention_backend(backend)
        return model

    torch.manual_seed(seed)
    shapes = {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 7, 32), "pooled_projections": (1, 32)}
    given = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    given |= {"timestep": torch.ones(1).bfloat16(), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)}
    compare(make, "native", given, slice(None))


@needs_diffusers
def test_backends_of_diffusers_have_one_meaning(seed):
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    importlib.import_module("fly_attention.integrations.diffusers").register()
    torch.manual_seed(seed)
    mask = torch.rand(2, 1, 5, 9) < 0.7
    mask[..., 0] = True
    for queries, options in itertools.product((5, 9), ({}, {"is_causal": True}, {"attn_mask": mask})):
        if queries == 5 or "attn_mask" not in options:
            q, k, v = (torch.randn(2, s, 2, 32).bfloat16() for s in (queries, 9, 9))
            fly, native = (dispatch.dispatch_attention_fn(q, k, v, backend=b, **options) for b in ("fly", "native"))
            assert (fly.float() - native.float()).abs().max() <= 0.02
