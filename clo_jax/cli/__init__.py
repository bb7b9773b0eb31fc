"""The command line: `clo-jax VERB`. One verb a file; JAX is imported by the commands that compute, not by `--help`."""

from typing import Annotated

import typer
from typer.core import TyperGroup

from clo_jax.cli import _console, bench, calibrate, chat, convert, demo, doctor, eval, generate, inspect, plan
from clo_jax.cli._options import Debug, NoProgress, Quiet


class _Group(TyperGroup):
    """Turns errors into exit codes: 2 for a wrong call (ValueError), 1 for a run that failed."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except ValueError as error:
            raise _console.fail(error, 2) from error
        except (RuntimeError, OSError, MemoryError, ImportError, NotImplementedError) as error:
            raise _console.fail(error, 1) from error


app = typer.Typer(
    name="clo-jax",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Long-context decoding in JAX with the KV cache offloaded to host memory.",
)
for verb in (
    convert.convert,
    inspect.inspect,
    doctor.doctor,
    calibrate.calibrate,
    plan.plan,
    generate.generate,
    chat.chat,
    demo.demo,
):
    app.command()(verb)
app.add_typer(eval.app)
app.add_typer(bench.app)


def _print_versions(wanted: bool) -> None:
    if not wanted:
        return
    from clo_jax.versions import native_build, versions

    for name, version in versions().items():
        print(f"{name} {version}")
    build = native_build()
    cuda = "with CUDA" if build["cuda"] else "without CUDA"
    print(f"native {build['build_type']} build by {build['compiler']}, headers of jaxlib {build['jaxlib']}, {cuda}")
    raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Versions and how the native part was built.", callback=_print_versions)
    ] = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
    debug: Debug = False,
) -> None:
    """Exit codes: 0 ok, 1 the run failed, 2 wrong usage. Results go to stdout, everything else to stderr."""


def main(args: list[str] | None = None) -> None:
    """Runs the command line (of the process when `args` is None) and exits with its code."""
    _console.reset()
    app(args=args, prog_name="clo-jax")
