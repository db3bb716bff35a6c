"""What a new user reads first: the list of commands, each one's --help, and what a typo gets."""

import shlex

import pytest
import typer
from typer.testing import CliRunner

from neuroshard.cli import app

COMMANDS = vars(typer.main.get_command(app))["commands"]


def run(*arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "KFP_ENDPOINT": ""})


def test_the_list_of_commands_tells_each_in_a_whole_sentence():
    lines = [line for line in run("--help").output.splitlines() if line.split()[:1] and line.split()[0] in COMMANDS]
    assert {line.split()[0] for line in lines} == set(COMMANDS)
    assert [line for line in lines if not line.endswith(".") or line.endswith("...") or len(line) > 80] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example_that_the_command_takes(command, monkeypatch):
    monkeypatch.setenv("KFP_ENDPOINT", "http://localhost:8888")
    example = run(command, "--help").output.partition("Example:")[2]
    assert max(map(len, example.splitlines())) <= 80
    program, name, *arguments = shlex.split(example.replace("\\\n", " "))  # as a shell takes it
    assert (program, name) == ("neuroshard", command)
    COMMANDS[command].make_context(command, arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is_for(command):
    silent = [option.name for option in COMMANDS[command].params if not getattr(option, "help", None)]
    assert silent == []


@pytest.mark.parametrize(
    ("arguments", "suggestion"), [(["serach"], "Did you mean 'search'?"), (["search", "--devces", "4"], "--devices")]
)
def test_a_typo_gets_a_suggestion(arguments, suggestion):
    done = run(*arguments)
    assert done.exit_code == 2
    assert suggestion in done.output
