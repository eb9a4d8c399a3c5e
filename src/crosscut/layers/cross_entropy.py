"""Cross-entropy over logits whose vocabulary is cut over the tp group: the logits are never gathered.

Two exchanges of a few numbers a token replace the gathering of V numbers a token: the largest logit, and a sum of three
(Megatron-LM, arXiv 1909.08053 section 3). The definition is ``torch.nn.functional.cross_entropy``'s, over the whole
vocabulary: label smoothing spreads over V classes, not over this rank's V/tp. z-loss is PaLM's (arXiv 2204.02311).
Shapes: ``logits [..., V/tp]``, ``target [...]`` of class numbers in the whole vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from crosscut.collectives import all_reduce, copy_to_tp, reduce_from_tp
from crosscut.distributed.mesh import Group, Mesh
from crosscut.errors import UsageError, choose
from crosscut.layers.checks import check_tokens
from crosscut.sharding import shard_range


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Group,
    vocab_size: int | None = None,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The loss of ``target`` under the softmax over all ranks' logits; float32, the same on every rank.

    ``vocab_size``: V. On more than one rank it must be given: logits that someone has gathered already would otherwise pass for
    shards of a vocabulary tp times as large, and the loss be off by log(tp). ``weight [V]``: class
    weights, whole on every rank. ``label_smoothing``: in [0, 1]. ``z_loss``: adds ``z_loss * log(sum exp logits)^2`` a token.
    ``reduction``: ``mean`` (over the weights of the targets that are not ignored, as torch does; the z-loss over their
    number), ``sum``, or ``none`` (shape of ``target``, 0 where ignored). All targets ignored: the mean is NaN, as torch's.
    Raises UsageError: ``bad-shape`` when shapes do not fit, ``bad-dtype`` for logits or targets of the wrong kind, ``bad-size``
    for a target outside the vocabulary (checked on CPU, where it costs nothing), ``bad-option`` for an unknown reduction, a
    label smoothing outside [0, 1], a negative z-loss, or no vocab_size on several ranks.
    """
    choose("reduction", reduction, ("mean", "sum", "none"))
    if isinstance(group, Mesh):
        raise UsageError("cross-entropy with a mesh", code="bad-option", fix="give its group: mesh.tp")
    if vocab_size is None and group.size > 1:
        raise UsageError(
            f"cross-entropy over {group.size} ranks without vocab_size",
            code="bad-option",
            fix="give the size of the whole vocabulary",
        )
    vocab = logits.shape[-1] if vocab_size is None else vocab_size
    mine = _check(logits, target, group, vocab, weight, ignore_index, label_smoothing, z_loss)
    target = target.long()
    kept = target != ignore_index
    place = target - mine.start
    here = kept & (place >= 0) & (place < mine.stop - mine.start)
    place = torch.where(here, place, 0)
    whole_weight = logits.new_ones(vocab, dtype=torch.float32) if weight is None else weight.float()
    smoothing = whole_weight[mine] if label_smoothing > 0 else None
    lse, hit, spread, *_ = _Statistics.apply(logits, place, here, smoothing, group)

    own = torch.where(kept, whole_weight[torch.where(kept, target, 0)], 0.0)
    loss = own * (lse - hit) * (1 - label_smoothing)
    if smoothing is not None:
        loss = loss + (lse * whole_weight.sum() - spread) * (label_smoothing / vocab)
    regulariser = z_loss * lse**2 if z_loss else None
    loss = torch.where(kept, loss, 0.0)
    if regulariser is not None:
        regulariser = torch.where(kept, regulariser, 0.0)
    if reduction == "mean":
        mean = loss.sum() / own.sum()
        return mean if regulariser is None else mean + regulariser.sum() / kept.sum()
    total = loss if regulariser is None else loss + regulariser
    return total.sum() if reduction == "sum" else total


