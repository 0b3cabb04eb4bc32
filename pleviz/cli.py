"""The command line: the package's functions, with text, JSON or Markdown to read.

Heavy libraries are imported inside the commands, so that ``--help`` and ``budget`` answer at once.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from pleviz import __version__
from pleviz.format import fmt_bytes, fmt_count, text_table

app = typer.Typer(
    name="pleviz",
    help="See, measure and move Per-Layer Embeddings in Gemma 3n and Gemma 4 E2B/E4B.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Entry point of ``pleviz`` and ``python -m pleviz``."""
    app()


def _fail(message: str) -> NoReturn:
    typer.echo(f"pleviz: {message}", err=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """What a user can put right is one line and exit code 2, not a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:  # NoTableError and RecordError are ValueErrors
        _fail(str(error))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pleviz {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def specs() -> None:
    """List the models, with their parameters and the size of their PLE table."""
    from pleviz.arithmetic import row_bytes, table_bytes
    from pleviz.specs import SPECS

    rows = []
    for name, spec in SPECS.items():
        vocabulary, width = spec.table_shape
        rows.append(
            (
                name,
                fmt_count(spec.parameters()),
                f"{vocabulary:,} × {width:,}",
                fmt_bytes(table_bytes(spec)),
                fmt_bytes(row_bytes(spec)),
            )
        )
    typer.echo(
        text_table(("text model", "parameters", "PLE table", "bf16", "one token's row"), rows)
    )


@app.command()
def budget(
    name: Annotated[str, typer.Argument(help="A model; `pleviz specs` lists them.")],
    home: Annotated[str, typer.Option(help="Where the table is.")] = "gpu",
    precision: Annotated[str, typer.Option(help="bf16, fp16, fp32, nf4 or int8.")] = "bf16",
    towers: Annotated[bool, typer.Option("--towers", help="With vision and audio towers.")] = False,
    context: Annotated[int, typer.Option(min=0, help="Tokens in the KV cache.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the KV cache.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Exact bytes as JSON.")] = False,
) -> None:
    """What a model needs on the accelerator and on the host, from its shapes alone."""
    from pleviz.arithmetic import budget as make_budget

    with _user_errors():
        made = make_budget(
            name, home=home, precision=precision, towers=towers, context=context, batch=batch
        )
    typer.echo(made.to_json() if json else str(made))


@app.command()
def measure(
    out: Annotated[Path, typer.Option(help="The record to write, or to go on with (JSON).")],
    model: Annotated[str, typer.Option(help="Models, separated by commas.")] = "",
    homes: Annotated[
        str, typer.Option(help="Rows to measure for each model and precision.")
    ] = "gpu,cpu,mapped,file,device_map,workaround",
    precision: Annotated[str, typer.Option(help="Of bf16, fp16, fp32, nf4, int8.")] = "bf16",
    prefill: Annotated[int, typer.Option(help="Tokens of the timed prefill.")] = 8500,
    decode: Annotated[int, typer.Option(help="Most decode steps to time per batch size.")] = 128,
    batch: Annotated[str, typer.Option(help="Batch sizes for decoding.")] = "1",
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Decode with torch.compile and a static cache.")
    ] = False,
    only_memory: Annotated[
        bool, typer.Option("--only-memory", help="Load, and compare what is held with the budget.")
    ] = False,
    scale: Annotated[
        str, typer.Option(help="real or tiny: shapes of the random weights.")
    ] = "real",
    device: Annotated[str, typer.Option(help="auto, cuda, cpu …")] = "auto",
    checkpoint: Annotated[
        str | None, typer.Option(help="Measure this checkpoint instead of random weights.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep checkpoints here, and use those that are here.")
    ] = None,
    segment_seconds: Annotated[
        float, typer.Option(help="About how long a timed stretch may take.")
    ] = 2.0,
    row_timeout: Annotated[float, typer.Option(help="Seconds until a row is given up.")] = 600.0,
) -> None:
    """Measure memory, speed and parity, one process per row; the same command resumes.

    Exit code 1 if a row failed (its reason is in the record), 2 if nothing could be measured.
    """
    from pleviz.measure import MeasureError, Options
    from pleviz.measure import measure as run

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that row processes end with us
    with _user_errors():
        options = Options(
            models=_words(model),
            homes=_words(homes),
            precisions=_words(precision),
            prefill=prefill,
            decode=decode,
            batches=tuple(_integer(word) for word in _words(batch)),
            compiled=compiled,
            only_memory=only_memory,
            scale=scale,
            device=device,
            checkpoint=checkpoint,
            segment_seconds=segment_seconds,
            row_timeout=row_timeout,
        )
        try:
            record = run(options, out, keep=keep, on_row=_report_row)
        except MeasureError as error:
            _fail(str(error))
    from pleviz.measure.summary import summary

    typer.echo(summary(record))
    typer.echo(f"written to {out}")
    if any(row["status"] == "failed" for row in record.rows):
        raise typer.Exit(1)


def _integer(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"a batch size is a whole number, not {word!r}") from None


def _report_row(row: Mapping[str, Any]) -> None:
    """One line on stderr as soon as a row is done: a long run shows what it has."""
    from tqdm.auto import tqdm

    from pleviz.measure.summary import row_line

    tqdm.write(row_line(row), file=sys.stderr)


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="The model that the checkpoint is.")],
    checkpoint: Annotated[Path, typer.Option(help="Its folder (see `measure --keep`).")],
    out: Annotated[Path, typer.Option(help="The record to write (JSON).")],
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the timed prefill.")] = 8500,
) -> None:
    """Measure the homes in detail on a GPU: in turns, attaching, gathering, a decode step's profile."""
    from pleviz.measure.bench import bench as run
    from pleviz.measure.driver import MeasureError

    with _user_errors():
        try:
            record = run(model, checkpoint, out, prompt=prompt)
        except MeasureError as error:
            _fail(str(error))
    typer.echo(str(record))


@app.command()
def greedy(
    checkpoint: Annotated[
        list[str], typer.Option(help="MODEL=FOLDER; may be given several times.")
    ],
    out: Annotated[Path, typer.Option(help="The record to write (JSON).")],
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to decode.")] = 2287,
    device: Annotated[str, typer.Option(help="auto, cuda, cpu …")] = "auto",
) -> None:
    """Decode greedily with the table on the GPU and off it, and compare the bits of every step."""
    from pleviz.measure.bench import greedy as run
    from pleviz.measure.driver import MeasureError

    with _user_errors():
        pairs = dict(word.partition("=")[::2] for word in checkpoint)
        if not all(pairs.values()):
            _fail(f"--checkpoint takes MODEL=FOLDER, not {' '.join(checkpoint)}")
        try:
            folders = {name: Path(folder) for name, folder in pairs.items()}
            record = run(folders, out, tokens=tokens, device=device)
        except MeasureError as error:
            _fail(str(error))
    typer.echo(str(record))


@app.command()
def headline(
    markdown: Annotated[bool, typer.Option("--markdown", help="As a Markdown table.")] = False,
    records: Annotated[
        Path | None, typer.Option(help="Folder of records; by default the repository's.")
    ] = None,
) -> None:
    """What moving the table does to GPU memory: the table in one picture, from the records."""
    from pleviz.headline import headline as make_headline

    with _user_errors():
        typer.echo(make_headline(records, markdown=markdown))
