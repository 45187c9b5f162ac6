"""A person's first step: JupyterLab opens the tour and Run All reaches its last cell."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from repository import ROOT

TOUR = "00_start_here.ipynb"
LIMIT_S = 300
"""Ten times what it takes alone on two cores: this test shares them with others."""


@pytest.fixture
def lab(tmp_path, chromium):
    """JupyterLab on a copy of the tour, since a session saves the notebook it has open."""
    shutil.copy(ROOT / "notebooks" / TOUR, tmp_path / TOUR)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = tmp_path / "settings"
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(settings),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "MOELAB_ROOT": str(ROOT),
    }
    command = [
        sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1",
        "--IdentityProvider.token=", f"--notebook-dir={tmp_path}", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/api", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
                time.sleep(0.2)
        yield f"{address}/lab/tree/{TOUR}", tmp_path
    finally:
        server.terminate()
        server.wait(20)


def test_run_all_reaches_the_last_cell(page, lab):
    address, folder = lab
    page.goto(address)
    page.locator(".jp-Notebook").wait_for(timeout=60_000)
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)  # before that, Run asks which kernel
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    cells = [cell for cell in json.loads((folder / TOUR).read_text())["cells"] if cell["cell_type"] == "code"]
    # the last prompt is a number, no longer empty or a star, only once every cell before it has run
    last = page.locator(".jp-CodeCell").last
    page.wait_for_function(
        "n => { const all = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.textContent);"
        " const done = all.filter(t => /\\[\\d+\\]/.test(t)).length;"
        " return done >= n || document.querySelector('.jp-OutputArea-output[data-mime-type*=\"error\"]'); }",
        arg=len(cells),
        timeout=LIMIT_S * 1000,
    )
    errors = page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.error"]')
    assert errors.count() == 0, errors.first.inner_text()[:2000]
    last.scroll_into_view_if_needed()
    assert page.locator(".jp-OutputArea-output img").count() >= 1
    assert page.refused == []
