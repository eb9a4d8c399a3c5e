"""Tensors made once for all layers: kept a while, kept for good where a CUDA graph holds them, made anew for the compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from crosscut.layers import checks


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(checks, "_KEPT", 2)
    return []


def test_the_last_few_are_kept_and_those_of_graphs_for_good(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    @checks.remembered
    def ones(length: int) -> Tensor:
        made.append(length)
        return torch.ones(length)

    assert ones(1) is ones(1)
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    in_graph = ones(1)
    assert ones(7) is not ones(7), "memory of one capture in another graph"
    assert made == [1, 7, 7]
    capturing = False
    for length in (2, 3, 4, 7):
        ones(length)
    assert ones(1) is in_graph, "a graph may be replayed at any time"
    assert made == [1, 7, 7, 2, 3, 4, 7]
    ones(2)
    assert made[-1] == 2, "it had to make room"


def test_what_inference_asked_for_serves_training(made: list[int]) -> None:
    @checks.remembered
    def ones(length: int) -> Tensor:
        return torch.ones(length)

    with torch.inference_mode():
        table = ones(3)
    assert not table.is_inference()
    weight = torch.ones(3, requires_grad=True)
    (weight * table).sum().backward()
    assert weight.grad is not None


def test_the_compiler_makes_its_own(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    @checks.remembered
    def ones(length: int) -> Tensor:
        made.append(length)
        return torch.ones(length)

    kept = ones(3)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    assert ones(3) is not kept
    assert made == [3, 3]


def test_of_two_threads_that_make_it_at_once_the_first_one_counts(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may already hold the first one's, which then must not be let go."""

    @checks.remembered
    def ones(length: int) -> Tensor:
        made.append(length)
        if len(made) == 1:
            others.append(ones(length))  # as another thread may, meanwhile
        return torch.ones(length)

    others: list[Tensor] = []
    assert ones(5) is others[0]
    assert ones(5) is others[0]
    assert made == [5, 5]
