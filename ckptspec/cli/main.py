"""Owns the command line's frame: which command runs, and that every end is an exit code and words, no traceback."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import click

from ckptspec.cli.output import tell
from ckptspec.errors import CkptspecError

COMMANDS = {
    "clean": ("cleaning", "Remove what nobody needs any more from a run: leftovers, and steps that may go."),
    "demo": ("demo", "Train a small ZeRO job on 4 ranks, kill it mid-save, resume byte-equal."),
    "diff": ("difference", "Say what the state in two checkpoints differs in, whatever their layouts."),
    "inspect": ("inspection", "Show what is inside a checkpoint: tensors, layouts, ranks, sizes."),
    "latest": ("newest", "Print the newest good checkpoint of a run."),
    "plan": ("planning", "Say what it takes to load a checkpoint on other ranks or layouts."),
    "reshard": ("resharding", "Write a checkpoint anew for other ranks or layouts."),
    "rollback": ("back", "Set newer checkpoints aside, so that a run resumes from an older step."),
    "schema": ("schema", "Print a schema of the standard."),
    "validate": ("validation", "Say whether a checkpoint is good, and what to do if not."),
}
CLEAN, FOUND, USAGE, COULD_NOT, EMPTY, INTERRUPTED = 0, 1, 2, 3, 4, 130


class Commands(click.Group):
    """The commands, each imported when it is called: a cold start pays for one of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the command called `name`, or None."""
        if name not in COMMANDS:
            return None
        command = import_module(f"ckptspec.cli.{COMMANDS[name][0]}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])


@click.group(
    "ckptspec",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 clean, 1 error findings, 2 usage, 3 could not run, 4 a run without a checkpoint.",
)
@click.version_option(package_name="ckptspec", message="ckptspec %(version)s")
def cli() -> None:
    """Sharded training checkpoints by an open standard: look into them, judge, compare, convert and tidy them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing but an exit code and text ever leaves it."""
    try:
        code = cli.main(None if arguments is None else list(arguments), "ckptspec", standalone_mode=False)
    except click.ClickException as e:
        e.show()
        return USAGE if isinstance(e, click.UsageError) else COULD_NOT
    except (KeyboardInterrupt, click.Abort):
        tell("interrupted")
        return INTERRUPTED
    except CkptspecError as e:
        tell(*f"error: {e}".splitlines())
        return EMPTY if e.rule == "C-EMPTY" else FOUND
    except OSError as e:
        tell(f"error: {_reason(e)}")
        return COULD_NOT
    except Exception as e:  # the last line of defence: one line, and where it came from
        tell(_internal(e))
        return COULD_NOT
    return code if isinstance(code, int) else CLEAN


def _reason(error: OSError) -> str:
    file = error.filename
    where = "" if file is None else f"{file.decode(errors='surrogateescape') if isinstance(file, bytes) else file}: "
    return where + (error.strerror or str(error) or type(error).__name__)


def _internal(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" in {trace.tb_frame.f_globals.get('__name__')}, line {trace.tb_lineno}"
    text = " ".join(str(error).split())[:300]
    return f"internal fault: {type(error).__name__}: {text}{place}; please report this line and `ckptspec --version`"
