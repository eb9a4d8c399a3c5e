"""torch.compile with inductor on ranks that share one GPU, over the kernels: training, and CUDA graphs that it makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import crosscut
from crosscut.distributed.launch import LaunchConfig, run
from crosscut.distributed.mesh import make_mesh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def trained(ctx: Any, mode: str | None) -> float:
    """The largest difference of a compiled MLP's output and gradients from the eager one's, relative to their size."""
    mesh = make_mesh(device=ctx.device)
    mlp = crosscut.ParallelMLP(256, 512, mesh=mesh, dtype=torch.float32, seed=1)
    compiled = torch.compile(mlp, fullgraph=True, mode=mode)
    worst = 0.0
    for step in range(4):
        x = torch.randn(8, 256, device=ctx.device, generator=torch.Generator(ctx.device).manual_seed(step))
        if mode is not None:
            with torch.no_grad():
                expected, got = [mlp(x)], [compiled(x).clone()]
        else:
            results = []
            for call in (mlp, compiled):
                mlp.zero_grad()
                inner = x.clone().requires_grad_()
                y = call(inner)
                y.square().sum().backward()
                results.append([y.detach(), inner.grad, *(p.grad.clone() for p in mlp.parameters())])
            expected, got = results
        for a, b in zip(got, expected, strict=True):
            worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    return worst


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_mlp_equals_the_eager_one(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSCUT_COLLECTIVES", "kernels")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    worst = run(trained, (mode,), LaunchConfig(2, "gloo", "cuda", timeout=120))
    assert worst is not None
    assert worst < 1e-4


def decoded(ctx: Any, name: str) -> bool:
    """Whether the text of a split model with a static cache, which transformers compiles and captures, is the unsplit one's."""
    zoo = pytest.importorskip("zoo")
    mesh = make_mesh(device=ctx.device)
    model, ids = zoo.model(name).to(ctx.device), zoo.prompt(name).to(ctx.device)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **how)
    model = crosscut.parallelize(model, mesh)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    texts = [model.generate(ids, **how, cache_implementation="static") for _ in range(3)]  # compiled, captured, replayed
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs, "nothing was compiled"
    return all(torch.equal(text, expected) for text in texts)


@pytest.mark.parametrize("name", ["llama-6q3kv", "gpt2"])
def test_static_cache_decoding_writes_the_eager_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the models are transformers'")
    monkeypatch.setenv("CROSSCUT_COLLECTIVES", "kernels")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert run(decoded, (name,), LaunchConfig(2, "gloo", "cuda", timeout=120))
