"""The language-model head: hidden states to logits that stay cut over the vocabulary, with its own weight or the embedding's.

Shapes: ``x [..., H]`` -> logits ``[..., V/tp]``, weight ``[V/tp, H]``, cut as :class:`VocabParallelEmbedding` cuts its own.
:func:`vocab_parallel_cross_entropy` takes the logits as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from crosscut.collectives import gather_from_tp
from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers.checks import check_positive
from crosscut.layers.embedding import VocabParallelEmbedding
from crosscut.layers.linear import _ParallelLinear
from crosscut.layers.overlap import column_linear
from crosscut.sharding import Column


class VocabParallelHead(_ParallelLinear):
    """``logits = x W^T`` with the vocabulary cut: rank r gives the logits of the tokens ``shard_range(V, tp, r)``.

    ``embedding``: tie the head to it (Press and Wolf 2017, arXiv 1608.05859). The head then holds the embedding, not a second
    weight: there is one parameter, whose gradient is the sum of both uses, and nothing can part them, neither ``to``,
    ``to_empty``, ``deepcopy`` nor loading. (Assigning ``head.weight = embedding.weight`` is undone by ``to_empty``.)
    ``softcap`` c: logits become ``c * tanh(logits / c)`` (Gemma 2, arXiv 2408.00118). ``gather_output``: all V logits on every
    rank, for sampling. ``sequence_parallel``: x is this rank's tokens alone, along ``sequence_dim``; the logits are of all.
    Raises UsageError: ``bad-size`` for a size below 1 or an embedding of another size, ``bad-option`` for a bad softcap.
    """

    def __init__(
        self,
        hidden: int,
        vocab: int,
        bias: bool = False,
        *,
        mesh: Mesh,
        embedding: VocabParallelEmbedding | None = None,
        softcap: float | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        check_positive(softcap=softcap)
        where = device if embedding is None else "meta"
        super().__init__(hidden, vocab, bias, mesh, {"weight": Column(), "bias": Column()}, where, dtype)
        self.softcap, self.gather_output, self.embedding = softcap, gather_output, embedding
        self.sequence_dim = sequence_dim if sequence_parallel else None
        if embedding is not None:
            self._tie(embedding)
        self.reset_parameters(seed)

    def _tie(self, embedding: VocabParallelEmbedding) -> None:
        sizes = (embedding.num_embeddings, embedding.embedding_dim)
        if self.bias is not None or sizes != (self.out_features, self.in_features):
            raise UsageError(
                f"a head {self.in_features} -> {self.out_features}{'' if self.bias is None else ' with bias'} cannot be tied "
                f"to an embedding of {sizes[0]} tokens with {sizes[1]} features",
                code="bad-size",
                fix="give both the same vocabulary and hidden size and no bias, or leave embedding out",
            )
        self.register_parameter("weight", None)
        self.shapes = {}

    def reset_parameters(self, seed: int | None = None) -> None:
        """As ColumnParallelLinear's; nothing to do where the weight is the embedding's."""
        if self.embedding is None:
            super().reset_parameters(seed)

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: Mesh, **options: Any) -> Self:
        """This rank's rows of an untied head. Raises UsageError (``bad-option``) with ``embedding``: tie in the constructor."""
        if options.get("embedding") is not None:
            raise UsageError(
                "VocabParallelHead.from_linear with an embedding",
                code="bad-option",
                fix="build VocabParallelHead(hidden, vocab, embedding=...): it uses the embedding's weight",
            )
        return super().from_linear(linear, mesh, **options)

    def _own(self) -> tuple[Tensor, Tensor | None]:
        return self.weight if self.embedding is None else self.embedding.weight, self.bias

    def forward(self, x: Tensor, total_tokens: int | None = None) -> Tensor:
        """``x [..., H] -> [..., V/tp]``, or ``[..., V]`` with gather_output. ``total_tokens``: as in ColumnParallelLinear.

        Raises UsageError (``bad-shape``) when x does not have H features.
        """
        self._check_width(x, self.in_features, "the input")
        logits = column_linear(x, *self._own(), self.group, self.sequence_dim, total_tokens)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return gather_from_tp(logits, self.group, -1, self.out_features) if self.gather_output else logits

    def extra_repr(self) -> str:
        """Sizes and whether it is tied, for ``print(module)``."""
        return f"{super().extra_repr()}, tied={self.embedding is not None}"
