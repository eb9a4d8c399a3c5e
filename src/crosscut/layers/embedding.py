"""An embedding whose vocabulary is cut over the tp group (Megatron-LM, arXiv 1909.08053 section 3).

Each rank looks up the tokens of its own part of the vocabulary and gives zeros for the others; the sum over ranks is the
embedding. Shapes: ``ids [...]`` -> ``[..., H]``, weight ``[V/tp, H]``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from crosscut.collectives import reduce_from_tp, reduce_scatter_sequence
from crosscut.distributed.mesh import Mesh
from crosscut.errors import UsageError
from crosscut.layers.checks import check_dtype, check_sequence_dim, check_tokens
from crosscut.layers.shards import gather, refuse_empty, shared_seed, take, uniform_
from crosscut.sharding import Column, shard_range


class VocabParallelEmbedding(nn.Module):
    """``nn.Embedding`` with the vocabulary cut: rank r holds the rows ``shard_range(V, tp, r)``.

    ``padding_idx`` as in ``nn.Embedding``: that row gets no gradient. ``sequence_parallel``: the output is this rank's tokens
    alone, along ``sequence_dim`` (one reduce-scatter in place of the all-reduce).
    Raises UsageError: ``bad-size`` for a size below 1 or a padding_idx outside the vocabulary, ``bad-dtype`` for integers.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mesh: Mesh,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        refuse_empty(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        check_dtype(dtype)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise UsageError(
                f"padding_idx={padding_idx} in a vocabulary of {num_embeddings}",
                code="bad-size",
                fix=f"give a token from {-num_embeddings} to {num_embeddings - 1}",
            )
        self.num_embeddings, self.embedding_dim, self.group = num_embeddings, embedding_dim, mesh.tp
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.cuts = {"weight": Column()}
        self.shapes = {"weight": (num_embeddings, embedding_dim)}
        shard = self.cuts["weight"].shard_shape(self.shapes["weight"], mesh.tp.size, mesh.tp.rank)
        self.weight = nn.Parameter(torch.empty(shard, device=mesh.device if device is None else device, dtype=dtype))
        self.mine = shard_range(num_embeddings, mesh.tp.size, mesh.tp.rank)
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw initial weights with ``nn.Embedding``'s mean 0 and variance 1 (uniform), equal at every tp.

        ``seed`` None: drawn from torch's generator on the group's first rank, which makes this a collective call.
        """
        if self.weight.is_meta:
            return
        seed = shared_seed(self.group) if seed is None else seed
        uniform_(self.weight, self.cuts["weight"], self.shapes["weight"], 3**0.5, seed, self.group)
        row = self._padding_row()
        if row is not None:
            with torch.no_grad():
                self.weight[row].zero_()

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, mesh: Mesh, **options: Any) -> Self:
        """This rank's rows of ``embedding``: same values, dtype, device, padding and ``requires_grad``.

        Raises UsageError (``bad-option``) for max_norm, scale_grad_by_freq and sparse, which need all rows in one place.
        """
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, name):
                raise UsageError(
                    f"an embedding with {name} cannot be cut",
                    code="bad-option",
                    fix=f"build it without {name}, or leave it whole",
                )
        options |= {"device": "meta", "dtype": embedding.weight.dtype, "padding_idx": embedding.padding_idx}
        layer = cls(embedding.num_embeddings, embedding.embedding_dim, mesh=mesh, **options)
        layer.to_empty(device=embedding.weight.device)
        with torch.no_grad():
            layer.weight.copy_(take(embedding.weight, layer.cuts["weight"], layer.group.size, layer.group.rank))
        layer.weight.requires_grad_(embedding.weight.requires_grad)
        return layer

    def to_embedding(self) -> nn.Embedding:
        """The unsplit layer on every rank, weights bit for bit. A collective call."""
        whole = gather(self.weight, self.cuts["weight"], self.shapes["weight"], self.group)
        return nn.Embedding.from_pretrained(whole, freeze=not self.weight.requires_grad, padding_idx=self.padding_idx)

    def forward(self, ids: Tensor) -> Tensor:
        """``ids [...]`` of whole-vocabulary tokens, the same on every rank -> ``[..., H]``.

        Raises UsageError: ``bad-dtype`` for ids that are no whole numbers, ``bad-size`` for a token outside the vocabulary
        (checked on CPU, where it costs nothing).
        """
        check_tokens("token", ids, self.num_embeddings)
        if self.sequence_parallel:
            check_sequence_dim(self.sequence_dim, ids.dim() + 1)
        y = self._look_up(ids)
        if self.sequence_parallel:
            return reduce_scatter_sequence(y, self.group, self.sequence_dim)
        return reduce_from_tp(y, self.group, True)

    def _look_up(self, ids: Tensor) -> Tensor:
        """Own tokens' rows, zeros for the others."""
        if self.group.size == 1:
            return F.embedding(ids, self.weight, self.padding_idx)
        place = ids - self.mine.start
        here = (place >= 0) & (place < len(self.weight))
        if not len(self.weight):  # more ranks than tokens: this one holds none
            return self.weight.new_zeros((*ids.shape, self.embedding_dim)) + self.weight.sum()
        y = F.embedding(torch.where(here, place, 0), self.weight)
        if self.padding_idx is not None:
            here_with_grad = here & (ids != self.padding_idx)
            y = torch.where(here_with_grad.unsqueeze(-1), y, y.detach())
        return torch.where(here.unsqueeze(-1), y, 0.0)

    def _padding_row(self) -> int | None:
        if self.padding_idx is None or not self.mine.start <= self.padding_idx < self.mine.stop:
            return None
        return self.padding_idx - self.mine.start

    def extra_repr(self) -> str:
        """Sizes, and the rank's place, for ``print(module)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp {self.group.rank}/{self.group.size}"
