"""The errors a user meets, each with a stable code that ``docs/errors.md`` explains.

::

    CrosscutError
    |-- UsageError (ValueError)        what the user can mend: given, allowed, what to do      exit code 2
    |-- RankError (RuntimeError)       a rank failed, died or did not answer                   exit code 1
    |   `-- CollectiveTimeout          a wait ran past its deadline                            exit code 1
    `-- MismatchError (RuntimeError)   a result differs from its reference                     exit code 1

``assert`` is for the program's own invariants and never for a user's mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CODES: dict[str, str] = {
    "tp-exceeds-gpus": "more ranks asked for than there are GPUs on this host",
    "tp-mismatch": "the world that was joined cannot be divided into groups of the size asked for",
    "bad-shape": "a shape that cannot be read or cannot work",
    "bad-dtype": "a dtype that is unknown, or that the device or backend cannot do",
    "bad-device": "a tensor on another GPU than the one that its rank works on",
    "bad-option": "an option whose value is not one of the allowed ones",
    "bad-env": "an environment variable whose name or value is wrong",
    "bad-size": "a layer size, axis or dim that cannot work",
    "file-missing": "a file or directory that is not there",
    "file-unreadable": "a file that is there and cannot be understood",
    "bad-config": "a config.json that lacks something, or contradicts itself or the weights",
    "unknown-model": "a model of a family that crosscut has no table for, or cannot split",
    "parameter-missing": "a parameter name that the checkpoint does not hold",
    "extra-missing": "an optional library that this command needs is not installed",
    "port-in-use": "the rendezvous port is taken by another program",
    "no-backend": "a communication backend that cannot run here",
    "rank-failed": "a rank raised an error",
    "rank-died": "a rank was killed or exited without a word",
    "rank-timeout": "a rank did not answer before the deadline",
    "interrupted": "the run was ended by Ctrl-C or SIGTERM",
    "result-differs": "the split result is not equal to the unsplit one",
}


class CrosscutError(Exception):
    """Base of all errors raised on purpose. ``code`` is one of :data:`CODES` and never changes its meaning."""

    exit_code = 1

    def __init__(self, message: str, *, code: str, fix: str | None = None) -> None:
        assert code in CODES, f"unknown error code {code!r}"
        self.code = code
        self.message = message
        self.fix = fix
        super().__init__(message if fix is None else f"{message}\n  what to do: {fix}")

    def __reduce__(self) -> tuple[object, ...]:  # crosses process borders whole
        return _rebuild, (type(self), self.message, self.code, self.fix)


def _rebuild(cls: type[CrosscutError], message: str, code: str, fix: str | None) -> CrosscutError:
    return cls(message, code=code, fix=fix)


class UsageError(CrosscutError, ValueError):
    """Something the user can mend: says what was given, what is allowed and what to do."""

    exit_code = 2


class RankError(CrosscutError, RuntimeError):
    """A rank failed. The message names the rank and carries that rank's own words."""


class CollectiveTimeout(RankError):
    """A wait ran past its deadline; names the group, the operation and the ranks that did not arrive."""


class MismatchError(CrosscutError, RuntimeError):
    """A result differs from its reference by more than rounding explains."""


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' when one of ``known`` is close to ``word``, else the empty string."""
    match = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def choose(what: str, given: str, allowed: Iterable[str], *, code: str = "bad-option") -> str:
    """Return ``given`` if it is one of ``allowed``; otherwise raise :class:`UsageError` naming them all."""
    names = list(allowed)
    if given in names:
        return given
    raise UsageError(
        f"{what} {given!r} is not known{nearest(given, names)}",
        code=code,
        fix=f"use one of: {', '.join(names)}",
    )
