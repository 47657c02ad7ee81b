"""The command `dualform`. A verb is one function here, named in VERBS."""

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


VERBS = (demo, info, verify)


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
    except (DualformError, OSError) as error:
        print(f"dualform: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)
