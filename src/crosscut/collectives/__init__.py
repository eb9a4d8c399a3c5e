"""Collectives over a group: the raw tier (async, no autograd) and the autograd tier (named dual pairs)."""

from crosscut.collectives.autograd import (
    copy_to_tp,
    gather_from_tp,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_sequence,
    scatter_to_tp,
)
from crosscut.collectives.call import Pending
from crosscut.collectives.fast import choice
from crosscut.collectives.functional import (
    all_agree,
    all_gather,
    all_reduce,
    all_reduce_norm,
    all_to_all,
    barrier,
    broadcast,
    recv,
    reduce_scatter,
    send,
)

__all__ = [
    "Pending",
    "all_agree",
    "all_gather",
    "all_reduce",
    "all_reduce_norm",
    "all_to_all",
    "barrier",
    "broadcast",
    "choice",
    "copy_to_tp",
    "gather_from_tp",
    "gather_sequence",
    "recv",
    "reduce_from_tp",
    "reduce_scatter",
    "reduce_scatter_sequence",
    "scatter_to_tp",
    "send",
]
