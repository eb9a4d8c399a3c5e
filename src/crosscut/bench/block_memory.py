"""``crosscut bench block --memory``: what a Transformer layer keeps for its backward, measured next to the formulas.

The block is the GPT-like one of Korthikanti et al. (arXiv 2205.05198, section 4): layer norm, as many KV heads as query heads,
a GELU MLP of 4h, dropout after attention and after the MLP, 16-bit numbers; attention by torch's SDPA, so that no s x s matrix
is kept. docs/memory.md derives :func:`terms` and says what differs from the paper.
Shapes: b batch, s sequence, h hidden, a heads, t ranks.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crosscut.bench.memory import peak_bytes, saved_bytes
from crosscut.bench.timing import slowest
from crosscut.bench.verdict import label
from crosscut.distributed.mesh import Mesh
from crosscut.distributed.rank_main import out_of_memory
from crosscut.errors import RankError, UsageError
from crosscut.layers import ParallelBlock
from crosscut.records import Row
from crosscut.units import format_size

DROPOUT = 0.1


@dataclass(frozen=True)
class GPTBlock:
    """Sizes of the measured layer. ``number``: bytes of an activation, ``statistic``: of a norm's mean or deviation."""

    batch: int
    tokens: int
    hidden: int
    heads: int
    number: int
    statistic: int

    @property
    def elements(self) -> int:
        """s b h."""
        return self.batch * self.tokens * self.hidden

    @property
    def shape(self) -> dict[str, int]:
        """The record's shape of it."""
        sizes = {"tokens": self.tokens, "hidden": self.hidden, "heads": self.heads, "kv_heads": self.heads}
        return ({} if self.batch == 1 else {"batch": self.batch}) | sizes | {"ffn": 4 * self.hidden}


class Term(NamedTuple):
    """One kept tensor: its bytes when whole; ``by_rank``: split over the ranks with or without sequence parallelism."""

    what: str
    nbytes: int
    by_rank: bool


def terms(g: GPTBlock) -> list[Term]:
    """Everything that one layer keeps for its backward."""
    tokens = g.batch * g.tokens
    return [
        Term("input of the first norm", g.number * g.elements, False),
        Term("its mean and deviation", 2 * g.statistic * tokens, False),
        Term("input of q, k, v", g.number * g.elements, False),
        Term("q, k, v", 3 * g.number * g.elements, True),
        Term("SDPA's log-sum-exp, float32", 4 * g.heads * tokens, True),
        Term("output of attention, input of its projection", g.number * g.elements, True),
        Term("dropout mask after attention", g.number * g.elements, False),
        Term("input of the second norm", g.number * g.elements, False),
        Term("its mean and deviation", 2 * g.statistic * tokens, False),
        Term("input of the MLP", g.number * g.elements, False),
        Term("input of GELU", 4 * g.number * g.elements, True),
        Term("output of GELU, input of the second multiply", 4 * g.number * g.elements, True),
        Term("dropout mask after the MLP", g.number * g.elements, False),
    ]


def derived_bytes(g: GPTBlock, tp: int, sequence_parallel: bool) -> float:
    """What a rank keeps for one layer, by :func:`terms`."""
    return sum(term.nbytes / (tp if term.by_rank or sequence_parallel else 1) for term in terms(g))


def paper_bytes(g: GPTBlock, tp: int, sequence_parallel: bool) -> float:
    """The same by arXiv 2205.05198, without the term 5as/h, which SDPA does away with: ``sbh (10 + 24/t)`` or ``34 sbh/t``."""
    return g.elements * (34 / tp if sequence_parallel else 10 + 24 / tp)


def memory_rows(
    mesh: Mesh, blocks: Sequence[GPTBlock], dtype: torch.dtype, forms: Sequence[bool], layers: int, limit: int | None
) -> tuple[list[Row], list[str]]:
    """A row for each of ``blocks``, without and with sequence parallelism as ``forms`` says, and a sentence for each block.

    A stack of ``layers`` blocks is measured and its bytes divided. ``limit``: the stack must run forward and backward in so
    many bytes beyond its weights. Raises RankError where it does not, UsageError (``bad-size``) for what does not divide.
    """
    rows, notes = list[Row](), list[str]()
    for g in blocks:
        _check_divides(g, mesh.tp.size)
        found = [_measure(g, mesh, dtype, sequence_parallel, layers, limit) for sequence_parallel in forms]
        rows += found
        if len(found) == 2 and found[0].bytes and found[1].bytes:
            notes.append(
                f"{label(g.shape)}: a layer keeps {format_size(found[0].bytes)} a rank, with sequence parallelism "
                f"{format_size(found[1].bytes)}, {found[0].bytes / found[1].bytes:.2f} times less."
            )
    return rows, notes


