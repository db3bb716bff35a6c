"""The look of --help: commands in groups, an argument by its kind (`PLAN`), an option's value by its kind (`--memory SIZE`)."""

from collections.abc import Iterable, Mapping
from typing import Any

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
