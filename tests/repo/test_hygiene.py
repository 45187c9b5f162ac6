"""What the repository must not hold, and what it must keep true.

Patterns are assembled from pieces, so that this file does not match itself.
"""

import json
import re

import pytest
from repository import PACKAGE, ROOT, modules, texts

MACHINE = re.compile(
    r"(?<![\w.~$}{-])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"]) + r")/\w+"
)
TEMPORARY = re.compile(r"(?<![\w.~$}{-])/t" + r"mp/\w+")
HOSTS = re.compile(
    "|".join(
        name.replace("#", r"\.")
        for name in (
            "py" + "pi#org", "python" + "hosted#org", "download#py" + "torch#org", "npm" + "js#(?:org|com)",
            "ana" + "conda#(?:org|com)", "deb#deb" + "ian#org", "crates#" + "io", "proxy#go" + "lang#org",
        )
    )
)  # fmt: skip
SECRETS = re.compile(
    "|".join(
        (
            "AGE-SECRET-" + "KEY-1[A-Z0-9]{20,}", "gh" + "p_[A-Za-z0-9]{30,}", "AK" + "IA[A-Z0-9]{16}",
            "-----BEGIN [A-Z ]*PRIVATE" + " KEY-----", "hf" + "_[A-Za-z]{30,}", "xox" + "[abp]-[0-9]{8,}",
            "sk-" + "(?:proj|ant)-[A-Za-z0-9-]{20,}",
        )
    )
)  # fmt: skip


PLANS = re.compile(
    "|".join(
        ("DES" + "IGN(?: §|\\.md|'s|:| on)", r"\(AF" + "N-", "house " + "plan", r"\(spec" + ": ", r"faults? P\d\d\b")
    )
)
"""Papers that a reader of the repository does not have. Where a source has a title it stands after "Source:"."""


@pytest.mark.parametrize(
    ("what", "pattern"),
    [("machine path", MACHINE), ("temporary path", TEMPORARY), ("registry host", HOSTS), ("secret", SECRETS),
     ("paper elsewhere", PLANS)],
)  # fmt: skip
def test_nothing_of_one_machine_or_one_account(what, pattern):
    found = [f"{name}: {match.group()}" for name, text in texts() for match in pattern.finditer(text)]
    assert not found, f"{what} in " + "; ".join(found[:10])


def test_no_secret_in_committed_data():
    assert not [name for name, text in texts(data=True) if SECRETS.search(text)]


def test_patterns_find_what_they_are_for():
    for pattern, text in (
        (MACHINE, "open('/ro" + "ot/x')"),
        (TEMPORARY, 'path = "/t' + 'mp/x"'),
        (HOSTS, "https://py" + "pi.org/simple"),
        (SECRETS, "AGE-SECRET-" + "KEY-1" + "Q" * 40),
        (PLANS, "as in DES" + "IGN §7"),
        (PLANS, "what a second gives (AF" + "N-021)"),
    ):
        assert pattern.search(text), text


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_module_is_one_idea(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= 350


def test_links_of_documents_resolve():
    for name, text in texts():
        if not name.endswith(".md"):
            continue
        here = (ROOT / name).parent
        for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text):
            if re.match(r"[a-z]+:", target) or target.startswith("#"):
                continue
            assert (here / target.split("#")[0]).exists(), f"{name} links {target}"


def test_public_modules_say_what_they_are():
    for path in modules():
        text = path.read_text(encoding="utf-8")
        assert text.startswith(('"""', 'r"""')), f"{path.relative_to(PACKAGE)} begins without a docstring"


def test_nothing_is_left_for_later():
    words = re.compile(r"\b(?:TO" + "DO|FIX" + "ME|XX" + r"X)\b")
    assert not [name for name, text in texts() if name.endswith((".py", ".ipynb", ".j2")) and words.search(text)]


def test_json_that_is_committed_parses():
    for name, text in texts(data=True):
        if name.endswith((".json", ".ipynb")):
            json.loads(text)