def _check_divides(g: GPTBlock, tp: int) -> None:
    if g.tokens % tp or g.heads % tp:
        raise UsageError(
            f"{g.tokens} tokens and {g.heads} heads do not divide into {tp} ranks",
            code="bad-size",
            fix="the formulas are for sizes that do: choose --tokens and --heads so",
        )


def _measure(g: GPTBlock, mesh: Mesh, dtype: torch.dtype, sequence_parallel: bool, layers: int, limit: int | None) -> Row:
    tp = mesh.tp.size
    derived, paper = (formula(g, tp, sequence_parallel) for formula in (derived_bytes, paper_bytes))
    stack, one = (_Stack(g, mesh, dtype, sequence_parallel, count) for count in (layers, 1))
    if limit is not None:
        one.both()  # what libraries take at their first call is not the layers'
        form = "with" if sequence_parallel else "without"
        _must_fit(stack, mesh, limit, f"{layers} layers of {label(g.shape)} {form} sequence parallelism")
    saved = _worst(saved_bytes(stack.forward, list(stack.blocks.parameters())) / layers, mesh)
    extra = {"derived_bytes": round(derived), "paper_bytes": round(paper), "layers": layers}
    if mesh.device.type == "cuda":
        extra["peak_bytes"] = _worst((peak_bytes(stack.both) - peak_bytes(one.both)) / (layers - 1), mesh)
    return Row(
        subject="memory",
        impl="crosscut_sp" if sequence_parallel else "crosscut",
        mode="eager",
        world=tp,
        dtype=str(dtype).removeprefix("torch."),
        shape=g.shape,
        bytes=saved,
        note=f"forward and backward ran in {format_size(limit)} beyond the weights" if limit is not None else None,
        extra=extra,
    )


def _worst(nbytes: float, mesh: Mesh) -> int:
    return round(slowest([nbytes], mesh.tp)[0])


class _Stack:
    """Blocks one after the other, with random weights and a random input: this rank's tokens, or all."""

    def __init__(self, g: GPTBlock, mesh: Mesh, dtype: torch.dtype, sequence_parallel: bool, layers: int) -> None:
        like: dict[str, Any] = {"mesh": mesh, "dtype": dtype, "device": "meta", "sequence_parallel": sequence_parallel}
        like |= {"norm": "layer", "gated": False, "activation": "gelu", "dropout": DROPOUT, "bias": True}
        self.blocks = nn.ModuleList(ParallelBlock(g.hidden, g.heads, 4 * g.hidden, **like) for _ in range(layers))
        self.blocks.to_empty(device=mesh.device)
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1)
        own = g.tokens // mesh.tp.size if sequence_parallel else g.tokens
        self.x = torch.randn(g.batch, own, g.hidden, dtype=dtype, device=mesh.device)
        self.dy = torch.randn_like(self.x)
        self.x.requires_grad_()

    def forward(self) -> Tensor:
        """``[b, s, h]``, or this rank's tokens."""
        y = self.x
        for block in self.blocks:
            y = block(y)
        return y

    def both(self) -> Tensor:
        """Forward and backward; the gradient of the input. The weights' gradients are computed, and not kept."""
        return torch.autograd.grad(self.forward(), self.x, self.dy)[0]


@contextmanager
def limited(device: torch.device, nbytes: int) -> Iterator[None]:
    """This process may take ``nbytes`` more than it has: of torch's allocator on a GPU, of address space on CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        most = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min((torch.cuda.memory_reserved(device) + nbytes) / most, 1.0), device)
    else:
        before = resource.getrlimit(resource.RLIMIT_AS)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, before[1]))
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        else:
            resource.setrlimit(resource.RLIMIT_AS, before)


def _must_fit(stack: _Stack, mesh: Mesh, limit: int, what: str) -> None:
    try:
        with limited(mesh.device, limit):
            stack.both()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise RankError(
            f"rank {mesh.rank} ran out of memory: {what} needs more than {format_size(limit)} beyond its weights",
            code="rank-failed",
            fix="raise --limit, or split the tokens between the layers as well: --sequence-parallel",
        ) from None
