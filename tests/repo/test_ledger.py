"""Every skip and every expected failure has a dated row in tests/README.md, and every row its test."""

import ast
import re

from repository import ROOT, texts

SKIPPING = {"skip", "skipif", "xfail", "importorskip"}
ROW = re.compile(
    r"^\| `(?P<where>[^`]+)` \| (?P<why>[^|]+) \| (?P<date>\d{4}-\d{2}-\d{2}) \| (?P<until>[^|]+) \|$", re.M
)


def skips():
    """`file::function` of every place in tests/ that skips or expects a failure, or that reads a skipping fixture."""
    for name, text in texts():
        if not (name.startswith("tests/") and name.endswith(".py")):
            continue
        tree = ast.parse(text)
        owners = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        for node in ast.walk(tree):
            attribute = node.func if isinstance(node, ast.Call) else node
            if not (isinstance(attribute, ast.Attribute) and attribute.attr in SKIPPING):
                continue
            if not ast.unparse(attribute).startswith(("pytest.", "unittest.")):
                continue
            inside = [
                owner for owner in owners if owner.lineno - len(owner.decorator_list) <= node.lineno <= owner.end_lineno
            ]
            yield f"{name}::{inside[-1].name if inside else '(module)'}"


def test_ledger_is_complete_and_current():
    ledger = {row["where"] for row in ROW.finditer((ROOT / "tests" / "README.md").read_text())}
    found = set(skips())
    assert found - ledger == set(), "no row in tests/README.md"
    assert ledger - found == set(), "row without a skip"
