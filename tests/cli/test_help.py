"""What a new user reads first: the list of commands, each one's --help, what a typo gets, and what Tab completes."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from helpers.limits import HANGS
from neuroshard.cli import app
from neuroshard.cli.app import GROUPS

COMMANDS = vars(typer.main.get_command(app))["commands"]


def run(*arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "KFP_ENDPOINT": ""})


def test_the_list_of_commands_tells_each_in_a_whole_sentence():
    lines = [line for line in run("--help").output.splitlines() if line.split()[:1] and line.split()[0] in COMMANDS]
    assert {line.split()[0] for line in lines} == set(COMMANDS)
    assert [line for line in lines if not line.endswith(".") or line.endswith("...") or len(line) > 80] == []


def test_the_commands_are_in_groups_and_each_in_one():
    sections = re.findall(r"^(\w+):\n((?:  .*\n)+)", run("--help").output, re.M)
    groups = {title: re.findall(r"^  ([a-z-]+) ", lines, re.M) for title, lines in sections if title != "Options"}
    assert list(groups) == list(GROUPS.values())
    assert sorted(name for names in groups.values() for name in names) == sorted(COMMANDS)
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (`.*`) \|$", page, re.M)
    assert {group.capitalize(): re.findall(r"`([a-z-]+)`", names) for group, names in rows} == groups


def test_the_command_alone_prints_its_help_and_succeeds():
    done = run()
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == run("--help").stdout == run("-h").stdout
    assert "Exit status: 0 done" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_h_is_help_and_values_have_words(command):
    shown = run(command, "-h").output
    assert shown == run(command, "--help").output
    assert re.findall(r"<[a-z ]+>|list\[|\{\w+\}", shown) == []
    arguments = [one for one in COMMANDS[command].params if one.param_type_name == "argument"]
    assert [one.metavar for one in arguments if not re.fullmatch(r"[A-Z]+(\.\.\.)?", one.metavar or "")] == []


def test_every_command_that_prints_results_prints_them_as_json():
    without = [name for name, one in COMMANDS.items() if "--json" not in [o for p in one.params for o in p.opts]]
    assert without == ["submit", "schedule"]  # they say what they do on the way


def test_every_command_can_be_quiet():
    assert [name for name, one in COMMANDS.items() if "--quiet" not in [o for p in one.params for o in p.opts]] == []


COMPLETED = """
eval "$(neuroshard --show-completion)"
complete -p neuroshard
COMP_WORDS=({words}) COMP_CWORD={last}
_neuroshard_completion neuroshard
echo "${{COMPREPLY[*]}}"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("neuroshard se", "search"),
        ("neuroshard search --mo", "--model --move-budget"),
        ("neuroshard search --model analytic : h2", "h200"),  # as bash takes words apart
        ("neuroshard search --algorithm = neu", "neuroshard-2023"),
        ("neuroshard tables --optimizer rowwise", "rowwise_adagrad"),
    ],
)
def test_bash_completes_commands_options_and_values(tmp_path, words, completed):
    (tmp_path / "neuroshard").write_text(f'#!/bin/sh\nexec {sys.executable} -m neuroshard "$@"\n')
    (tmp_path / "neuroshard").chmod(0o755)
    script = COMPLETED.format(words=words, last=words.count(" "))
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=HANGS
    )
    assert done.stdout.splitlines() == [
        "complete -o default -F _neuroshard_completion neuroshard",
        *completed.split("\n"),
    ]


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
