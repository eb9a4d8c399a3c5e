"""A whole Hugging Face model from disk to the ranks that share it: each reads its own bytes, and no other.

Config and headers are checked first, so that a checkpoint that cannot work is refused before anything is allocated. The
model is built without weights, split, and then filled tensor by tensor.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from crosscut.distributed.mesh import Mesh
from crosscut.distributed.progress import OnProgress
from crosscut.errors import UsageError, choose
from crosscut.layers.shards import take
from crosscut.model_config import CONFIG
from crosscut.models import import_extra
from crosscut.models.agree import maximum, together
from crosscut.models.layout import loaded_layout
from crosscut.models.parallelize import parallelize
from crosscut.models.read import READERS, Job, Reader, blocks, run_jobs, same_bytes
from crosscut.models.slots import Slot, slots_of, tensors_of
from crosscut.models.source import Source, locate, open_source
from crosscut.models.stream import damaged
from crosscut.models.training_state import refuse_damage
from crosscut.sharding import Family, Role
from crosscut.sharding.describe import DTYPES
from crosscut.sharding.headers import FLOATS, Stored
from crosscut.sharding.plan import require
from crosscut.units import format_size

_BUILDING = threading.Lock()  # transformers sets the default dtype of the whole process while it builds a model


def from_pretrained(
    path_or_name: str | Path,
    mesh: Mesh,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    *,
    family: Family | None = None,
    accept_guess: bool = False,
    uneven: bool = False,
    allow_pickle: bool = False,
    check: bool = True,
    revision: str | None = None,
    attn_implementation: str | None = None,
    progress: OnProgress | None = None,
) -> Any:
    """The causal language model of a Hugging Face directory, a .gguf file of a Llama or a name on the hub, split over ``mesh``.

    As :func:`crosscut.parallelize` of the loaded model, in eval mode, without any rank ever holding more than its shard, and
    on the host one tensor more. A collective call; what one rank cannot read, all ranks raise.

    ``dtype``: of the weights (default: what config.json says, else what most of them have). ``device``: default
    ``mesh.device``. ``family``, ``accept_guess``: as for ``parallelize``. ``uneven``: a tp that does not divide the heads will
    do. ``allow_pickle``: read pytorch_model.bin where there are no safetensors (tensors alone, ``weights_only``). ``check``:
    name weights that are NaN or Inf, and compare checksums where files have them. ``progress(fraction, text)`` is called on
    the first rank, with the time left.

    Raises UsageError before anything is allocated: ``file-missing``, ``file-unreadable``, ``bad-config``, ``bad-dtype``,
    ``bad-size`` (tp), ``unknown-model``, ``parameter-missing``, ``bad-option`` (pickles), ``extra-missing``; while reading:
    ``file-unreadable`` (NaN, Inf, damage). Raises RankError (``rank-failed``) where another rank failed alone.
    """
    where = locate(path_or_name, mesh, revision)
    source: Source = together(mesh, lambda: _checked(where, mesh, family, accept_guess, uneven, allow_pickle, check))
    _refuse_another_head(source, mesh)
    wanted: torch.dtype = together(mesh, lambda: _dtype(dtype, source))
    model = together(mesh, lambda: _hollow(source, wanted, attn_implementation))
    parallelize(model, mesh, family=family, accept_guess=accept_guess)
    slots = together(mesh, lambda: _slots(model, source, mesh))
    place = torch.device(device) if device is not None else mesh.device
    wrong = together(mesh, lambda: _fill(model, source, slots, mesh, place, check, progress))
    _refuse_wrong(mesh, slots, wrong, source, wanted)
    if source.read is None and source.directory is not None and not source.is_part:
        model.loaded_layout = loaded_layout(source.directory, source.model.tensors, source.model.family)
    return model


# ---- before anything is allocated


def _checked(
    where: Path, mesh: Mesh, family: Family | None, accept_guess: bool, uneven: bool, allow_pickle: bool, check: bool
) -> Source:
    try:
        source = open_source(where, family, accept_guess, allow_pickle)
        require(source.model.config, mesh.tp.size, uneven)
    except UsageError as error:  # sharding speaks of the command line's flags
        fix = (error.fix or "").replace("--uneven", "uneven=True").replace("--guess", "accept_guess=True")
        raise UsageError(error.message, code=error.code, fix=fix or None) from None
    odd = [tensor for tensor in source.model.tensors if tensor.dtype not in FLOATS]
    if odd:
        raise UsageError(
            f"{odd[0].place.name!r} is stored as {odd[0].dtype}: a quantized weight, which crosscut does not split",
            code="bad-dtype",
            fix="use the checkpoint in bfloat16, float16 or float32",
        )
    if check and source.read is None:
        for path in sorted({tensor.stored.file for tensor in source.model.tensors if tensor.stored}):
            found = damaged(path, mesh.tp.rank, mesh.tp.size)
            refuse_damage(path, found, len(found))
    return source


def _refuse_another_head(source: Source, mesh: Mesh) -> None:
    """Raise UsageError on all ranks when a head that config.json ties is stored with other values than its embedding."""
    another = together(mesh, lambda: _another_head(source, mesh))
    if int(maximum(mesh, torch.tensor([int(another)]))):
        raise UsageError(
            f"{CONFIG} of {str(source.where)!r} ties the output head to the embedding, and their stored values differ",
            code="bad-config",
            fix=f'write "tie_word_embeddings": false into {CONFIG} to use both, or remove the head from the files',
        )


def _another_head(source: Source, mesh: Mesh) -> bool:
    """Whether a tied head is stored beside its embedding and differs; each rank of tp compares a share."""
    head = source.model.tied_head
    if head is None:
        return False
    embedding = next(t.stored for t in source.model.tensors if t.place.role is Role.EMBEDDING and t.stored)
    if source.read is not None:
        return not torch.equal(source.read(head.name), source.read(embedding.name))
    return head.dtype != embedding.dtype or not same_bytes(head, embedding, mesh.tp)


def _dtype(given: torch.dtype | str | None, source: Source) -> torch.dtype:
    name = str(given).removeprefix("torch.") if given is not None else source.model.config.dtype
    if name is None:
        name = next(word for word, stored in DTYPES.items() if stored == source.model.dtype)
    found: torch.dtype = getattr(torch, choose("dtype", name, DTYPES, code="bad-dtype"))
    return found


class _Hollow(TorchFunctionMode):
    """Uninitialized memory is not allocated, which is how weights are made; computed buffers (inv_freq) are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def _hollow(source: Source, dtype: torch.dtype, attn_implementation: str | None) -> Any:
    """The unsplit model with parameters on the meta device, in eval mode."""
    auto = import_extra("transformers")
    options = {"attn_implementation": attn_implementation} if attn_implementation else {}
    try:
        with _BUILDING, _Hollow():
            model = auto.AutoModelForCausalLM.from_config(source.config, dtype=dtype, **options)
    except Exception as error:  # transformers lets through whatever a config's values lead to
        raise UsageError(
            f"transformers cannot build the model of {str(source.where)!r}: {type(error).__name__}: {error}",
            code="bad-config",
            fix=f"correct {CONFIG}, or the attn_implementation that was asked for",
        ) from error
    homes = _homes(model)
    for tensor in list(tensors_of(model)):
        wanted = torch.float32 if _stays_float32(model, tensor.name, dtype) else dtype
        if tensor.local.is_floating_point():
            _put(homes, tensor.local, torch.empty(tensor.shape, dtype=wanted, device="meta"))
    if source.directory is not None:
        model.generation_config = _generation(auto.GenerationConfig, source.directory) or model.generation_config
    return model.eval()


