"""`--help` of every command teaches: what it does, an example that can be copied, a text for every option."""

import importlib
import re

import pytest
from repository import PACKAGE, modules

from moelab.__main__ import ACTS, main
from moelab.commands import NOT_ACCEPTED

VERBS = tuple(ACTS)
MODULES = sorted(
    "moelab." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__main__")
    for path in modules()
    if '__name__ == "__main__"' in path.read_text() and path != PACKAGE / "__main__.py"
)


def helped(call, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        call(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def check(text, command):
    usage, _, rest = text.partition("\n\n")
    examples = re.findall(rf"^.*{re.escape(command)} [^-\n].*$|^.*{re.escape(command)} --(?!help).*$", rest, re.M)
    assert examples, f"no example of {command}"
    assert len(rest.split("\n\n")[0]) > 30, "no words on what it does"
    assert max(map(len, text.splitlines())) <= 122
    options = re.findall(r"(?<![\w-])--[a-z][\w-]*", usage)
    for option in options:
        assert re.search(rf"^  (-\w, )?{option}\b.*(  \S|\n {{10,}}\S)", rest, re.M), f"{option} says nothing"


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_teaches(verb, capsys):
    text = helped(main, [verb, "--help"], capsys)
    assert "exit codes: 0 done" in text
    check(text, "moelab " + verb) if verb != "doctor" else check(text, "moelab doctor --routes trace.csv")


def test_the_program_teaches(capsys):
    text = helped(main, ["--help"], capsys)
    assert all(f"    {verb} " in text for verb in VERBS)
    check(text, "moelab")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_teaches(module, capsys):
    name = module + ("" if module != "moelab.lab.peers" else ".__main__")
    text = helped(importlib.import_module(name).main, ["--help"], capsys)
    assert text.startswith(f"usage: python -m {module} ")
    check(text, f"python -m {module}")


# Policies stand alone, so their bench has a plain parser, which exits 2.
@pytest.mark.parametrize("module", [module for module in MODULES if module != "moelab.policies.bench"])
def test_what_a_module_cannot_read_is_not_accepted(module, capsys):
    name = module + ("" if module != "moelab.lab.peers" else ".__main__")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(["--no-such-option"])
    assert ended.value.code == NOT_ACCEPTED and f"python -m {module}: " in capsys.readouterr().err
