"""torch.compile over split Hugging Face models: one graph, the eager results; decoding with a static cache, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the models are transformers'")
from transformers import CompileConfig

import crosscut as cc
import zoo
from crosscut.distributed.mesh import Mesh

OnRanks = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def forget() -> None:
    torch._dynamo.reset()


def batch(name: str) -> dict[str, Tensor]:
    ids = zoo.prompt(name)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def trained(call: Any, model: Any, name: str) -> list[Tensor]:
    """Logits, and the gradients of their mean square."""
    logits = call(**batch(name), use_cache=False).logits
    model.zero_grad()
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_split_model_is_one_graph_and_trains_as_eager(on_ranks: OnRanks) -> None:
    name = "gpt2"  # transposed and packed weights

    def body(mesh: Mesh) -> list[list[Tensor]]:
        model = cc.parallelize(zoo.model(name), mesh)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        return [trained(call, model, name) for call in (model, compiled)]

    for eager, compiled in on_ranks(2, body):
        assert len(eager) == len(compiled) > 4
        for a, b in zip(eager, compiled, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_compiled_decoding_with_a_static_cache_writes_the_eager_text(on_ranks: OnRanks) -> None:
    """What transformers does by itself on GPUs when it is asked for a static cache."""
    name = "llama-10q2kv"
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    how = {**batch(name), "max_new_tokens": 6, "do_sample": False}
    expected = zoo.model(name).generate(**how)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def body(mesh: Mesh) -> Tensor:
        model = cc.parallelize(zoo.model(name), mesh)
        text: Tensor = model.generate(**how, cache_implementation="static", compile_config=config)
        return text

    for found in on_ranks(2, body):
        assert torch.equal(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs, "nothing was compiled"
