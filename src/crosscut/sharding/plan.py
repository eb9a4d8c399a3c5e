"""What a split costs each rank, before anything is loaded: legal sizes, bytes of weights, KV cache, what is held twice.

Formulas: a rank's weights are its shards' bytes, cut as the loader cuts them. KV cache of a token: 2 K D bytes of one element
in each layer (arXiv 1911.02150), with latent attention R + rope for all heads together (arXiv 2405.04434), on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from crosscut.errors import UsageError
from crosscut.model_config import ModelConfig
from crosscut.sharding.cut import Cut
from crosscut.sharding.describe import Model, nbytes
from crosscut.sharding.headers import BITS
from crosscut.sharding.heads import Heads
from crosscut.sharding.roles import heads_of


@dataclass(frozen=True)
class Split:
    """A model on ``tp`` ranks. Sequences have one entry a rank, in bytes."""

    tp: int
    even: bool
    """Every rank has the same number of query heads."""
    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    """KV heads in a rank's cache, with latent attention 0."""
    kv_copies: int
    """On how many ranks the most replicated KV head lies."""
    weights: tuple[int, ...]
    total: int
    """Bytes of the unsplit weights."""
    full_token: tuple[int, ...]
    """KV cache of one token in all layers that look at everything."""
    window_token: tuple[int, ...]
    """KV cache of one token in all layers that look back ``window`` tokens."""
    window: int

    @property
    def copied(self) -> int:
        """Bytes beyond one copy of the weights, over all ranks."""
        return sum(self.weights) - self.total

    @property
    def kv_token(self) -> int:
        """KV cache of one token on the rank that holds most, within the window."""
        return max(full + short for full, short in zip(self.full_token, self.window_token, strict=True))

    def cache(self, rank: int, tokens: int) -> int:
        """KV cache of one sequence of ``tokens`` on ``rank``."""
        return self.full_token[rank] * tokens + self.window_token[rank] * min(tokens, self.window)

    def context(self, memory: int) -> int:
        """The longest sequence that fits beside the weights in ``memory`` bytes of each rank; 0 when none does.

        Above 2**40 when no layer's cache grows with the sequence.
        """
        return min(self._context(rank, memory - self.weights[rank]) for rank in range(self.tp))

    def _context(self, rank: int, free: int) -> int:
        full, short = self.full_token[rank], self.window_token[rank]
        if free < 0:
            return 0
        within = free // (full + short)
        if within < self.window or not short:
            return within
        return (free - short * self.window) // full if full else 1 << 41

    def sequences(self, memory: int, tokens: int) -> int:
        """How many sequences of ``tokens`` fit beside the weights in ``memory`` bytes of each rank."""
        return min(max(0, memory - self.weights[rank]) // self.cache(rank, tokens) for rank in range(self.tp))


def even_sizes(config: ModelConfig) -> list[int]:
    """The tp at which every rank has the same number of query heads."""
    return [tp for tp in range(1, config.heads + 1) if is_even(config, tp)]


def is_even(config: ModelConfig, tp: int) -> bool:
    """Whether every rank has the same number of query heads."""
    return config.heads % tp == 0 and len({len(own) for own in _queries(heads_of(config), tp)}) == 1


def refused(config: ModelConfig, sizes: Sequence[int], uneven: bool = False) -> list[int]:
    """Those of ``sizes`` to which the query heads cannot be dealt, or not evenly."""
    return [tp for tp in sizes if tp > config.heads or not (uneven or is_even(config, tp))]


def remedy(config: ModelConfig, sizes: Sequence[int]) -> str:
    """What can be done instead of the refused ``sizes``: ``'tp 1, 2, 4 divide; 3 is possible unevenly with --uneven'``."""
    text = f"tp {', '.join(map(str, even_sizes(config)))} divide"
    uneven = [str(tp) for tp in sizes if tp <= config.heads]
    if uneven:
        words = " and ".join(filter(None, (", ".join(uneven[:-1]), uneven[-1])))
        text += f"; {words} {'is' if len(uneven) == 1 else 'are'} possible unevenly with --uneven"
    return text


def require(config: ModelConfig, tp: int, uneven: bool = False) -> None:
    """Raise UsageError (``bad-size``) when the model cannot be split over ``tp`` ranks, saying what can."""
    if not refused(config, [tp], uneven):
        return
    shared = f" in {config.kv_heads} groups" if config.kv_heads < config.heads else ""
    why = f"do not divide by {tp}" if tp <= config.heads else f"are fewer than {tp} ranks"
    raise UsageError(f"{config.heads} query heads{shared} {why}", code="bad-size", fix=remedy(config, [tp]))


def split(model: Model, tp: int) -> Split:
    """What each of ``tp`` ranks holds. Raises UsageError (``bad-size``) when there are more ranks than query heads."""
    config = model.config
    require(config, tp, uneven=True)
    heads = heads_of(config)
    groups = Counter((tensor.place.cut, tensor.shape, tensor.dtype) for tensor in model.tensors)
    weights = [sum(count * _share(*group, tp, rank) for group, count in groups.items()) for rank in range(tp)]
    queries = [len(own) for own in _queries(heads, tp)]
    repeated = model.family.cached_by_query(config, 0)
    cached = [0 if config.latent else _cached_heads(heads, tp, rank, repeated) for rank in range(tp)]
    token = [_token(model, own) for own in cached]
    full, short = _layers(config)
    return Split(
        tp=tp,
        even=is_even(config, tp),
        query_heads=tuple(queries),
        kv_heads=tuple(cached),
        kv_copies=tp if config.latent else max(len(ranks) for ranks in heads.kv_owners(tp)),
        weights=tuple(weights),
        total=sum(count * nbytes(shape, dtype) for (_, shape, dtype), count in groups.items()),
        full_token=tuple(full * own for own in token),
        window_token=tuple(short * own for own in token),
        window=config.window or 0,
    )


def _share(cut: Cut, shape: tuple[int, ...], dtype: str, tp: int, rank: int) -> int:
    return nbytes(cut.shard_shape(shape, tp, rank), dtype)


def _queries(heads: Heads, tp: int) -> list[range]:
    return [range(*heads.query_range(tp, rank).indices(heads.heads)) for rank in range(tp)]


def _cached_heads(heads: Heads, tp: int, rank: int, repeated: bool) -> int:
    """KV heads in the cache: the rank's own, or one for each query head where they serve unequally many or are ``repeated``."""
    served = Counter(heads.kv_of_query(tp, rank)).values()
    return sum(served) if repeated or len(set(served)) > 1 else len(served)


def _token(model: Model, kv_heads: int) -> int:
    """Bytes of KV cache of one token in one layer."""
    latent, bits = model.config.latent, BITS[model.dtype]
    features = latent.kv_rank + latent.rope_dim if latent else 2 * kv_heads * model.config.head_dim
    return features * bits // 8


def _layers(config: ModelConfig) -> tuple[int, int]:
    """How many layers look at everything, and how many look back a window."""
    short = sum(kind == "sliding_attention" for kind in config.layer_types)
    return config.layers - short, short


def notes(model: Model, splits: Sequence[Split]) -> list[str]:
    """What a reader should know beside the figures: ties, replication, sizes that do not divide, guesses."""
    config, found = model.config, list(model.notes)
    if model.family.guessed:
        whole = sum(nbytes(tensor.shape, tensor.dtype) for tensor in model.tensors if tensor.place.cut.dim is None)
        share = whole / sum(nbytes(tensor.shape, tensor.dtype) for tensor in model.tensors)
        found.append(f"guessed from names and shapes: no table for {config.model_type!r}; {share:.0%} is whole on every rank")
    if config.tied:
        found.append("embedding and output head are one parameter, counted once")
    if config.latent:
        found.append("latent attention: every rank holds the whole KV cache")
    for one in splits:
        if not config.latent and one.kv_copies > 1:
            found.append(f"tp {one.tp}: a KV head is on up to {one.kv_copies} ranks ({config.kv_heads} KV heads)")
        rest = [f"{what} {size}" for what, size in _sizes(config) if size % one.tp]
        if rest:
            found.append(f"tp {one.tp} does not divide {', '.join(rest)}: dealt unevenly, no padding")
    return found


def _sizes(config: ModelConfig) -> list[tuple[str, int]]:
    sizes = [("vocabulary", config.vocab), ("ffn", config.ffn), ("expert ffn", config.expert_ffn)]
    sizes.append(("shared expert ffn", config.shared_ffn))
    return [
        (what, size)
        for what, size in sizes
        if size and (what != "ffn" or config.experts == 0 or config.ffn != config.expert_ffn)
    ]
