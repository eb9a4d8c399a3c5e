"""What the ranks of tests/processes/test_load_smollm2.py do, each a process of its own, so that its memory can be counted."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import crosscut as cc
import zoo
from crosscut.collectives import all_gather
from crosscut.distributed.join import RankContext
from crosscut.distributed.mesh import Mesh, make_mesh


@dataclass(frozen=True)
class Loaded:
    """``took``: of each rank, the host memory in bytes that a way of loading took at most. ``own``: the bytes of its shard."""

    text: Tensor
    streamed: list[int]
    plain: list[int]
    own: list[int]


def load(ctx: RankContext, where: Path, saved: Path, ids: Tensor, new_tokens: int) -> Loaded:
    """Load ``where`` by ``cc.from_pretrained``, write text and save it; then load it whole on each rank, and split that."""
    mesh = make_mesh(device=ctx.device)
    cc.parallelize(zoo.model("llama-6q3kv"), mesh)  # what is imported is imported now
    model, streamed = measured(lambda: cc.from_pretrained(where, mesh, uneven=True))
    text = model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    cc.save_pretrained(model, saved, mesh)
    own = sum(p.nbytes for p in model.parameters())
    del model
    _, plain = measured(lambda: cc.parallelize(AutoModelForCausalLM.from_pretrained(where), mesh))
    rows = all_gather(torch.tensor([[streamed, plain, own]]), mesh.tp, 0).T.tolist()
    return Loaded(text, *rows)


def measured(action: Callable[[], Any]) -> tuple[Any, int]:
    """What ``action`` gives, and the bytes by which it raised this process's memory at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free would be used again and not be counted
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is counted anew from here (proc(5))
    before = memory("VmRSS")
    return action(), memory("VmHWM") - before


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


def gguf_differs(ctx: RankContext, gguf: Path, directory: Path) -> list[str]:
    """What is not equal in the split models of a GGUF file and of what it was converted to."""
    mesh = make_mesh(device=ctx.device)

    def parameters(where: Path, mesh: Mesh) -> dict[str, Tensor]:
        return dict(cc.from_pretrained(where, mesh, uneven=True).named_parameters())

    one, other = parameters(gguf, mesh), parameters(directory, mesh)
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
