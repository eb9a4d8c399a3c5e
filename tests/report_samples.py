"""Synthetic records for the report tests. The numbers are made up from simple formulas; nothing here was measured."""

from __future__ import annotations

from crosscut.bench.fit import summarise
from crosscut.records import Hardware, Row, RunRecord, Times

SPEED = {"single": 1.0, "textbook": 1.6, "nccl": 1.3, "dtensor": 6.0, "crosscut": 0.7, "no_comm": 0.5}
TOKENS = (1, 32, 512, 4096)


def times(p50: float) -> Times:
    return Times(p50 * 0.95, p50, p50 * 1.1, p50 * 1.4)


def layer_rows(mode: str, subject: str = "linear", split: str = "column") -> list[Row]:
    rows = []
    for tokens in TOKENS:
        names = ("in", "out") if subject == "linear" else ("hidden", "ffn")
        shape = {"tokens": tokens, names[0]: 4096, names[1]: 14336}
        base = (12.0 + tokens * 0.11) * (1 if mode == "graph" else 1.5)
        for impl, factor in SPEED.items():
            extra: dict[str, object] = {}
            if impl != "single":
                extra = {"split": split, "speedup": 1 / factor}
                if impl != "no_comm":
                    extra["comm_share"] = min(0.9, factor / 8 + 0.1)
            world = 1 if impl == "single" else 2
            error = None if impl == "no_comm" else 0.0021 * (1 + factor / 50)
            path = "one-shot push" if impl == "crosscut" else None
            us = times(base * factor)
            rows.append(Row(subject, impl, mode, world, "bfloat16", shape, us=us, n=200, error=error, path=path, extra=extra))
        rows.append(
            Row(
                "all_gather" if split == "column" else "all_reduce",
                "nccl",
                mode,
                2,
                "bfloat16",
                bytes=tokens * 14336 * 2,
                us=times(base * 0.6),
                algbw_gbps=tokens * 14336 * 2 / base / 600,
                busbw_gbps=tokens * 14336 / base / 600,
                extra={"shape_of": shape},
            )
        )
    return rows