def _generation(cls: Any, directory: Path) -> Any:
    """generation_config.json; without it what config.json says of generation, as older checkpoints do."""
    path = directory / "generation_config.json"
    try:
        if path.is_file():
            return cls.from_pretrained(directory)
        return cls.from_pretrained(directory, config_file_name=CONFIG, _from_model_config=True)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be used: {error}", code="file-unreadable", fix="download the file again, or remove it"
        ) from None


def _stays_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """transformers keeps what some models name in float32: always, or where float16 would overflow."""
    kept = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    if dtype == torch.float16:
        kept += getattr(model, "_keep_in_fp32_modules", None) or ()
    return dtype in (torch.float16, torch.bfloat16) and any(re.search(rf"(^|\.){re.escape(k)}($|\.)", name) for k in kept)


Homes = dict[int, list[tuple[dict[str, Any], str]]]
"""By the id of a tensor the modules' tables that hold it, and its names there; tied parameters have several."""


def _homes(model: nn.Module) -> Homes:
    homes: Homes = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                homes.setdefault(id(tensor), []).append((table, leaf))
    return homes


def _put(homes: Homes, old: Tensor, new: Tensor) -> None:
    """``new`` in every place of ``old``."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    for table, leaf in homes[id(old)]:
        table[leaf] = new


# ---- the weights


def _slots(model: Any, source: Source, mesh: Mesh) -> list[Slot]:
    names: dict[str, str] = {}
    for tensor in source.model.tensors:
        assert tensor.stored is not None
        if names.setdefault(tensor.place.name, tensor.stored.name) != tensor.stored.name:
            raise UsageError(
                f"{str(source.where)!r} holds {tensor.place.name!r} twice, also as {tensor.stored.name!r}",
                code="bad-config",
                fix="use a checkpoint that was saved in one piece",
            )
    slots = slots_of(tensors_of(model), names, source.model.family, mesh.tp, str(source.where))
    shapes = {tensor.stored.name: tensor.shape for tensor in source.model.tensors if tensor.stored}
    for slot in slots:
        if shapes[slot.stored] != slot.shape:
            raise UsageError(
                f"{slot.stored} is {list(shapes[slot.stored])}, and the model that {CONFIG} describes has {list(slot.shape)}",
                code="bad-config",
                fix=f"take {CONFIG} and the weights from one and the same revision",
            )
    return slots


def _fill(
    model: Any, source: Source, slots: list[Slot], mesh: Mesh, device: torch.device, check: bool, progress: OnProgress | None
) -> list[bool]:
    """Read all ``slots``; returns which of them are not finite on this rank."""
    stored = {tensor.stored.name: tensor.stored for tensor in source.model.tensors if tensor.stored}
    homes, new = _homes(model), {}
    for target in {id(slot.target.local): slot.target for slot in slots}.values():
        new[target.name] = torch.empty(target.local.shape, dtype=target.local.dtype, device=device)
        _put(homes, target.local, new[target.name])
    with Reader(device) as reader:
        jobs: list[tuple[int, int, Job]] = []
        for number, slot in enumerate(slots):
            own = slot.own(new[slot.target.name])
            jobs += [(number, nbytes, job) for nbytes, job in _jobs(reader, source, stored[slot.stored], slot, own, mesh)]
        told = _Told(sum(nbytes for _, nbytes, _ in jobs), progress if mesh.rank == 0 else None)
        threads = READERS if source.read is None else 1  # whole tensors, one at a time
        bad = run_jobs([job for _, _, job in jobs], check, lambda i: told(jobs[i][1]), threads)
    for buffers in (module._buffers for module in model.modules()):
        buffers.update({leaf: buffer.to(device) for leaf, buffer in buffers.items() if buffer is not None})
    wrong = [False] * len(slots)
    for (number, _, _), is_bad in zip(jobs, bad, strict=True):
        wrong[number] |= is_bad
    return wrong


def _jobs(reader: Reader, source: Source, stored: Stored, slot: Slot, own: Tensor, mesh: Mesh) -> list[tuple[int, Job]]:
    """(bytes, what reads them) for this rank's part of one stored tensor, which goes to ``own``."""
    read = source.read
    if read is None:
        return [(block.nbytes, partial(reader.fill, block)) for block in blocks(stored, slot, own, mesh.tp)]
    return [(own.nbytes, lambda: own.copy_(take(read(stored.name), slot.cut, mesh.tp.size, mesh.tp.rank)))]


class _Told:
    """Progress with the time left."""

    def __init__(self, total: int, progress: OnProgress | None) -> None:
        self.total, self.progress, self.done, self.start = total, progress, 0, time.monotonic()

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            left = (time.monotonic() - self.start) * (self.total - self.done) / self.done
            text = f"loading: {format_size(self.done)} of {format_size(self.total)}, {left:.0f} s left"
            self.progress(self.done / self.total, text)


def _refuse_wrong(mesh: Mesh, slots: list[Slot], wrong: list[bool], source: Source, dtype: torch.dtype) -> None:
    """Raise UsageError on all ranks when one has read what is not finite."""
    found = maximum(mesh, torch.tensor(wrong, dtype=torch.int32))
    names = [slot.stored for slot, bad in zip(slots, found.tolist(), strict=True) if bad]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        beyond = ", or values beyond float16" if dtype == torch.float16 else ""
        raise UsageError(
            f"{names[0]}{more} of {str(source.where)!r} has NaN or Inf{beyond}",
            code="file-unreadable",
            fix="download the file again, or pass check=False to load it as it is",
        )
