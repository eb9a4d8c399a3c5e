"""Loading a checkpoint at tp N beside the time of reading its bytes, and what decoding costs then.

Writes a Llama-shaped checkpoint of random bfloat16 weights (once; by default Llama-3-8B's shape, 16 GB), then measures

  read          the first rank alone reads all files from start to end, 16 MiB at a time, into one buffer
  crosscut      cc.from_pretrained on all ranks: the slowest rank's seconds; each rank's host memory and shard
  transformers  AutoModelForCausalLM.from_pretrained on the first rank alone, onto its device (on CPU
                it maps the files, and reads them when it computes)

cold (the page cache is asked to drop the files; which share of their pages stays is in the record) and warm (read just
before); then generate(), greedy, batch 1: microseconds a token after the first, of crosscut at tp N, of transformers on one
device, and of transformers' own tp_plan="auto" where that runs.

Run: PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/load.py --out benchmarks/results/FILE.json
Small, on CPU ranks: add --hidden 512 --layers 4 --ffn 1408 --heads 8 --kv-heads 4 --vocab 8000 --dir /tmp/small
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import crosscut as cc
from crosscut.bench.context import make_record
from crosscut.bench.timing import slowest
from crosscut.collectives import all_gather, barrier
from crosscut.distributed.mesh import Mesh
from crosscut.errors import CrosscutError, UsageError
from crosscut.models.stream import write_stream
from crosscut.records import Row, Times, now
from crosscut.sharding.describe import describe
from crosscut.sharding.headers import INDEX, find_files
from crosscut.sharding.shapes import parameters
from crosscut.units import format_size

PART = 16 << 20


# ---- the checkpoint


def write_checkpoint(folder: Path, args: argparse.Namespace, device: torch.device) -> None:
    """A Llama of random weights, in files of ``args.shard`` bytes at most; one tensor in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": args.hidden, "vocab_size": args.vocab,
        "num_hidden_layers": args.layers, "num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads,
        "intermediate_size": args.ffn, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    model = describe(folder)
    files: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    room = args.shard
    for name, shape in parameters(model.config, model.family):
        nbytes = torch.Size(shape).numel() * 2
        if files[-1] and nbytes > room:
            files.append([])
            room = args.shard
        files[-1].append((name, torch.bfloat16, shape))
        room -= nbytes
    where = {}
    for number, entries in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_stream(folder / file, sorted(entries), (draw(shape, device) for _, _, shape in sorted(entries)), checksums=False)
        where |= {name: file for name, _, _ in entries}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def draw(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Random values of a size that keeps activations near 1; norms are 1."""
    made = torch.ones if len(shape) == 1 else torch.randn
    return made(shape, device=device, dtype=torch.bfloat16) * shape[-1] ** (-0.5 * (len(shape) > 1))


def check_sizes(folder: Path, args: argparse.Namespace) -> None:
    """Refuse a checkpoint of other sizes than the flags, which the record would give as its own."""
    sizes = {"hidden": "hidden_size", "layers": "num_hidden_layers", "ffn": "intermediate_size", "heads": "num_attention_heads",
             "kv_heads": "num_key_value_heads", "vocab": "vocab_size"}  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    other = [
        f"--{flag.replace('_', '-')} {config.get(key)}" for flag, key in sizes.items() if config.get(key) != vars(args)[flag]
    ]
    if other:
        message = f"{folder} holds a checkpoint of other sizes: {' '.join(other)}"
        raise UsageError(message, code="bad-size", fix="give these sizes, or another --dir")


# ---- the page cache


def drop_cache(files: list[Path]) -> None:
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read_files(files: list[Path]) -> None:
    buffer = bytearray(PART)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cached_share(files: list[Path]) -> float:
    """Which share of the files' pages is in the page cache (mincore(2))."""
    resident = pages = 0
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view:
            count = -(-len(view) // mmap.PAGESIZE)
            flags = (ctypes.c_ubyte * count)()
            start = ctypes.c_char.from_buffer(view)
            failed = ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), flags
            )
            del start
            assert not failed, os.strerror(ctypes.get_errno())
            resident, pages = resident + sum(flag & 1 for flag in flags), pages + count
    return resident / pages


# ---- memory


def host_memory(field: str) -> int:
    """Bytes: VmRSS now, or VmHWM, the most since :func:`forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def forget_peak() -> int:
    """Count VmHWM anew (proc(5), clear_refs), and say what is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return host_memory("VmRSS")


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- measuring


