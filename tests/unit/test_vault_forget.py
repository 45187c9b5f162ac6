"""Forgetting a thread removes its key, its records and everything built from them, and proves it."""

import json

import numpy as np
import pytest
from observations import observation

from moelab import artifacts
from moelab.errors import VaultError
from moelab.flywheel.forget import derived, forget
from moelab.flywheel.observe import to_bytes
from moelab.flywheel.vault import Vault, record_name

GONE, KEPT = "a" * 16, "b" * 16


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Records of two threads → shards → checkpoint; an artefact of other threads; a half-built one."""
    monkeypatch.setenv("MOELAB_ARTIFACTS", str(tmp_path))
    vault = Vault()

    def capture(folder):
        for thread in (GONE, KEPT):
            for sequence in ("0", "1"):
                vault.write(folder / record_name(thread, sequence), to_bytes(observation(thread=thread)))
        rows = [{"thread": thread, "rows": 10, "turns": [1, 2]} for thread in (GONE, KEPT)]
        artifacts.write_json(folder / "index.json", {"sequences": rows, "by_thread": {GONE: 1, KEPT: 2}})
        return {"sequences": 4, "longest": GONE, "content": "c" * 64}

    def shard(folder):
        artifacts.write_tensors(folder / "rows.safetensors", {"ids": np.zeros(3)}, {})
        return {"rows": 20}

    observations = artifacts.build("observations", inputs={}, params={"seed": 0}, make=capture)
    shards = artifacts.build("shards", inputs={"observations": observations.content}, params={}, make=shard)
    checkpoint = artifacts.build("train", inputs={"snapshot": {"shards": [shards.content]}}, params={}, make=shard)
    unrelated = artifacts.build("shards", inputs={"observations": "d" * 64}, params={}, make=shard)
    own = artifacts.build(
        "observations",
        inputs={},
        params={"thread": GONE},
        make=lambda folder: vault.write(folder / record_name(GONE, "9"), b"text") or {},
    )
    table = artifacts.build("tables", inputs={}, params={"threads": [GONE]}, make=shard)
    half = tmp_path / "shards" / "0123.partial"
    half.mkdir()
    (half / "rows").write_bytes(b"rows of nobody knows whom")
    started = tmp_path / "observations" / "4567.partial"
    for thread in (GONE, KEPT):
        vault.write(started / record_name(thread, "0"), b"text")
    world = dict(vault=vault, root=tmp_path, observations=observations, shards=shards, checkpoint=checkpoint)
    return world | dict(unrelated=unrelated, own=own, table=table, half=half, started=started)


def test_what_is_derived_is_found(world):
    found = {world[name].path for name in ("observations", "shards", "checkpoint", "table", "own")}
    assert set(derived(world["root"], GONE)) == found
    assert set(derived(world["root"], KEPT)) == found - {world["table"].path, world["own"].path}
    assert derived(world["root"], "e" * 16) == []


def test_forgetting_is_proved(world):
    vault, root = world["vault"], world["root"]
    public = str(vault.key(GONE).to_public())
    records = [path.relative_to(root).as_posix() for path in sorted(root.rglob(f"{GONE}.*.age"))]
    digests = {name: artifacts.digest_file(root / name) for name in records}
    copies = {name: (root / name).read_bytes() for name in records}
    proof = forget(vault, GONE, root=root)

    assert proof.holds and proof.thread == GONE and proof.key == public
    assert proof.records == digests and len(records) == 4
    assert proof.attempts == dict.fromkeys(records, "No matching keys found")
    folders = {name: world[name].path.relative_to(root).as_posix() for name in ("observations", "shards", "checkpoint")}
    assert proof.amended == (folders["observations"],)
    assert set(proof.removed) == {
        folders["shards"],
        folders["checkpoint"],
        world["table"].path.relative_to(root).as_posix(),
        world["own"].path.relative_to(root).as_posix(),  # its very parameters name the thread
        "shards/0123.partial",
    }
    assert proof.mentions == ()

    # The world agrees with the proof.
    left = [path for path in root.rglob("*") if path.is_file() and not path.is_relative_to(vault.folder)]
    assert not [path for path in left if GONE in path.name or GONE.encode() in path.read_bytes()]
    assert not any(world[name].path.exists() for name in ("shards", "checkpoint", "table", "own"))
    assert not world["half"].exists()
    for name, cipher in copies.items():  # a copy from a backup opens with no key that is left
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(cipher)
        with pytest.raises(VaultError, match="thread was forgotten"):
            vault.open(root / name)


def test_others_keep_what_is_theirs(world):
    vault, root = world["vault"], world["root"]
    forget(vault, GONE, root=root)
    assert artifacts.open_artifact(world["unrelated"].path).counts == {"rows": 20}
    amended = artifacts.open_artifact(world["observations"].path)  # every seal fits again
    assert set(amended.manifest.files) == {record_name(KEPT, "0"), record_name(KEPT, "1"), "index.json"}
    assert amended.counts == {"sequences": 4, "forgotten": 1}
    assert amended.content != world["observations"].content  # so nothing built from the old one is up to date
    for path in (amended.file(record_name(KEPT, "1")), world["started"] / record_name(KEPT, "0")):
        assert vault.open(path)
    index = json.loads(amended.file("index.json").read_text())
    assert index == {"sequences": [{"thread": KEPT, "rows": 10, "turns": [1, 2]}], "by_thread": {KEPT: 2}}
    again = artifacts.build("observations", inputs={}, params={"seed": 0}, make=None)
    assert again.content == amended.content  # found, not captured anew


def test_forgetting_twice_and_after_a_kill(world, monkeypatch):
    vault, root = world["vault"], world["root"]
    import shutil

    def kill(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", kill)
    with pytest.raises(KeyboardInterrupt):
        forget(vault, GONE, root=root)
    monkeypatch.undo()
    monkeypatch.setenv("MOELAB_ARTIFACTS", str(root))
    assert forget(vault, GONE, root=root).holds
    assert not world["checkpoint"].path.exists()
    second = forget(vault, GONE, root=root)
    assert second.holds and not second.records and not second.amended and not second.removed
    assert second.key is not None


def test_what_has_no_manifest_is_named_by_the_caller(world):
    vault, root = world["vault"], world["root"]
    export = root / "export.jsonl"
    report = root / "reports"
    report.mkdir()
    (report / "20.html").write_text(f"<p>{GONE}</p>")
    export.write_text(json.dumps({"thread": GONE}))
    proof = forget(vault, GONE, root=root)
    assert not proof.holds and proof.mentions == ("export.jsonl", "reports/20.html")
    proof = forget(vault, GONE, root=root, also=[export, report])
    assert proof.holds and proof.removed == ("export.jsonl", "reports")


def test_a_record_that_still_opens_is_no_proof(world):
    """The same key under another thread's name: then destroying one key destroyed nothing."""
    vault, root = world["vault"], world["root"]
    (vault.keys / f"{KEPT}.key").write_bytes((vault.keys / f"{GONE}.key").read_bytes())
    with pytest.raises(VaultError, match="record still opens; file: .*; field: key; got: 'its plaintext'"):
        forget(vault, GONE, root=root)
    assert world["shards"].path.exists()


def test_mentions_are_found_across_pieces(tmp_path, monkeypatch):
    from moelab.flywheel import forget as module

    monkeypatch.setattr(module, "_CHUNK", 10)
    (tmp_path / "a").write_bytes(b"1234567" + GONE.encode() + b"xyz")
    (tmp_path / "b").write_bytes(GONE.encode()[:-1] + b"." + GONE.encode()[:3])
    assert [path.name for path in module._naming(tmp_path, GONE)] == ["a"]


def test_odd_names_are_refused(world):
    with pytest.raises(VaultError, match="not a thread uid"):
        forget(world["vault"], "*", root=world["root"])
    assert world["shards"].path.exists()
