"""The command `dualform`. A verb is one function here, named in VERBS."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

try:
    import rich  # noqa: F401  (the demo's; both come with the same extra)
    import tyro
except ModuleNotFoundError as error:
    # The command starts by importing this module, so an exception would reach the user as a traceback.
    message = f"The command line needs {error.name}, which is not installed: pip install 'dualform[cli]'"
    print(message, file=sys.stderr)
    raise SystemExit(2) from error

import dualform
from dualform.errors import DamagedMemory, DualformError
from dualform.memory import repair as repair_files
from dualform.memory import verify as check_files

arg = tyro.conf.arg
Run = Annotated[Path, tyro.conf.Positional, arg(metavar="RUN", help="the memory's directory")]


def unset(metavar: str, help: str, meaning: str) -> object:
    """Describe an option that is None unless given, by what that means."""
    return arg(metavar=metavar, help=help, help_behavior_hint=f"(default: {meaning})")


def demo(
    out: Annotated[Path, arg(metavar="DIR", help="where the memory goes")] = Path("runs/demo"),
    recipe: Annotated[
        Literal["mnist", "digits"] | None,
        unset("{mnist,digits}", "what is trained", "mnist, or digits where mnist cannot be had"),
    ] = None,
    steps: Annotated[
        int | None, unset("N", "training steps", "2000 for mnist, 600 for digits; the paper: 3000")
    ] = None,
    seed: Annotated[int, arg(metavar="N", help="of the initial weights and the batches")] = 0,
    image: Annotated[int | None, unset("N", "the test image shown", "for mnist 5938, the paper's")] = None,
) -> None:
    """Train the paper's network with a memory and show what one test image draws on."""
    from dualform.experiments.demo import demo

    demo(out, name=recipe, steps=steps, seed=seed, image=image)


def reproduce(
    experiment: Annotated[
        Literal["single", "joint", "continual", "images"],
        tyro.conf.Positional,
        arg(metavar="{single,joint,continual,images}", help="images: the three others in one report"),
    ],
    runs: Annotated[int, arg(metavar="N", help="runs of each experiment, with seeds one after the other")] = 5,
    steps: Annotated[int | None, unset("N", "training steps of every phase", "the paper's")] = None,
    seed: Annotated[int, arg(metavar="N", help="of the first run")] = 0,
    out: Annotated[Path, arg(metavar="DIR", help="where the report and the results go")] = Path("runs/paper"),
    keep_memories: Annotated[bool, arg(help="do not delete a run's memory after its analysis")] = False,
) -> None:
    """Repeat the paper's image experiments and write a report; interrupted, the same command goes on."""
    from dualform.experiments.paper import Job, reproduce
    from dualform.view.pictures import terminal

    reproduce(Job(experiment, out, runs, seed, steps, keep_memories), terminal())


def info(
    run: Run,
    certificate: Annotated[bool, arg(help="measure the certificate too: reads the whole memory")] = False,
) -> None:
    """Print what a memory holds."""
    memory = dualform.open(run)
    measured = memory.certificate() if certificate else None
    print(memory)
    if measured is not None:
        print(f"\n{measured}")


def verify(
    run: Run,
    repair: Annotated[bool, arg(help="keep the steps before the damage, and set the damaged files aside")] = False,
) -> int:
    """Read a memory whole and compare every checksum."""
    done: tuple[str, ...] = ()
    try:
        if repair:
            result, done = repair_files(run, progress=sys.stderr.isatty())
        else:
            result = check_files(run, progress=sys.stderr.isatty())
    except DamagedMemory as damage:
        print(f"{run} cannot be {'repaired' if repair else 'checked'}: {damage}")
        return 1
    checked = f"{result.files:,} files, {result.bytes:,} bytes"
    if result.ok:
        print(f"{run} is whole: {checked}, every checksum matches.")
        return 0
    print(f"{run} is damaged ({checked} checked):", *result.problems, sep="\n  - ")
    if not repair:
        print(f"{result.verdict[0].upper()}{result.verdict[1:]}.")
        return 1
    print("Repaired:", *done, sep="\n  - ")
    return 0


