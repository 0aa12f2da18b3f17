"""``placement verify``: the program on n ranks against the model on one device."""

from __future__ import annotations

import time

import click

from placement.commands.options import Target, target_options
from placement.commands.shared import AT_FAULT, FINE, Failed, load_model, of_the_model, read_spec
from placement.terminal import Status

_SIZES = {"batch": 2, "seq": 32}  # of a transformers example; explain prices a long sequence instead


@click.command()
@click.argument("spec")
@target_options
@click.option("--backend", type=click.Choice(["simulated", "gloo", "nccl"]), default="simulated", show_default=True)
@click.option("--dtype", type=click.Choice(["float64", "float32", "bfloat16"]), default="float64", show_default=True)
@click.option("--batch", type=click.IntRange(1), help="Short for --size batch=N.")
@click.option("--seq", type=click.IntRange(1), help="Short for --size seq=N.")
@click.option("--steps", type=click.IntRange(0), default=5, show_default=True, help="AdamW steps.")
@click.option("--tolerance", type=click.FloatRange(0, min_open=True), help="Largest relative error that passes.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds without progress until processes are ended.",
)
def verify(
    spec: str,
    target: Target,
    backend: str,
    dtype: str,
    batch: int | None,
    seq: int | None,
    steps: int,
    tolerance: float | None,
    timeout: float,
) -> int:
    """Compare the program on n ranks with the model on one device."""
    read = read_spec(spec)
    sizes = {**target.sizes, **{k: v for k, v in (("batch", batch), ("seq", seq)) if v is not None}}
    with Status("loading the model") as status:
        started = time.perf_counter()
        built = load_model(read, target.needed(), sizes, meta=False, **_SIZES)
        import torch  # noqa: PLC0415 - a second of start-up

        from placement.runtime.errors import MeshError, SizeError, StateError  # noqa: PLC0415
        from placement.verify import ProcessFailure  # noqa: PLC0415
        from placement.verify import verify as compare  # noqa: PLC0415

        try:
            with of_the_model(target.needed()):
                parity = compare(
                    built.model,
                    target.mesh,
                    read,
                    example=built.example,
                    backend=backend,
                    dtype=getattr(torch, dtype),
                    steps=steps,
                    tolerance=tolerance,
                    timeout=timeout,
                    progress=status.say,
                )
        except (ProcessFailure, MeshError, SizeError, StateError) as error:
            raise Failed(str(error)) from error
        except ValueError as error:
            if backend == "nccl" and "nccl" in str(error):
                raise click.UsageError(str(error)) from error
            raise
    click.echo(str(parity))
    if target.verbose:
        click.echo(f"took {time.perf_counter() - started:.1f} s", err=True)
    return FINE if parity.ok else AT_FAULT
