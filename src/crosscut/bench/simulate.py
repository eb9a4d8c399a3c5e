"""``crosscut bench collectives --simulate``: an algorithm run over send and receive on CPU ranks, its messages counted.

The ranks run the plan of :mod:`crosscut.bench.schedules` with real data. Each counts the bytes that it really sent and
received in each step; the record holds these counts, next to the formula, and whether the result is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from crosscut.bench.context import make_record
from crosscut.bench.schedules import ELEMENT, Message, Steps, check, chunk_edges, formula, schedule
from crosscut.collectives import Pending, all_gather, recv, send
from crosscut.distributed.join import RankContext
from crosscut.distributed.mesh import Group, make_mesh
from crosscut.errors import UsageError
from crosscut.records import Row, RunRecord, now
from crosscut.units import format_size

MOST_BYTES = 2 << 30
"""All ranks live in this host's memory, each with a few copies of the tensor."""
MOST_RANKS = 64


@dataclass(frozen=True)
class SimulateConfig:
    """What to run. ``nbytes``: of the whole tensor, float32 (the gathered one of all_gather, the input of reduce_scatter)."""

    algorithm: str
    op: str
    world: int
    nbytes: int


def refuse(config: SimulateConfig) -> None:
    """Raise UsageError (``bad-option``, ``bad-size``) on a config that cannot work; to be called before ranks are started."""
    check(config.algorithm, config.op, config.world, config.nbytes)
    if config.world > MOST_RANKS:
        raise UsageError(
            f"a simulation over {config.world} ranks, each a process of this host",
            code="bad-size",
            fix=f"give at most {MOST_RANKS} ranks: the counts follow the same formula beyond",
        )
    if config.world * config.nbytes > MOST_BYTES:
        raise UsageError(
            f"{format_size(config.nbytes)} on each of {config.world} ranks of one host",
            code="bad-size",
            fix=f"give at most {format_size(MOST_BYTES // config.world)}: the counts follow the same formula beyond",
        )


def simulate(ctx: RankContext, config: SimulateConfig, steps: Steps | None = None) -> RunRecord:
    """Run the plan on the ranks of ``ctx`` (``steps``: another plan than that of ``config``) and return what was counted.

    The row's ``extra``: ``op``; ``steps``, for each step the messages that were sent; ``sent`` and ``received``, bytes of
    each rank; ``formula``; ``wrong``, how many elements differ over all ranks, and ``first_wrong``, the first of them.
    Raises UsageError as :func:`refuse`.
    """
    refuse(config)
    mesh, started = make_mesh(tp=config.world, device=torch.device("cpu")), now()
    group = mesh.tp
    plan = schedule(config.algorithm, config.op, config.world, config.nbytes) if steps is None else steps
    ctx.progress(0.0, f"{config.algorithm} {config.op}, {len(plan)} steps")
    with torch.no_grad():
        buffer = inputs(config, group.rank)
        own_sent, own_received = run_plan(plan, buffer, group, chunk_edges(config.world, config.nbytes))
        sent, received = all_gather(own_sent[None], group), all_gather(own_received[None], group)
        row = _row(config, sent, received, wrong_elements(config, buffer, group))
    settled = asdict(config) | {"simulate": config.algorithm, "backend": ctx.backend, "correct": row.error == 0}
    return make_record("bench collectives", settled, mesh, [row], started, sentences(row))


def inputs(config: SimulateConfig, rank: int) -> Tensor:
    """The buffer ``[elements]`` of one rank before the first step, NaN where it holds nothing yet."""
    own, edges = values(config, rank), chunk_edges(config.world, config.nbytes)
    held = {"broadcast": slice(0, edges[-1] if rank == 0 else 0), "all_gather": slice(edges[rank], edges[rank + 1])}
    buffer = torch.full_like(own, float("nan"))
    part = held.get(config.op, slice(0, edges[-1]))
    buffer[part] = own[part]
    return buffer