def training_rows(kept: int = 3 << 20) -> list[Row]:
    """One shape of an MLP with its backward: crosscut hides half of what the plain split takes."""
    shape, extra = {"tokens": 8, "hidden": 8, "ffn": 16}, {"split": "pair", "pass": "forward+backward"}
    own: dict[str, dict[str, object]] = {
        "crosscut": {"hidden_share": 0.5, "saved_bytes": kept},
        "crosscut_sp": {"hidden_share": -0.25, "saved_bytes": kept // 2},
    }
    us = {"single": 30.0, "nccl": 24.0, "crosscut": 20.0, "crosscut_sp": 26.0, "no_comm": 16.0}
    return [
        Row("mlp", impl, "graph", 1 if impl == "single" else 2, "bfloat16", shape, us=times(t), extra=extra | own.get(impl, {}))
        for impl, t in us.items()
    ]


def record(rows: list[Row], **changes: object) -> RunRecord:
    fields: dict[str, object] = {
        "command": "crosscut bench linear --tp 2",
        "config": {"tp": 2, "dtype": "bfloat16", "tokens": list(TOKENS)},
        "hardware": Hardware("NVIDIA H200", 2, [["self", "NV18"], ["NV18", "self"]], "570.86.15"),
        "versions": {"torch": "2.13.0", "cuda": "13.0", "nccl": "2.28.9", "python": "3.11.7", "crosscut": "0.1.0"},
        "rows": rows,
        "commit": "1a2b3c4d5e6f",
        "started": "2026-01-02T03:04:05+00:00",
        "notes": ["crosscut's split pays from 1 token on: 1.43x one device.", "These are synthetic numbers."],
    }
    return RunRecord(**{**fields, **changes})  # type: ignore[arg-type]


def linear_record(**changes: object) -> RunRecord:
    rows = layer_rows("graph") + layer_rows("eager") + layer_rows("graph", "mlp", "pair")
    return record(rows, **changes)


def collectives_record(**changes: object) -> RunRecord:
    rows = []
    for impl, alpha, beta in (("nccl", 11.0, 260.0), ("nccl_symmetric", 8.0, 300.0), ("crosscut", 3.0, 380.0)):
        for power in range(10, 29, 3):
            nbytes = 1 << power
            us = alpha + nbytes / beta / 1e3
            rate = nbytes / us / 1e3
            path = "one-shot: below 256 KiB on 2 ranks" if impl == "crosscut" else None
            rows.append(
                Row("all_reduce", impl, "graph", 2, "bfloat16", bytes=nbytes, us=times(us), n=500, algbw_gbps=rate,
                    busbw_gbps=rate, error=1.7e-3, path=path)
            )  # fmt: skip
    return record(rows, **{"command": "crosscut bench collectives --tp 2", **changes})


def pair_rows(world: int = 4) -> list[Row]:
    """Every ordered pair at two sizes, and every unordered one both ways at once; rank 3's links are slow."""
    rows = []
    for src in range(world):
        for dst in range(world):
            rate = 60.0 if 3 in (src, dst) else 380.0
            for nbytes in (8, 1 << 28):
                us = 6.0 + nbytes / rate / 1e3
                for direction in ("uni", "bi") if src < dst else ("uni",) if src > dst else ():
                    extra = {"src": src, "dst": dst, "direction": direction}
                    measured = {"bytes": nbytes, "us": times(us), "algbw_gbps": nbytes / us / 1e3}
                    rows.append(Row("pair", "nccl", "eager", 2, "float32", **measured, extra=extra))  # type: ignore[arg-type]
    return rows


def ring_row(world: int = 4, nbytes: int = 1 << 20) -> Row:
    """Ring all-reduce: 2(n-1) steps, in each of which every rank sends S/n to the next."""
    part = nbytes // world
    step = [{"src": rank, "dst": (rank + 1) % world, "bytes": part} for rank in range(world)]
    total = 2 * (world - 1) * part
    formula = {"steps": 2 * (world - 1), "bytes_per_rank": float(total), "text": "2(n-1)/n x S"}
    extra = {"op": "all_reduce", "steps": [step] * (2 * (world - 1)), "sent": [total] * world, "received": [total] * world}
    return Row("simulate", "ring", "eager", world, "float32", bytes=nbytes, extra={**extra, "formula": formula})


def bench_record(faster: float = 1.0, **changes: object) -> RunRecord:
    """What ``bench collectives`` leaves: curves in and out of place, conclusions, pairs, and a simulated ring.

    Times are divided by ``faster``. In-place calls and the multicast rows of 8 GPUs are slower and faster by fixed factors.
    """
    rows = []
    for impl, alpha, beta in (("nccl", 11.0, 300.0), ("torch_one_shot", 7.5, 150.0), ("crosscut", 3.0, 200.0)):
        for power in range(10, 31, 2):
            for in_place in (False, True):
                nbytes = 1 << power
                us = (alpha + nbytes / beta / 1e3) * (0.93 if in_place else 1) / faster
                rate = nbytes / us / 1e3
                extra = {"redop": "sum", "in_place": in_place, "wrong": 0, "wire_gbps": rate}
                rows.append(
                    Row("all_reduce", impl, "graph", 2, "bfloat16", bytes=nbytes, us=times(us), n=500, algbw_gbps=rate,
                        busbw_gbps=rate, error=0.0, extra=extra)
                )  # fmt: skip
    links = [["-", "NV18 450 GB/s"], ["NV18 450 GB/s", "-"]]
    rows += [*summarise(rows, "NVIDIA H200", links), *pair_rows(), ring_row()]
    hardware = Hardware("NVIDIA H200", 2, links, "570.86.15")
    return record(rows, **{"command": "crosscut bench collectives --tp 2", "hardware": hardware, **changes})
