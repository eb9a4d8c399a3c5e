"""Rotary position embedding (RoPE: Su et al. 2021, arXiv 2104.09864) with the ways in use to stretch it to longer contexts.

A head's features are taken in pairs, and pair i is turned by ``position * frequency_i``, with ``frequency_i = theta^(-2i/R)``
for the R features that are turned. Llama's checkpoints pair feature i with i + R/2; the paper pairs neighbours, 2i and 2i + 1
(``interleaved``). The two differ by a permutation of the rows of the q and k weights. Frequencies are float64, angles and
products at least float32, whatever the dtype of the heads: in bfloat16 a position past 256 is not even representable.

Scalings, by the names and keys of a config.json (L the trained length, ``original_max_position_embeddings``):

linear   frequencies divided by ``factor`` (position interpolation, arXiv 2306.15595)
dynamic  theta grown with the length S of the sequence once S > L: ``theta * (factor * S/L - (factor - 1))^(R/(R-2))``
         (NTK-aware, dynamic; arXiv 2309.00071 section 3 and appendix). S is the length of this call: no memory of longer ones
yarn     slow pairs divided, fast ones kept, a ramp between; cos and sin times ``0.1 ln(factor) + 1`` (arXiv 2309.00071)
llama3   as yarn by wavelength, without the last factor (Llama 3.1's reference code; arXiv 2407.21783)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crosscut.errors import UsageError, choose, nearest
from crosscut.layers.checks import is_number, remembered

_TRAINED = "original_max_position_embeddings"
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # what each scaling needs, and what else it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", _TRAINED), ()),
    "yarn": (
        ("factor", _TRAINED),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _TRAINED), ()),
}


@dataclass(frozen=True)
class Rope:
    """The rotation of one attention layer's heads. ``features``: R, how many of a head's features are turned (the first R).

    ``scaling``: sorted items of the config's dict; empty for none. Make it with :func:`make_rope`, which checks.
    """

    features: int
    theta: float
    scaling: tuple[tuple[str, Any], ...] = ()
    interleaved: bool = False

    def frequencies(self, length: int | Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, float]:
        """``[R/2]`` angles a position, float64, and what cos and sin are multiplied with; ``length``: S, for ``dynamic``."""
        options = dict(self.scaling)
        pairs = torch.arange(0, self.features, 2, device=device, dtype=torch.float64) / self.features
        plain = self.theta**-pairs
        match options.get("rope_type", "default"):
            case "linear":
                return plain / options["factor"], 1.0
            case "dynamic":
                longer = torch.as_tensor(length, dtype=torch.float64, device=device).clamp(min=options[_TRAINED])
                stretch = options["factor"] * longer / options[_TRAINED] - (options["factor"] - 1)
                return (self.theta * stretch ** (self.features / (self.features - 2))) ** -pairs, 1.0
            case "yarn":
                kept = 1 - _ramp(self.features, self.theta, options).to(device)
                return plain * kept + plain / options["factor"] * (1 - kept), _yarn_attention(options)
            case "llama3":
                return _llama3(plain, options), 1.0
        return plain, 1.0

    def tables(self, positions: Tensor | int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines for heads ``[B, N, S, D]`` of ``dtype``, each ``[S, R/2]``, or ``[B, 1, S, R/2]``.

        ``positions``: ``[S]``, ``[B, S]``, or S for 0 to S-1, whose tables all layers share. float32, or float64 for float64.
        """
        table = torch.promote_types(dtype, torch.float32)
        if isinstance(positions, int):
            return _tables(self, positions, table, device)
        return self._turns(positions, positions.max() + 1 if positions.numel() else 0, table)

    def _turns(self, positions: Tensor, length: int | Tensor, table: torch.dtype) -> tuple[Tensor, Tensor]:
        frequencies, factor = self.frequencies(length, positions.device)
        angles = positions.to(table).unsqueeze(-1) * frequencies.to(table)
        if positions.dim() == 2:
            angles = angles.unsqueeze(1)
        return angles.cos() * factor, angles.sin() * factor

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [..., S, D]`` with each pair of its first R features turned by its angle; same dtype as ``x``."""
        whole = self.features == x.shape[-1]
        turned = x if whole else x[..., : self.features]
        first, second = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        pair = [torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)]
        y = (torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)).to(x.dtype)
        return y if whole else torch.cat([y, x[..., self.features :]], -1)


@remembered
def _tables(rope: Rope, length: int, table: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return rope._turns(torch.arange(length, device=device), length, table)


def make_rope(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    partial_rotary_factor: float = 1.0,
    interleaved: bool = False,
) -> Rope:
    """The rotation of heads of ``head_dim`` D features, checked. R is ``int(D * partial_rotary_factor)``.

    ``scaling``: ``rope_scaling`` of a config.json, with ``rope_type`` (or ``type``) and that type's keys, and no others.
    Raises UsageError: ``bad-size`` for an odd number of features, ``bad-option`` for values that cannot work.
    """
    if not (is_number(partial_rotary_factor) and 0 < partial_rotary_factor <= 1):
        raise UsageError(
            f"partial_rotary_factor={partial_rotary_factor!r}",
            code="bad-option",
            fix="give the part of D to turn, above 0 up to 1",
        )
    features = int(head_dim * partial_rotary_factor)
    if features % 2 or features < 2:
        part = "" if partial_rotary_factor == 1 else f", partial_rotary_factor={partial_rotary_factor}"
        raise UsageError(
            f"rope_theta with head_dim={head_dim}{part}: rotary embedding turns pairs of features, not {features}",
            code="bad-size",
            fix="make it an even number of features, or leave rope_theta out",
        )
    if not (is_number(theta) and 1 < theta < math.inf):
        raise UsageError(f"rope_theta={theta!r}", code="bad-option", fix="give a number above 1, such as 10000.0")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise UsageError(
            f"rope_scaling={scaling!r}", code="bad-option", fix='give a dict, such as {"rope_type": "linear", "factor": 2.0}'
        )
    return Rope(features, float(theta), _checked(dict(scaling or {}), features), interleaved)


def _checked(options: dict[str, Any], features: int) -> tuple[tuple[str, Any], ...]:
    kind = choose("rope_type", str(options.pop("type", options.pop("rope_type", "default"))), _KEYS)
    needed, allowed = _KEYS[kind]
    for key in options:
        if key not in needed + allowed:
            raise UsageError(
                f"rope scaling {kind!r} has no {key!r}{nearest(key, needed + allowed)}",
                code="bad-option",
                fix=f"its keys are {', '.join(needed + allowed) or 'none'}",
            )
    for key in needed:
        value = options.get(key)
        if not isinstance(value, int | float) or not value > 0 or (key == "factor" and value < 1):
            raise UsageError(
                f"rope scaling {kind!r} with {key}={value}",
                code="bad-option",
                fix=f"it needs {', '.join(needed)}: positive numbers, factor at least 1",
            )
    for key in allowed:
        if options.get(key) is not None and not is_number(options[key]):
            raise UsageError(f"rope scaling {kind!r} with {key}={options[key]!r}", code="bad-option", fix="give a number")
    if kind == "llama3" and not options["low_freq_factor"] < options["high_freq_factor"]:
        raise UsageError(
            f"low_freq_factor={options['low_freq_factor']} and high_freq_factor={options['high_freq_factor']}",
            code="bad-option",
            fix="the low one must be below the high one",
        )
    if kind == "dynamic" and features == 2:
        raise UsageError("rope scaling 'dynamic' with 2 features", code="bad-size", fix="it needs at least 4")
    return tuple(sorted({"rope_type": kind, **options}.items())) if kind != "default" else ()


def _llama3(plain: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Wavelengths beyond L/low divided by factor, below L/high kept, between them a blend linear in 1/wavelength."""
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    turns = options[_TRAINED] * plain / (2 * math.pi)  # how often a pair turns within L
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / options["factor"] * (1 - kept)


def _ramp(features: int, theta: float, options: Mapping[str, Any]) -> Tensor:
    """0 for pairs that turn more than beta_fast times within L, 1 for those below beta_slow, linear in i between."""

    def pair(turns: float) -> float:
        return features * math.log(options[_TRAINED] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(options.get("beta_fast") or 32), pair(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, features - 1)
    index = torch.arange(features // 2, dtype=torch.float64, device="cpu")
    return ((index - first) / ((last - first) or 0.001)).clamp(0, 1)


def _yarn_attention(options: Mapping[str, Any]) -> float:
    """What cos and sin are multiplied with; the scores see its square."""

    def factor(scale: float) -> float:
        return 0.1 * scale * math.log(options["factor"]) + 1.0

    given = options.get("attention_factor")
    if given is not None:
        return float(given)
    if options.get("mscale") and options.get("mscale_all_dim"):
        return factor(options["mscale"]) / factor(options["mscale_all_dim"])
    return factor(1.0)