def values(config: SimulateConfig, rank: int) -> Tensor:
    """What rank ``rank`` contributes, ``[elements]``: whole numbers from 1 to 251, so that any sum of them is exact.

    The same place of two ranks, and neighbouring places, differ, and a sum that lacks a rank shows everywhere.
    """
    index = torch.arange(config.nbytes // ELEMENT, dtype=torch.int64)
    return ((index + index // 251 + 7 * rank) % 251 + 1).to(torch.float32)


def expected(config: SimulateConfig, rank: int) -> tuple[slice, Tensor]:
    """(the part of its buffer that rank ``rank`` must hold at the end, its values)."""
    edges = chunk_edges(config.world, config.nbytes)
    whole = slice(0, edges[-1])
    if config.op == "broadcast":
        return whole, values(config, 0)
    if config.op == "all_gather":
        return whole, torch.cat([values(config, r)[edges[r] : edges[r + 1]] for r in range(config.world)])
    part = {"reduce": slice(0, edges[-1] if rank == 0 else 0), "reduce_scatter": slice(edges[rank], edges[rank + 1])}.get(
        config.op, whole
    )
    return part, sum((values(config, r)[part] for r in range(1, config.world)), values(config, 0)[part])


def run_plan(steps: Steps, buffer: Tensor, group: Group, edges: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Take this rank's part in ``steps``, changing ``buffer [elements]``; bytes sent, and received, ``[step, peer]``."""
    sent, received = torch.zeros(2, len(steps), group.size, dtype=torch.int64)
    for number, step in enumerate(steps):
        leaving = [message for message in step if message.src == group.rank]
        coming = [message for message in step if message.dst == group.rank]
        pending = list[Pending]()
        for message in leaving:  # a copy: what was held when the step began, whatever arrives meanwhile
            payload = buffer[_place(message, edges)].clone()
            pending.append(send.start(payload, group, message.dst, tag=number))
            sent[number, message.dst] += payload.nbytes
        landings = [torch.empty_like(buffer[_place(message, edges)]) for message in coming]
        for message, landing in zip(coming, landings, strict=True):
            pending.append(recv.start(landing, group, message.src, tag=number))
        for one in pending:
            one.wait()
        for message, landing in zip(coming, landings, strict=True):
            place = _place(message, edges)
            buffer[place] = buffer[place] + landing if message.reduce else landing
            received[number, message.src] += landing.nbytes
    return sent, received


def _place(message: Message, edges: Sequence[int]) -> slice:
    return slice(edges[message.first], edges[message.end])


def wrong_elements(config: SimulateConfig, buffer: Tensor, group: Group) -> list[tuple[int, float, float, float]]:
    """For each rank: how many of its elements are wrong, and of the first one: index, got, expected."""
    part, right = expected(config, group.rank)
    places = (buffer[part] != right).nonzero().flatten()
    found = [0.0, 0.0, 0.0, 0.0]
    if len(places):
        first = int(places[0])
        found = [len(places), part.start + first, float(buffer[part][first]), float(right[first])]
    everyone: list[tuple[int, float, float, float]] = all_gather(torch.tensor([found], dtype=torch.float64), group).tolist()
    return everyone


def _row(config: SimulateConfig, sent: Tensor, received: Tensor, wrong: list[tuple[int, float, float, float]]) -> Row:
    """``sent [sender, step, receiver]`` and ``received [receiver, step, sender]`` in bytes."""
    steps = [
        [{"src": src, "dst": dst, "bytes": int(step[src, dst])} for src, dst in step.nonzero().tolist()]
        for step in sent.transpose(0, 1)
    ]
    text = formula(config.algorithm, config.op, config.world, config.nbytes)
    extra = {
        "op": config.op,
        "steps": steps,
        "sent": sent.sum((1, 2)).tolist(),
        "received": received.sum((1, 2)).tolist(),
        "formula": asdict(text),
        "wrong": int(sum(count for count, *_ in wrong)),
    }
    first = next(((rank, found) for rank, found in enumerate(wrong) if found[0]), None)
    if first is not None:
        rank, (_, index, got, right) = first
        extra["first_wrong"] = {"rank": rank, "index": int(index), "got": got, "expected": right}
    return Row(
        subject="simulate",
        impl=config.algorithm,
        mode="host",
        world=config.world,
        dtype="float32",
        bytes=config.nbytes,
        error=0.0 if first is None else float("inf"),
        extra=extra,
    )


def sentences(row: Row) -> list[str]:
    """What was counted next to the formula, whether they agree, and whether the result is right."""
    assert row.bytes is not None, "a simulation has a size"
    extra, theory = row.extra, row.extra["formula"]
    steps, most = len(extra["steps"]), max(extra["sent"])
    senders = Counter(message["src"] for step in extra["steps"] for message in step)
    # the chunks of an uneven tensor differ by one element: so may each message of a rank
    slack = ELEMENT * max(senders.values(), default=0)
    agrees = steps == theory["steps"] and abs(most - theory["bytes_per_rank"]) <= slack
    notes = [
        f"{row.impl} {extra['op']} of {format_size(row.bytes)} over {row.world} ranks: {_count(steps, 'step')} and "
        f"{_count(sum(senders.values()), 'message')} were counted; the busiest rank sent {format_size(most)}.",
        f"The formula says {_count(theory['steps'], 'step')} and {theory['text']} = {format_size(theory['bytes_per_rank'])} "
        f"for the busiest rank: {'it agrees' if agrees else 'IT DOES NOT AGREE'}.",
    ]
    if "first_wrong" in extra:
        first = extra["first_wrong"]
        notes.append(
            f"WRONG: {extra['wrong']} elements differ, the first on rank {first['rank']} at index {first['index']}: "
            f"{first['got']:g} instead of {first['expected']:g}."
        )
    else:
        notes.append("Every element of the result is right, on every rank.")
    return notes


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
