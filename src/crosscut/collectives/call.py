"""How a collective runs: planned by a pure function, issued here, for every collective alike.

A collective is a function that checks its arguments and returns a :class:`Plan`; the decorator :func:`collective` makes
of it an object with two ways to run: ``all_reduce(x, group)`` returns the result, ``all_reduce.start(x, group)`` returns
a :class:`Pending` whose ``wait()`` does, so that other work can run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from crosscut.collectives.checks import checked_place
from crosscut.collectives.fast import aside
from crosscut.distributed.mesh import Group

P = ParamSpec("P")


@dataclass(slots=True)
class Plan:
    """One collective, ready to be issued.

    ``issue(send, receive, async_op)`` hands contiguous buffers to the library and returns its work handle; ``receive``
    is ``send`` itself when ``target`` is None (in place). ``kernels(send, group, out=receive)`` hands them to our kernels
    instead and returns ``receive``, or None where those do not serve. ``finish`` shapes the result when the work is done.
    ``issue`` None: nothing travels.
    """

    group: Group
    source: Tensor
    finish: Callable[[], Tensor]
    issue: Callable[[Tensor, Tensor, bool], dist.Work | None] | None = None
    target: Tensor | None = None
    detail: str = ""
    kernels: Callable[..., Tensor | None] | None = None


class Work(Protocol):
    """What can be waited for: NCCL's, gloo's or the kernels' handle of a call under way."""

    def wait(self) -> Any:
        """Let the current stream (or, without one, the caller) go on after the call."""


class Pending:
    """A collective under way. ``wait()`` makes the result safe to use on the current stream and returns it, once or often."""

    __slots__ = ("_finish", "_keep", "_result", "_work")

    def __init__(self, work: Work | None, finish: Callable[[], Tensor], keep: tuple[Tensor, ...]) -> None:
        self._work = work
        self._finish: Callable[[], Tensor] | None = finish
        self._keep = keep  # buffers that must outlive the operation
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the operation and return its result. Raises what the library raises when a peer failed."""
        if self._finish is not None:
            if self._work is not None:
                self._work.wait()
            self._result = self._finish()
            self._finish, self._work, self._keep = None, None, ()
        assert self._result is not None
        return self._result


class Collective(Generic[P]):
    """A collective operation: call it for the result, or ``start`` it for a :class:`Pending`.

    ``fast``, the kernels on a tensor as it lies, is tried first: it gives the result, or None to leave the operation to the
    plan, which lays uneven and scattered tensors out first and goes by the kernels, NCCL or gloo then. ``traced`` is what a
    call is while ``torch.compile`` traces it (compiled.py); None where the operation cannot be traced.
    """

    def __init__(
        self,
        plan: Callable[Concatenate[Tensor, Group, P], Plan],
        fast: Callable[Concatenate[Tensor, Group, P], Tensor | None] | None = None,
        traced: Callable[Concatenate[Tensor, Group, P], Tensor] | None = None,
    ) -> None:
        self._plan, self._fast, self._traced = plan, fast, traced
        self.__name__ = plan.__name__
        self.__doc__ = plan.__doc__

    def __call__(self, x: Tensor, group: Group, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if is_dynamo_compiling() and self._traced is not None:
            return self._traced(x, group, *args, **kwargs)
        if group.observer is not None:
            return self._observed(x, group, *args, **kwargs)
        result = None if self._fast is None else self._fast(x, group, *args, **kwargs)
        return _issue(self._plan(x, group, *args, **kwargs), False).wait() if result is None else result

    def start(self, x: Tensor, group: Group, *args: P.args, **kwargs: P.kwargs) -> Pending:
        """Issue the operation and return at once. Other work may run meanwhile; ``x`` and ``out`` must be left alone.

        Where the kernels carry the call, they do it on a stream of the group's own; else NCCL or gloo do.
        """
        if is_dynamo_compiling() and self._traced is not None:
            result = self._traced(x, group, *args, **kwargs)
            return Pending(None, lambda: result, ())
        plan = None if group.observer is None else self._plan(x, group, *args, **kwargs)
        token = 0 if plan is None else self._begin(plan)
        begun = None if self._fast is None else aside(self._fast, x, group, args, kwargs)
        if begun is None:
            pending = _issue(plan or self._plan(x, group, *args, **kwargs), True)
        else:
            pending = _pending(*begun)
        if plan is not None:
            self._end(plan, token)
        return pending

    def _observed(self, x: Tensor, group: Group, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        plan = self._plan(x, group, *args, **kwargs)
        token = self._begin(plan)
        result = None if self._fast is None else self._fast(x, group, *args, **kwargs)
        if result is None:
            result = _issue(plan, False).wait()
        self._end(plan, token)
        return result

    def _begin(self, plan: Plan) -> int:
        observer, source = plan.group.observer, plan.source
        if observer is None or plan.issue is None:
            return 0
        return observer.begin(self.__name__, plan.group.axis, tuple(source.shape), str(source.dtype), plan.detail)

    def _end(self, plan: Plan, token: int) -> None:
        if plan.group.observer is not None and plan.issue is not None:
            plan.group.observer.end(token)


def collective(
    fast: Callable[Concatenate[Tensor, Group, P], Tensor | None], traced: Callable[Concatenate[Tensor, Group, P], Tensor]
) -> Callable[[Callable[Concatenate[Tensor, Group, P], Plan]], Collective[P]]:
    """Decorator: a function that returns a :class:`Plan` becomes a :class:`Collective` with the same arguments."""
    return lambda plan: Collective(plan, fast, traced)


def plain_collective(plan: Callable[Concatenate[Tensor, Group, P], Plan]) -> Collective[P]:
    """As :func:`collective`, for an operation that has no fast way and that ``torch.compile`` does not trace."""
    return Collective(plan)


def _pending(result: Tensor, work: Work) -> Pending:
    return Pending(work, lambda: result, ())


def _issue(plan: Plan, async_op: bool) -> Pending:
    if plan.issue is None:
        return Pending(None, plan.finish, ())
    source, target, finish = plan.source, plan.target, plan.finish
    send, receive = source, source if target is None else target
    checked_place(source, plan.group)
    if plan.kernels is not None:
        if not async_op:
            if plan.kernels(send, plan.group, out=receive) is not None:
                return Pending(None, finish, ())
        elif (begun := aside(plan.kernels, send, plan.group, (), {"out": receive})) is not None:
            return Pending(begun[1], finish, ())
    if plan.group.backend == "gloo" and source.device.type != "cpu":  # gloo's ranks meet in host memory
        send, receive, finish = _through_host(source, target, finish)
    return Pending(plan.issue(send, receive, async_op), finish, (send, receive))


def _through_host(
    source: Tensor, target: Tensor | None, finish: Callable[[], Tensor]
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    send = source.to("cpu")
    receive = send if target is None else torch.empty_like(target, device="cpu")
    landing = source if target is None else target

    def landed() -> Tensor:
        landing.copy_(receive)
        return finish()

    return send, receive, landed
