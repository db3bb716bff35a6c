"""The application: how a subcommand is registered, the look of --help (commands in groups), and how an error ends."""

import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Annotated, Any, TextIO

from neuroshard.core.extras import install_command

try:
    import typer
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError:  # a trainer installs neither; its client has no need of them
    sys.exit(f"error: the neuroshard command needs typer and rich: {install_command('cli')}")

from neuroshard import __version__
from neuroshard.cli.completion import words_as_typed
from neuroshard.cli.options import check_needs, check_outputs, needs_of
from neuroshard.core.clean import accept_all_characters, clean, clean_lines, in_words, is_silent, silent
from neuroshard.core.errors import NeuroshardError, UsageError
from neuroshard.core.text import one_line, wrapped
from neuroshard.system import heed_quota

# In this order `neuroshard --help` shows them.
GROUPS = {"plan": "Plan", "measure": "Measure", "learn": "Learn", "release": "Release", "cluster": "Cluster"}
EXIT_CODES = """\
Exit status: 0 done; 1 failed, as the last line says; 2 called wrongly; 3 odd
tables (tables --check); 128 + N ended by signal N (130: Ctrl-C)."""


def usage_of(parameters: Iterable[Any]) -> list[str]:
    """`PLAN`, `[CASES]`: the arguments as the usage line shows them."""
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    return [one.display_name_raw if one.required else f"[{one.display_name_raw}]" for one in arguments]


def write_parameters(parameters: Iterable[Any], context: Any, formatter: Any) -> None:
    """The sections of arguments and options."""
    sections: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for parameter in parameters:
        record = parameter.get_help_record(context)
        if record is not None:
            kind = parameter.param_type_name
            sections[kind].append((parameter.display_name_raw if kind == "argument" else record[0], record[1]))
    for title, rows in (("Arguments", sections["argument"]), ("Options", sections["option"])):
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def write_commands(commands: Mapping[str, Any], formatter: Any) -> None:
    """A section for each group, each command with its sentence, all in the same columns."""
    width = max(map(len, commands))
    for group, title in GROUPS.items():
        with formatter.section(title):
            formatter.write_dl(
                [
                    (f"{name:<{width}}", command.get_short_help_str(formatter.width))
                    for name, command in commands.items()
                    if command.rich_help_panel == group
                ]
            )


class _Group(TyperGroup):
    """The command with its subcommands. Messages about wrong arguments are cleaned, as they quote the arguments."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _cleaned_usage():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _cleaned_usage():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self.get_params(ctx), ctx, formatter)
        write_commands(self.commands, formatter)


@contextmanager
def _cleaned_usage() -> Iterator[None]:
    try:
        yield
    except typer.TyperException as error:
        error.message = clean(getattr(error, "message", ""))
        raise


app = typer.Typer(
    name="neuroshard",
    cls=_Group,
    help='Sharding plans for embedding tables: pre-train cost models, and search ("neuroshard COMMAND --help").',
    epilog=f"\b\n{EXIT_CODES}",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"neuroshard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


class _Command(TyperCommand):
    """A subcommand that refuses empty arguments, since an empty path would mean the current folder, bad outputs, and options that
    need others."""

    needs: Mapping[str, str] = MappingProxyType({})  # options, and the flags of those that they need

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [self.options_metavar or "", *usage_of(self.get_params(ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self.get_params(ctx), ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for before, argument in zip([self.name, *args], () if ctx.resilient_parsing else args, strict=False):
            option, equals, value = argument.partition("=") if argument.startswith("--") else (before, "=", argument)
            if equals and not value.strip():
                raise UsageError(f"an argument of {option} is empty; is it a variable that is not set?")
            if value == "-":  # would be read from, or written to, a file of this name
                raise UsageError(
                    f"an argument of {option} is -; write /dev/stdin or /dev/stdout, or ./- for a file of that name"
                )
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            check_needs(ctx, self.needs)
            check_outputs(ctx.params)
        return rest


def command(group: str, example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a subcommand. Its --help ends with `example`; the list shows its docstring's first sentence under its `group`."""
    assert group in GROUPS, group
    options = re.sub(r" (?!-)", "\N{NO-BREAK SPACE}", example)  # lines end before an option, never within quotes
    lines = " \\\n    ".join(wrapped(options, indent=0, width=70)).replace("\N{NO-BREAK SPACE}", " ")
    epilog = f"\b\nExample:\n  {lines}"  # \b keeps click from wrapping it again

    def registered(run: Callable[..., None]) -> Callable[..., None]:
        kind = type("Command", (_Command,), {"needs": needs_of(run)})
        app.command(cls=kind, epilog=epilog, rich_help_panel=group)(_with_quiet(run))
        return run

    return registered


_Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no notes: results and errors only.")]


def _with_quiet(run: Callable[..., None]) -> Callable[..., None]:
    """The subcommand with one more option, --quiet."""

    @wraps(run)
    def quiet_or_not(*arguments: Any, quiet: bool, **options: Any) -> None:
        with silent(quiet), in_words(str):
            run(*arguments, **options)

    own = inspect.signature(run)
    more = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Quiet)
    vars(quiet_or_not)["__signature__"] = own.replace(parameters=[*own.parameters.values(), more])
    quiet_or_not.__annotations__ = {**run.__annotations__, "quiet": _Quiet}
    return quiet_or_not


def say(line: str, err: bool = False) -> None:
    """Print a line, cleaned. Everything that a subcommand prints goes through this or `say_text`."""
    _print(clean(line), err=err)


def say_text(text: str) -> None:
    """Print many lines, or JSON, each line cleaned."""
    _print(clean_lines(text))


def _print(text: str, err: bool = False) -> None:
    """Raises NeuroshardError where stdout cannot be written."""
    try:
        typer.echo(text, err=err)
    except BrokenPipeError:
        raise
    except OSError as error:
        if err:
            raise
        raise NeuroshardError(
            f"stdout: cannot write the result: {error.strerror or error}; send it elsewhere"
        ) from None


def say_json(data: Any) -> None:
    """Print JSON, indented."""
    say_text(json.dumps(data, indent=2))


def note(lines: Iterable[str]) -> None:
    """Print notes to stderr, unless --quiet."""
    for line in lines:
        if not is_silent():
            say(f"note: {line}", err=True)


def main() -> None:
    """Entry point of the `neuroshard` command."""
    _reopen_standard_streams()
    accept_all_characters()
    heed_quota(os.environ)
    warnings.showwarning = _show_warning
    try:
        with words_as_typed(os.environ):
            app(prog_name="neuroshard")
    except KeyboardInterrupt:  # before the subcommand runs: from then on click answers it
        sys.exit(130)
    except BrokenPipeError:  # `neuroshard show plan.json | head`
        sys.stderr.close()
        sys.exit(1)
    except (NeuroshardError, ImportError, OSError, MemoryError) as error:
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "neuroshard":
            raise
        say(f"error: {_why(error)}", err=True)
        sys.exit(getattr(error, "exit_code", 1))


def _why(error: BaseException) -> str:
    match error:
        case ModuleNotFoundError():
            return f"this needs the package {error.name}, of an extra: {install_command('all')}"
        case ImportError():  # a shared library of a package does not fit this machine
            return f"a package cannot be loaded ({one_line(error)}); `neuroshard doctor` looks at all of them"
        case OSError():  # a full disk, say; files are written whole or not at all (files/disk.py)
            return f"{error.filename or 'this machine'}: {error.strerror or error}"
        case MemoryError():  # too many cases or devices
            return f"not enough memory: {one_line(error) or 'ask for less at once'}"
    return one_line(error, None)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning, cleaned: a library's warning may quote an address with a password."""
    say(f"warning: {message} ({category.__name__} of {filename}:{lineno})", err=True)


def _reopen_standard_streams() -> None:
    """Reopen standard streams that were closed. Otherwise the next file would get their number, and messages go into it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