class Bench:
    """One run: the mesh, the checkpoint, and the rows so far."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        self.args, self.mesh = args, mesh
        self.files = sorted(find_files(args.dir))
        self.nbytes = sum(path.stat().st_size for path in self.files)

    def state(self, mode: str) -> float:
        """Bring the page cache into the state ``mode`` (first rank); the share of pages in it, on the first rank."""
        share = 0.0
        if self.mesh.rank == 0:
            (drop_cache if mode == "cold" else read_files)(self.files)
            share = cached_share(self.files)
        barrier(self.mesh.tp)
        return share

    def row(self, impl: str, mode: str, world: int, samples: list[float], shares: list[float], **extra: Any) -> Row:
        times = Times.of(samples)
        rate = self.nbytes / times.p50 / 1e3
        self.say(f"{impl:>14} {mode:>6}  tp {world}  {times.p50 / 1e6:8.3f} s  {rate:6.2f} GB/s  {extra or ''}")
        extra["cached"] = [round(share, 4) for share in shares]
        return Row(
            "load", impl, mode, world, "bfloat16", bytes=self.nbytes, us=times, n=len(samples), algbw_gbps=rate, extra=extra
        )

    def say(self, text: str) -> None:
        if self.mesh.rank == 0:
            print(text, flush=True)

    def loads(self) -> Iterator[Row]:
        cc.from_pretrained(self.args.dir, self.mesh, uneven=True)  # imports, and the device's context
        for mode in ("cold", "warm"):
            yield self._loads("read", mode, lambda: read_files(self.files))
            yield self._split(mode)
            yield self._loads("transformers", mode, lambda: unsplit(self.args.dir, self.mesh.device))

    def _loads(self, impl: str, mode: str, action: Callable[[], Any]) -> Row:
        """What the first rank does alone."""
        samples, shares = [], []
        for _ in range(self.args.samples):
            shares.append(self.state(mode))
            start = time.perf_counter()
            if self.mesh.rank == 0:
                action()
            samples.append((time.perf_counter() - start) * 1e6)
            free(self.mesh.device)
            barrier(self.mesh.tp)
        return self.row(impl, mode, 1, samples, shares)

    def _split(self, mode: str) -> Row:
        samples, shares, tables = [], [], []
        for _ in range(self.args.samples):
            shares.append(self.state(mode))
            before, start = forget_peak(), time.perf_counter()
            barrier(self.mesh.tp)
            model = cc.from_pretrained(self.args.dir, self.mesh, uneven=True)
            samples.append((time.perf_counter() - start) * 1e6)
            own = sum(p.nbytes for p in model.parameters())
            mine = torch.tensor([[host_memory("VmHWM") - before, own]], device=self.mesh.device)
            tables.append(all_gather(mine, self.mesh.tp, 0).cpu())
            del model
            free(self.mesh.device)
        peak, own = torch.stack(tables).amax(0).T.tolist()
        return self.row("crosscut", mode, self.mesh.tp.size, slowest(samples, self.mesh.tp), shares, host_peak=peak, shard=own)

    def decodes(self) -> Iterator[Row]:
        size = self.mesh.tp.size
        yield from self._decode("crosscut", size, cc.from_pretrained(self.args.dir, self.mesh, uneven=True))
        free(self.mesh.device)
        alone = self.mesh.rank == 0
        yield from self._decode("transformers", 1, unsplit(self.args.dir, self.mesh.device) if alone else None)
        free(self.mesh.device)
        if size > 1 and not self.args.no_tp_plan:
            yield from self._tp_plan()

    def _decode(self, impl: str, world: int, model: Any) -> Iterator[Row]:
        """``model`` None: this rank waits."""
        for cache in ("dynamic", "static"):
            yield self._text(impl, world, model, cache)

    def _text(self, impl: str, world: int, model: Any, cache: str) -> Row:
        args, samples, tokens = self.args, [0.0], None
        if model is not None:
            ids = torch.randint(3, args.vocab, (1, args.prompt), generator=torch.Generator().manual_seed(0))
            ids = ids.to(self.mesh.device)
            how = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0}
            how |= {"attention_mask": torch.ones_like(ids)} | ({"cache_implementation": "static"} if cache == "static" else {})
            model.generate(ids, **how), model.generate(ids, **how)  # compiles, then captures
            samples = []
            for _ in range(args.samples):
                ticks = Ticks()
                tokens = model.generate(ids, **how, streamer=ticks)[0, args.prompt :].tolist()
                samples += ticks.intervals()
        barrier(self.mesh.tp)
        if world > 1:
            samples = slowest(samples, self.mesh.tp)
        times = Times.of(samples)
        self.say(f"{impl:>14} {cache:>7}  tp {world}  {times.p50 / 1e3:8.3f} ms a token")
        shape = {"prompt": args.prompt, "tokens": args.tokens, "batch": 1}
        return Row("generate", impl, cache, world, "bfloat16", shape, us=times, n=len(samples), extra={"text": tokens})

    def _tp_plan(self) -> Iterator[Row]:
        size = self.mesh.tp.size
        try:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(self.args.dir, dtype=torch.bfloat16, tp_plan="auto").eval()
            yield from self._decode("transformers tp_plan", size, model)
        except Exception as error:  # whatever it is, the other rows stand
            note = f"did not run: {type(error).__name__}: {error}"[:300]
            self.say(f"transformers tp_plan {note}")
            yield Row("generate", "transformers tp_plan", "eager", size, "bfloat16", note=note)


class Ticks:
    """A streamer of transformers that notes when each token came."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, tokens: Tensor) -> None:
        """The prompt, then each token."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""

    def intervals(self) -> list[float]:
        """Microseconds between tokens, from the second on: the one before that came from the prompt."""
        return [(b - a) * 1e6 for a, b in zip(self.at[2:], self.at[3:], strict=False)]


def unsplit(folder: Path, device: torch.device) -> Any:
    """The model on one device, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device)


