"""What every test shares: the data that lives outside the repository, and the count of its absence."""

import os
from pathlib import Path

import pytest

ABSENT = "MOELAB_DATA absent"


@pytest.fixture(scope="session")
def moelab_data() -> Path:
    """Folder with `traces/`, `corpus/`, `transcripts/`, `tokenizer/`: the only reason for which a test may skip here.

    Its place is named by the environment variable MOELAB_DATA. Unset skips, and the skips are counted at
    the end of the run; set to a folder that is not there is an error, never a skip.
    """
    value = os.environ.get("MOELAB_DATA")
    if not value:
        pytest.skip(ABSENT)
    path = Path(value)
    if not path.is_dir():
        pytest.fail(f"MOELAB_DATA names no folder: {value}")
    return path


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(ABSENT in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(f"{count} tests skipped: {ABSENT}")
