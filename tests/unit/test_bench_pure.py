"""What bench does without ranks: reading shapes, judging rows, sampling rules."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crosscut.bench.block import BlockConfig
from crosscut.bench.layers import _relative_errors, with_gains
from crosscut.bench.shapes import Shape, parse_counts, parse_dtype, parse_list, parse_shape, parse_sizes
from crosscut.bench.timing import copies
from crosscut.bench.verdict import allowed_error, kept, label, noisy, pays_from, speedup, wrong_results
from crosscut.cli.main import main
from crosscut.distributed.rank_main import out_of_memory
from crosscut.errors import UsageError
from crosscut.records import Row, Times
from crosscut.units import ROUNDOFF


def row(impl: str, tokens: int, us: float, error: float | None = 1e-7, mode: str = "eager", spread: float = 1.0) -> Row:
    times = Times(us, us, us * spread, us * spread)
    shape = {"tokens": tokens, "in": 8, "out": 8}
    return Row("linear", impl, mode, 1 if impl == "single" else 2, "float32", shape, us=times, error=error)


def test_shapes_are_read() -> None:
    assert parse_shape("32x4096->8192") == Shape(False, (32, 4096, 8192))
    assert parse_shape(" 1 x 4096 -> 14336 -> 4096 ") == Shape(True, (1, 4096, 14336))


@pytest.mark.parametrize("text", ["", "32x4096", "32*4096->8192", "0x4->4", "1x4->8->5", "1x4->8->4->8", "-1x4->8"])
def test_shape_typos_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shape(text)
    assert caught.value.code == "bad-shape"
    assert caught.value.fix


def test_mlp_sizes_are_read_and_typos_refused() -> None:
    assert parse_sizes(" 32 x 4096x14336") == (32, 4096, 14336)
    for text, words in (("32x4096", "cannot be read"), ("32x4096->14336", "cannot be read"), ("0x4x8", "has a size of 0")):
        with pytest.raises(UsageError, match=words):
            parse_sizes(text)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("mlp --shape 32x4096", "the shape '32x4096' cannot be read"),
        ("mlp --activation swish", "activation 'swish' is not known"),
        ("mlp --against ncll", "did you mean 'nccl'"),
        ("mlp --dtype bf17", "dtype 'bf17' is not known"),
        ("block --tokens 1,x", "--tokens '1,x' is not a list of numbers"),
        ("block --limit 1G", "only --memory takes --limit"),
        ("block --no-sequence-parallel --layers 3", "only --memory takes --no-sequence-parallel, --layers"),
        ("block --memory --seconds 1 --no-backward", "it takes no --no-backward, --seconds"),
        ("linear --inputs hidden --tokens 4 --text x", "only --from takes --inputs, --text, --tokens"),
        ("linear --from d:w --shape 1x4->4", "--from takes the layer from a checkpoint, and no --shape"),
        ("linear --shape 1x4->99999999999", "has a size of 99999999999"),
        ("linear --seed -1", "--seed"),
        ("linear --tp 1 --device cpu --seconds 0.01 --shape 1x16777216->16777216", "does not fit into the memory of rank 0"),
        ("collectives --simulate ring --redop max --pairs", "takes no --redop, --pairs"),
        ("collectives --world 3", "only --simulate takes --world"),
        ("collectives -b 8 -e 1G -f 1.0001", "-f 1.0001 makes more than 1000 sizes from 8 B to 1 GiB"),
        ("collectives --csv /proc/rows.csv", "'/proc/rows.csv' cannot be written"),
        ("collectives --csv /tmp/same --out /tmp/../tmp/same", "--csv and --out are both"),
        ("block --memory --ffn 64", "it takes no --ffn"),
        ("block --memory --limit big", "'big' is not a size"),
        (
            "block --tp 1 --device cpu --hidden 30 --heads 4",
            "a block of hidden 30 with 4 heads and 1 KV heads does not work out",
        ),
    ],
)
def test_bad_flags_get_one_message(
    args: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # main sets it: undone after the test
    monkeypatch.setattr(sys, "argv", ["crosscut", "bench", *args.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert words in told
    assert "what to do:" in told or "Invalid value" in told
    assert "Traceback" not in told


def test_dtypes_and_lists() -> None:
    assert [parse_dtype(name) for name in ("bf16", "FP32", "float64", "auto")] == ["bfloat16", "float32", "float64", "auto"]
    assert parse_list("eager, graph,eager", "mode", ("eager", "graph")) == ("eager", "graph")
    assert parse_counts("1,32,1", "--tokens") == (1, 32)
    for bad in ("bf17", ""):
        with pytest.raises(UsageError, match="dtype"):
            parse_dtype(bad)
    with pytest.raises(UsageError, match="did you mean 'graph'"):
        parse_list("eager,grpah", "mode", ("eager", "graph"))
    for bad in ("1,x", "0", "", "-4"):
        with pytest.raises(UsageError, match="--tokens"):
            parse_counts(bad, "--tokens")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_rounding_is_torchs_eps_halved(dtype: str) -> None:
    assert ROUNDOFF[dtype] == torch.finfo(getattr(torch, dtype)).eps / 2


def test_verdict_names_the_break_even_size() -> None:
    rows = [row("single", 1, 10), row("crosscut", 1, 20), row("single", 8, 100), row("crosscut", 8, 60)]
    assert speedup(rows[3], rows) == pytest.approx(100 / 60)
    sentence = pays_from("crosscut", "eager", rows)
    assert "pays from 8 x 8 -> 8 on" in sentence
    assert "100 us" in sentence
    assert "best 1.67x" in sentence
    assert "0.50x" in sentence


def test_verdict_when_it_never_or_always_or_oddly_pays() -> None:
    never = [row("single", 1, 10), row("crosscut", 1, 20)]
    always = [row("single", 1, 10), row("crosscut", 1, 5)]
    oddly = [*always, row("single", 8, 100), row("crosscut", 8, 200)]
    assert "does not pay at any size measured (best 0.50x" in pays_from("crosscut", "eager", never)
    assert "pays at every size measured (best 2.00x" in pays_from("crosscut", "eager", always)
    assert "at some sizes only, and not at the largest: 1 x 8 -> 8" in pays_from("crosscut", "eager", oddly)
    assert "not measured in graph mode" in pays_from("crosscut", "graph", always)


def test_the_two_passes_are_judged_apart() -> None:
    def both(row: Row) -> Row:
        return replace(row, extra={"pass": "forward+backward"})

    rows = [row("single", 1, 10), row("crosscut", 1, 20), both(row("single", 1, 30, 1e-7)), both(row("crosscut", 1, 15, 0.3))]
    assert speedup(rows[3], rows) == 2
    assert "does not pay at any size measured (best 0.50x" in pays_from("crosscut", "eager", rows)
    sentence = pays_from("crosscut", "eager", rows, "forward+backward")
    assert sentence.startswith(
        "In eager mode, forward and backward, the crosscut split pays at every size measured (best 2.00x"
    )
    (wrong,) = wrong_results(rows)
    assert wrong.startswith("crosscut (eager, with backward) at 1 x 8 -> 8: relative error 0.3")


def test_what_is_hidden_is_counted_from_the_floor_to_the_plain_split() -> None:
    rows = [row("single", 1, 10), row("gloo", 1, 9), row("crosscut", 1, 6), row("crosscut_sp", 1, 10), row("no_comm", 1, 5)]
    shares = {r.impl: r.extra.get("hidden_share") for r in with_gains(rows, "gloo")}
    assert shares == {"single": None, "gloo": None, "crosscut": 0.75, "crosscut_sp": -0.25, "no_comm": None}
    assert [r.extra.get("comm_share") for r in rows] == [None, 0.4444, 0.1667, 0.5, None]
    assert [r.extra.get("speedup") for r in rows] == [None, 1.1111, 1.6667, 1.0, 2.0]
    lucky = [row("single", 1, 10), row("gloo", 1, 5), row("crosscut", 1, 6), row("no_comm", 1, 5)]
    assert "hidden_share" not in with_gains(lucky, "gloo")[2].extra, "nothing to hide"
    assert "hidden_share" not in with_gains([*rows[:1], row("crosscut", 1, 6), row("no_comm", 1, 5)], "gloo")[1].extra


def test_what_is_kept_is_told_once_for_a_shape() -> None:
    modes = [(impl, mode, 4096 // n) for mode in ("graph", "eager") for impl, n in (("crosscut", 1), ("crosscut_sp", 2))]
    rows = [replace(row(impl, 8, 10, mode=mode), extra={"saved_bytes": nbytes}) for impl, mode, nbytes in modes]
    assert kept(rows) == ["8 x 8 -> 8: a rank keeps 4 KiB for the backward, with sequence parallelism 2 KiB."]
    assert kept([row("crosscut", 8, 10), row("crosscut_sp", 8, 10)]) == []


def test_a_wrong_result_is_named_and_a_rounded_one_is_not() -> None:
    right = [row("single", 1, 10, 3e-7), row("crosscut", 1, 20, 4e-7), row("no_comm", 1, 5, None)]
    assert wrong_results(right) == []
    for bad in (0.3, float("inf"), float("nan")):
        (sentence,) = wrong_results([*right, row("nccl", 1, 20, bad)])
        assert sentence.startswith("nccl (eager) at 1 x 8 -> 8: relative error")
    assert allowed_error("bfloat16", 0.0, 8) < 0.05


def test_a_noisy_run_is_called_noisy() -> None:
    assert noisy([row("single", 1, 10)] * 5) is None
    assert noisy([row("single", 1, 10)] * 5 + [row("gloo", 1, 10, spread=2.5)] * 5) is None
    assert noisy([row("gloo", 1, 10, spread=2.5)] * 5) is not None
    sentence = noisy([row("single", 1, 10)] * 3 + [row("no_comm", 1, 10, spread=2.5)] * 2)
    assert sentence is not None
    assert "2 of 5 cases" in sentence


def test_nothing_is_off_in_an_empty_shard_or_a_gradient_of_zero() -> None:
    empty, zero, ones = torch.ones(0, 4), torch.zeros(3), torch.ones(3)
    pairs = [(empty, empty), (zero, zero), (ones, zero), (ones, 2 * ones), (ones * torch.nan, ones), (ones * torch.nan, zero)]
    errors = [next(_relative_errors([(got,)], [expected.double()])) for got, expected in pairs]
    assert errors == [0.0, 0.0, float("inf"), 0.5, float("inf"), float("inf")]


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    for size in (1 << 24, 1 << 31):
        with pytest.raises(RuntimeError) as caught:
            torch.empty(size, size)
        assert out_of_memory(caught.value)
    assert not out_of_memory(RuntimeError("shapes do not fit"))


def test_a_block_with_fewer_heads_than_ranks_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="2 heads cannot be dealt to 4 ranks"):
        BlockConfig(tp=4, hidden=64, heads=2).sizes(torch.device("cpu"))


def test_a_full_disk_is_told_in_one_message() -> None:
    run = subprocess.run(
        f"{sys.executable} -c 'from crosscut.cli.main import main; main()' --version > /dev/full",
        shell=True, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 2
    assert run.stderr.splitlines() == [
        "error: the output cannot be written: No space left on device [bad-option]",
        "what to do: make room for it",
    ]


def test_ctrl_c_ends_every_command_alike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.setattr(sys, "argv", ["crosscut", "report", "a.json"])
    monkeypatch.setattr("crosscut.report.html.write", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (1, "error: the run was ended by SIGINT [interrupted]\n")


@pytest.mark.parametrize("loading", ["typer", "numpy"])
def test_ctrl_c_while_a_command_loads_is_told_too(loading: str, tmp_path: Path) -> None:
    once = "import os, signal\nos.rename(__file__, __file__ + '.gone')\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / f"{loading}.py").write_text(once)
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's background job ignores it
    code = f"{heard}; import sys; sys.path.insert(0, {str(tmp_path)!r}); from crosscut.cli.main import main; main()"
    command = [sys.executable, "-c", code, "bench", "linear", "--tp", "1", "--shape", "1x4->4", "--seconds", "0.01"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (1, "error: the run was ended by SIGINT [interrupted]\n")


def test_closed_streams_and_an_ascii_terminal_end_nothing() -> None:
    code = (
        "import os; from crosscut.cli.main import _ready_streams; _ready_streams()\n"
        "os._exit(not all(map(os.get_inheritable, range(3))))"
    )
    run = subprocess.run(f'{sys.executable} -c "{code}" <&- >&- 2>&-', shell=True, check=False, timeout=60)
    assert run.returncode == 0
    code = "from crosscut.cli.main import _ready_streams; _ready_streams(); print(chr(0x2013), chr(0xdcff))"
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, env=ascii_only, timeout=60)
    assert run.stdout == b"\\u2013 \\udcff\n", run.stderr


def test_labels() -> None:
    assert label({"tokens": 1, "hidden": 4, "ffn": 16}) == "1 x 4 -> 16 -> 4"
    block = {"tokens": 8, "hidden": 4, "heads": 2, "kv_heads": 1, "ffn": 16}
    assert label(block) == "8 x 4 (2/1 heads, ffn 16)"
    assert label({"batch": 3, **block}) == "3 x 8 x 4 (2/1 heads, ffn 16)"


def test_weights_rotate_past_the_cache() -> None:
    for nbytes in (1, 1 << 20, 40 << 20, 1 << 32):
        count = copies(nbytes, torch.device("cuda"))
        assert count == 12 or count * nbytes >= 512 << 20
        assert count >= 1


@pytest.mark.parametrize("command", ["linear", "mlp", "block"])
def test_help_and_bad_flags_start_without_torch(command: str) -> None:
    code = (
        f"import sys; sys.argv = ['crosscut', 'bench', '{command}', '--help']\n"
        "from crosscut.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'transformers', 'plotly', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "--explain" in run.stdout