def notes(rows: list[Row]) -> list[str]:
    """What the rows say, in words."""
    said = []
    median = {(row.subject, row.impl, row.mode): row.us.p50 for row in rows if row.us is not None}
    for row in rows:
        if row.us is None:
            continue
        if row.subject == "load" and row.impl == "crosscut":
            ratio = row.us.p50 / median["load", "read", row.mode]
            said.append(f"{row.mode}: loading takes {ratio:.2f} x the time of reading the bytes in order")
            over = max(peak - own for peak, own in zip(row.extra["host_peak"], row.extra["shard"], strict=True))
            said.append(
                f"{row.mode}: host peak {format_size(max(row.extra['host_peak']))}, {format_size(over)} above the shard"
            )
        if row.subject == "generate" and row.impl != "crosscut":
            ratio = row.us.p50 / median["generate", "crosscut", row.mode]
            said.append(f"decode, {row.mode}: crosscut is {ratio:.2f} x as fast as {row.impl} (tp {row.world})")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"hidden": 4096, "layers": 32, "ffn": 14336, "heads": 32, "kv-heads": 8, "vocab": 128256}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--shard", type=int, default=5 << 30, help="bytes of one file, at most")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/crosscut-load"), help="made when it is not there, and kept")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--part", default="load,decode", help="load, decode, or both (the default)")
    parser.add_argument("--no-tp-plan", action="store_true", help="leave out transformers' own tensor parallelism")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not set(args.part.split(",")) <= {"load", "decode"}:
        parser.error(f"--part {args.part}: load, decode, or load,decode")
    if args.samples < 1 or args.tokens < 3:
        parser.error("--samples is 1 or more, --tokens 3 or more: the first two are not timed")
    os.environ.setdefault("CROSSCUT_TIMEOUT", "1800")  # the others wait while the first rank writes, or loads alone
    mesh, started = cc.init_mesh(), now()
    if mesh.rank == 0 and not (args.dir / INDEX).is_file():
        print(f"writing {args.dir} ...", flush=True)
        write_checkpoint(args.dir, args, mesh.device)
    barrier(mesh.tp)
    check_sizes(args.dir, args)
    bench = Bench(args, mesh)
    bench.say(f"{format_size(bench.nbytes)} in {len(bench.files)} files")
    with torch.no_grad():
        rows = [row for part in args.part.split(",") for row in {"load": bench.loads, "decode": bench.decodes}[part]()]
    found = notes(rows)
    bench.say("\n".join(found))
    config = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items() if key != "out"}
    record = make_record("benchmarks/load.py", config, mesh, rows, started, found)
    if args.out and mesh.rank == 0:
        record.write(args.out)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (CrosscutError, OSError) as error:
        sys.exit(f"error: {error}")