def query(
    run: Run,
    model: Annotated[
        str | None, unset("PACKAGE.MODULE:FACTORY", "your own function that returns the model", "the recipe's model")
    ] = None,
    test: Annotated[int | None, unset("N", "a test example of the recipe's data set", "the recipe's showcase")] = None,
    task: Annotated[
        str | None, unset("NAME", "of a recipe with several tasks, the one the example is of", "the first")
    ] = None,
    image: Annotated[Path | None, unset("FILE", "an image file to ask about instead", "a test example")] = None,
    invert: Annotated[bool, arg(help="with --image: dark ink on light paper")] = False,
    inputs: Annotated[
        Path | None, unset("FILE.safetensors", "the model's inputs: one tensor, or one an argument", "a test example")
    ] = None,
    layer: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, unset("NAME", "a layer to ask; may be given again", "all layers")
    ] = (),
    top: Annotated[int, arg(metavar="K", help="how many events, or groups with --by")] = 10,
    by: Annotated[str | None, unset("COLUMN", "sum over the events of each group first", "single events")] = None,
    within: Annotated[str | None, unset("COLUMN", "the top K of every group", "the top K of all")] = None,
    order: Annotated[Literal["largest", "smallest", "absolute"], arg(help="what comes first")] = "largest",
    where: Annotated[
        tuple[str, ...],
        tyro.conf.UseAppendAction,
        unset("COLUMN=VALUE", "only these events: a value, A,B,C or START:STOP; may be given again", "all events"),
    ] = (),
    contributions: Annotated[
        int | None, unset("UNIT", "rank by what events add to this output of the layer", "rank by scores")
    ] = None,
    until: Annotated[int | None, unset("STEP", "ask the model as it was after this step", "the last step")] = None,
    totals: Annotated[str | None, unset("COLUMN", "also the sum over all events of each group", "no sums")] = None,
    json: Annotated[bool, arg(help="print one JSON object instead of tables")] = False,
    save: Annotated[Path | None, unset("FILE", "also a figure: .png, .svg or .pdf", "no figure")] = None,
) -> None:
    """Say which training examples a prediction draws on, layer by layer."""
    from dualform.experiments.asking import Source, ask
    from dualform.view.pictures import terminal
    from dualform.view.replies import Question, to_json
    from dualform.view.tables import show_reply

    question = Question(layer, top, by, within, order, where, contributions, until, totals)
    reply, images = ask(dualform.open(run), question, Source(model, test, image, invert, inputs, task), save)
    if json:
        print(to_json(reply))
    else:
        show_reply(reply, terminal(), images)


def export(
    run: Run,
    out: Annotated[Path, arg(metavar="DIR", help="a new or empty directory for the files")],
    layer: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, unset("NAME", "a layer to export; may be given again", "all layers")
    ] = (),
    gradients: Annotated[bool, arg(help="the gradients too, an array a weight")] = False,
    overwrite: Annotated[bool, arg(help="replace an earlier export in DIR")] = False,
) -> None:
    """Write events and examples as Parquet and keys as .npy, for pandas, DuckDB and faiss."""
    from dualform.view.export import export

    done = export(dualform.open(run), out, layers=layer, gradients=gradients, overwrite=overwrite)
    print(f"{len(done.files)} files, {done.bytes / 1e6:,.1f} MB, are in {out}; its README.txt says how to read them.")


def index(
    run: Run,
    layer: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, unset("NAME", "a layer to index; may be given again", "all layers")
    ] = (),
) -> None:
    """Build what makes questions fast, now instead of at the first question."""
    from dualform.queries.indexing import build_index

    made = build_index(dualform.open(run), layer, progress=sys.stderr.isatty())
    for row in made:
        print(row)


def bench(
    run: Run,
    layer: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, unset("NAME", "a layer to ask; may be given again", "all layers")
    ] = (),
    queries: Annotated[tuple[int, ...], arg(metavar="N", help="how many queries at a time")] = (1, 16, 100),
    top: Annotated[int, arg(metavar="K", help="how many events")] = 10,
    rounds: Annotated[int, arg(metavar="N", help="turns of each way; medians are printed")] = 7,
) -> None:
    """Measure how fast this machine answers from a memory, against a scan of all its keys in RAM."""
    from dualform.experiments.bench import bench

    rows = bench(dualform.open(run), layer, queries, top, rounds)
    print(f"{'layer':12} {'queries':>8} {'ours, ms':>10} {'scan, ms':>10} {'ratio':>7} {'same':>7}")
    for row in rows:
        numbers = f"{row.queries:8,} {row.ours:10.2f} {row.scan:10.2f} {row.ratio:7.1f} {row.same:7.1%}"
        print(f"{row.layer:12} {numbers}  {row.way}")
    print("same: scores that agree up to the rounding of the scan, which is in fp32.")


def serve(
    run: Run,
    host: Annotated[
        str, arg(metavar="ADDRESS", help="where to listen; other than loopback needs a token")
    ] = "127.0.0.1",
    port: Annotated[int, arg(metavar="N", help="0: any free one")] = 8765,
    no_browser: Annotated[bool, arg(help="do not open a browser")] = False,
) -> None:
    """Open a local web page on a memory: draw a digit, and see what it attends to."""
    from dualform.experiments.serving import serve
    from dualform.view.pictures import terminal

    serve(run, host, port, not no_browser, terminal())


VERBS = (demo, reproduce, serve, info, verify, query, index, bench, export)


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and exit: 0 done, 1 `verify` found damage, 2 it could not be done."""
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            {verb.__name__: verb for verb in VERBS},
            prog="dualform",
            description="Ask the memory of a training run which examples a prediction draws on.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except BrokenPipeError:  # who reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (DualformError, OSError) as error:
        print(f"dualform: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)