def _check(
    logits: Tensor,
    target: Tensor,
    group: Group,
    vocab: int,
    weight: Tensor | None,
    ignore: int,
    smoothing: float,
    z_loss: float,
) -> slice:
    mine = shard_range(vocab, group.size, group.rank)
    if logits.shape[:-1] != target.shape or logits.shape[-1] != mine.stop - mine.start:
        raise UsageError(
            f"logits {list(logits.shape)} and target {list(target.shape)} on rank {group.rank} of {group.size}, "
            f"vocabulary {vocab}",
            code="bad-shape",
            fix=f"logits must be [..., {mine.stop - mine.start}] here and target must have their leading dims",
        )
    if weight is not None and weight.shape != (vocab,):
        raise UsageError(
            f"class weights {list(weight.shape)} for a vocabulary of {vocab}",
            code="bad-shape",
            fix="give one weight for each class of the whole vocabulary",
        )
    if not 0.0 <= z_loss < math.inf:
        raise UsageError(f"z_loss={z_loss}", code="bad-option", fix="give 0 or a small number above it, such as 1e-4")
    if not 0.0 <= smoothing <= 1.0:
        raise UsageError(f"label_smoothing={smoothing}", code="bad-option", fix="give a number from 0 to 1")
    if not logits.is_floating_point():
        raise UsageError(f"logits are {logits.dtype}", code="bad-dtype", fix="give float32, bfloat16, float16 or float64")
    check_tokens("target", target, vocab, ignore)
    return mine


class _Statistics(Function):
    """Of each token, over the whole vocabulary: log-sum-exp, the target's logit, and the weighted sum of the logits.

    Keeps one softmax shard for the backward: ``d lse = softmax``, ``d hit = one at the target``, ``d spread = weight``. That
    shard is a result too, so that a gradient of the gradient finds its way through it.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, place: Tensor, here: Tensor, weight: Tensor | None, group: Group
    ) -> tuple[Tensor, ...]:
        z = logits.float()
        if z.shape[-1]:
            largest = z.amax(-1)
            hit = torch.where(here, z.gather(-1, place.unsqueeze(-1)).squeeze(-1), 0.0)
        else:  # more ranks than classes: this one holds none
            largest, hit = z.new_full(z.shape[:-1], float("-inf")), z.new_zeros(z.shape[:-1])
        largest = all_reduce(largest, group, "max")
        softmax = (z - largest.unsqueeze(-1)).exp_()
        with torch.autocast(z.device.type, enabled=False):
            spread = torch.zeros_like(hit) if weight is None else z @ weight
        total, hit, spread = all_reduce(torch.stack([softmax.sum(-1), hit, spread]), group).unbind(0)
        softmax /= total.unsqueeze(-1)
        ctx.save_for_backward(softmax, place, here, weight)
        ctx.dtype, ctx.group = logits.dtype, group
        ctx.set_materialize_grads(False)
        results = total.log() + largest, hit, spread
        return results if torch.compiler.is_dynamo_compiling() else (*results, softmax)

    @staticmethod
    def backward(
        ctx: Any, d_lse: Tensor | None, d_hit: Tensor | None, d_spread: Tensor | None, d_softmax: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        softmax, place, here, weight = ctx.saved_tensors
        group = ctx.group  # each rank goes on with its own classes: what all share is copied, as autograd has to know
        d_lse, d_hit, d_spread = (None if d is None else copy_to_tp(d, group).unsqueeze(-1) for d in (d_lse, d_hit, d_spread))
        slope = 0.0 if d_lse is None else d_lse
        if d_softmax is not None:
            mean = reduce_from_tp((softmax * d_softmax).sum(-1, keepdim=True), group)
            slope = slope + d_softmax - copy_to_tp(mean, group)
        grad = softmax * slope
        if d_hit is not None:
            hit = torch.where(here.unsqueeze(-1), d_hit, 0.0)
            grad = grad.scatter_add_(-1, place.unsqueeze(-1), hit) if grad.shape[-1] else grad + hit
        if weight is not None and d_spread is not None:
            grad += d_spread * weight
        return grad.to(ctx.dtype), None, None, None, None
