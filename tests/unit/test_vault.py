"""The vault opens a record whole or not at all, and a destroyed key opens nothing."""

import os
import signal
import stat
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import pyrage
import pytest
from observations import observation
from pyrage.x25519 import Identity

from moelab.errors import OwnershipError, VaultError
from moelab.flywheel.observe import from_bytes, to_bytes
from moelab.flywheel.vault import (
    Vault,
    check_authorised,
    open_encrypted,
    record_name,
    sweep,
    thread_of,
    write_encrypted,
)

A, B = "a" * 16, "b" * 16
CHUNK = 65536  # age encrypts in pieces of this size


@pytest.fixture
def vault(tmp_path):
    return Vault(tmp_path / "vault")


def test_written_is_opened_and_is_not_plain(vault, tmp_path):
    plain = to_bytes(observation())
    path = tmp_path / "records" / record_name(A, "0")
    vault.write(path, plain)
    assert vault.open(path) == plain
    cipher = path.read_bytes()
    assert cipher.startswith(b"age-encryption.org/v1") and b"o-001" not in cipher and plain[:64] not in cipher
    assert pyrage.decrypt(cipher, [vault.key(A)]) == plain  # the standard format, no wrapping of ours
    first = cipher
    vault.write(path, plain)
    assert path.read_bytes() != first and from_bytes(vault.open(path)).payload == from_bytes(plain).payload


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_every_size(vault, tmp_path, size):
    plain = os.urandom(size)
    vault.write(tmp_path / f"{A}.age", plain)
    assert vault.open(tmp_path / f"{A}.age") == plain


def test_names():
    assert record_name(A, "0") == f"{A}.0.age"
    assert record_name(A, "x/y#1") == f"{A}.x%2Fy%231.age" and record_name(A, "x_y") != record_name(A, "x#y")
    assert thread_of(Path("somewhere") / record_name(A, "a.b")) == A
    for name in ("", "../x", "a/b", "a.b", "ä"):
        with pytest.raises(VaultError, match="not a thread uid; field: thread"):
            Vault("nowhere").key(name)


# ---------------------------------------------------------------- damage


def damaged(cipher):
    """A damaged record by name; the plaintext had 3.5 chunks, so a careless reader could return three."""
    head = cipher.index(b"\n---") + 1
    body = cipher.index(b"\n", head) + 1
    piece = CHUNK + 16
    return {
        "nothing": b"",
        "cut in the header": cipher[: head - 10],
        "header only": cipher[:body],
        "last 16 bytes": cipher[:-16],
        "last byte": cipher[:-1],
        "last chunk": cipher[: body + 16 + 3 * piece],
        "all but one chunk": cipher[: body + 16 + piece],
        "one byte more": cipher + b"\0",
        "a bit in the header": cipher[:30] + bytes([cipher[30] ^ 1]) + cipher[31:],
        "a bit in the first chunk": cipher[: body + 30] + bytes([cipher[body + 30] ^ 1]) + cipher[body + 31 :],
        "a bit in the last chunk": cipher[:-20] + bytes([cipher[-20] ^ 1]) + cipher[-19:],
        "two chunks swapped": cipher[: body + 16]
        + cipher[body + 16 + piece : body + 16 + 2 * piece]
        + cipher[body + 16 : body + 16 + piece]
        + cipher[body + 16 + 2 * piece :],
        "not age": b"x" * 500,
    }


@pytest.mark.parametrize("kind", list(damaged(b"age-encryption.org/v1\n-> X\n--- mac\nx" + b"x" * 4 * CHUNK)))
def test_damage_yields_no_plaintext(vault, tmp_path, monkeypatch, kind):
    path = tmp_path / f"{A}.age"
    vault.write(path, bytes(range(256)) * (CHUNK // 256) * 3 + b"z" * (CHUNK // 2))
    path.write_bytes(damaged(path.read_bytes())[kind])
    sinks = []
    real = pyrage.decrypt_io
    monkeypatch.setattr(pyrage, "decrypt_io", lambda file, sink, keys: (sinks.append(sink), real(file, sink, keys)))
    with pytest.raises(VaultError) as refusal:
        vault.open(path)
    message = str(refusal.value)
    assert message.startswith(f"record cannot be opened; file: {path}; field: bytes; got: ")
    assert message.endswith("expected: a whole record of this key")
    assert sinks[0].getvalue() == b""  # not even in memory


def test_two_keys_swapped(vault, tmp_path):
    for thread in (A, B):
        vault.write(tmp_path / f"{thread}.age", thread.encode())
    keys = [vault.keys / f"{thread}.key" for thread in (A, B)]
    one, other = (key.read_bytes() for key in keys)
    keys[0].write_bytes(other), keys[1].write_bytes(one)
    for thread in (A, B):
        with pytest.raises(VaultError, match="record cannot be opened; .*got: 'No matching keys found'"):
            vault.open(tmp_path / f"{thread}.age")


def test_a_passphrase_file_is_refused_at_once(vault, tmp_path):
    # Its header names the cost of opening it: 2^30 rounds of scrypt, a gigabyte. None of it may be paid.
    path = tmp_path / f"{A}.age"
    vault.key(A, create=True)
    path.write_bytes(
        b"age-encryption.org/v1\n-> scrypt nyqjrlkIxpq4jPi2WLGtWg 30\n"
        b"Yb5McdPjoRm8/BvSmsr3FdcKJG4YtvZN2Q/D0UhrLgg\n--- fucIGF67W0qw4fnNeYCE5myclK+jDdx8g4B6JM0VOSw\n" + b"x" * 36
    )
    began = time.process_time()
    with pytest.raises(VaultError, match="No matching keys found"):
        vault.open(path)
    assert time.process_time() - began < 0.2


def test_missing_record(vault, tmp_path):
    vault.key(A, create=True)
    with pytest.raises(VaultError, match="no such record; file: .*.age; got: 'nothing', expected: an age file"):
        vault.open(tmp_path / f"{A}.age")


# ---------------------------------------------------------------- keys


def test_key_files_are_for_their_owner_only(vault):
    key = vault.key(A, create=True)
    path = vault.keys / f"{A}.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(vault.keys.stat().st_mode) == 0o700
    assert str(vault.key(A)) == str(key) == path.read_text().strip()
    assert list(vault.keys.iterdir()) == [path]
    path.chmod(0o640)
    with pytest.raises(
        VaultError, match="key can be read by others; .*field: mode; got: '0o640', expected: 0o600; fix: ch"
    ):
        vault.key(A)


def test_no_key_and_damaged_key(vault, tmp_path):
    with pytest.raises(VaultError, match=f"no key for this thread; .*field: thread; got: '{A}', expected: a key file"):
        vault.open(tmp_path / f"{A}.age")
    vault.key(A, create=True)
    path = vault.keys / f"{A}.key"
    secret = path.read_text()
    for text in ("", secret[:-8], secret.replace("AGE-SECRET-KEY-1", "AGE-SECRET-KEY-2"), "ß"):
        path.write_text(text)
        with pytest.raises(VaultError, match="not a key; .*expected: an age key") as refusal:
            vault.key(A)
        assert secret[20:40] not in str(refusal.value)


def test_each_thread_has_its_own_key(vault):
    assert str(vault.key(A, create=True)) != str(vault.key(B, create=True))
    assert {str(key) for key in vault.identities()} == {str(vault.key(A)), str(vault.key(B))}


MAKE_KEY = """
import sys
from moelab.flywheel.vault import Vault
sys.stdin.readline()
print(Vault(sys.argv[1]).key("a" * 16, create=True).to_public())
"""


def test_two_processes_make_one_key(tmp_path):
    command = [sys.executable, "-c", MAKE_KEY, str(tmp_path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        for process in (one, other):
            process.stdin.write("go\n")
            process.stdin.flush()
        keys = {process.communicate()[0] for process in (one, other)}
    assert len(keys) == 1 and keys.pop().startswith("age1")


def test_a_key_made_meanwhile_is_kept(vault, monkeypatch):
    other = Identity.generate()

    class Meanwhile:
        from_str = Identity.from_str

        @staticmethod
        def generate():
            path = vault.keys / f"{A}.key"
            path.write_text(str(other))
            path.chmod(0o600)
            return Identity.generate()

    monkeypatch.setattr("moelab.flywheel.vault.Identity", Meanwhile)
    assert str(vault.key(A, create=True)) == str(other)
    assert [path.name for path in vault.keys.iterdir()] == [f"{A}.key"]


def test_a_destroyed_key_is_gone_for_good(vault, tmp_path):
    path = tmp_path / f"{A}.age"
    vault.write(path, b"text")
    public = str(vault.key(A).to_public())
    vault.destroy(A)
    assert not (vault.keys / f"{A}.key").exists() and vault.forgotten() == {A: public}
    for attempt in (lambda: vault.open(path), lambda: vault.key(A, create=True), lambda: vault.write(path, b"new")):
        with pytest.raises(VaultError, match=f"thread was forgotten; .*field: thread; got: '{A}'"):
            attempt()
    vault.destroy(A)
    assert vault.forgotten() == {A: public}
    assert not (vault.keys / f"{A}.key").exists()


def test_a_key_that_is_damaged_or_was_never_made_can_be_destroyed(vault):
    vault.key(A, create=True)
    (vault.keys / f"{A}.key").write_text("damaged")
    for thread in (A, B):
        vault.destroy(thread)
    assert vault.forgotten() == {A: None, B: None} and not list(vault.keys.iterdir())


def test_a_killed_destruction_leaves_no_living_key(vault, monkeypatch):
    vault.key(A, create=True)
    path = vault.keys / f"{A}.key"

    def kill(size):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "urandom", kill)  # the tombstone stands, the key is untouched
    with pytest.raises(KeyboardInterrupt):
        vault.destroy(A)
    assert path.exists()
    with pytest.raises(VaultError, match="thread was forgotten"):
        vault.key(A)
    monkeypatch.undo()
    vault.destroy(A)
    assert not path.exists()


# ---------------------------------------------------------------- writing


def test_a_failed_write_leaves_the_old_record(vault, tmp_path, monkeypatch):
    path = tmp_path / f"{A}.age"
    vault.write(path, b"old")

    def fail(reader, writer, recipients):
        writer.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pyrage, "encrypt_io", fail)
    with pytest.raises(OSError, match="disk full"):
        vault.write(path, b"new")
    monkeypatch.undo()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)  # all but the rename has happened
    with pytest.raises(KeyboardInterrupt):
        vault.write(path, b"new")
    assert vault.open(path) == b"old" and [p.name for p in tmp_path.glob(".*")] == []


def test_what_is_written_is_read_back(vault, tmp_path, monkeypatch):
    real = pyrage.encrypt_io
    monkeypatch.setattr(pyrage, "encrypt_io", lambda reader, writer, to: (reader.read(1), real(reader, writer, to)))
    with pytest.raises(VaultError, match="read back other bytes than were written; file: "):
        vault.write(tmp_path / f"{A}.age", b"text")
    assert not list(tmp_path.glob("*.age"))
    # Without the identity there is nothing to read back with.
    write_encrypted(tmp_path / "x.age", b"text", Identity.generate().to_public())


WRITER = """
import sys
from pathlib import Path
from moelab.flywheel.vault import Vault
folder = Path(sys.argv[1])
vault = Vault(folder / "vault")
for number in range(int(sys.argv[2]), 10**6):
    name = f"{number % 3}.{number}.age"
    vault.write(folder / "records" / name, f"{number} ".encode() * 30000)
    print(name, flush=True)
"""


def test_a_killed_writer_leaves_whole_records_only(tmp_path):
    """SIGKILL at any moment: what was reported is there, what is there opens, what is left over is scratch."""
    vault, records = Vault(tmp_path / "vault"), tmp_path / "records"
    reported = []
    for attempt in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(len(reported))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            reported.append(process.stdout.readline().strip())
            time.sleep(0.003 + 0.017 * attempt)
            process.send_signal(signal.SIGKILL)
            reported += process.stdout.read().split("\n")[:-1]
        present = {path.name for path in records.glob("*.age")}
        assert set(reported) <= present and len(present) <= len(reported) + attempt + 1
        for name in present:
            number = name.split(".")[1]
            assert vault.open(records / name) == f"{number} ".encode() * 30000
    sweep(tmp_path)
    assert not list(tmp_path.rglob(".*")) and len(list(vault.keys.iterdir())) == 3
    assert {path.name for path in records.iterdir()} == present


def test_sweep_removes_scratch_only(vault, tmp_path):
    vault.write(tmp_path / f"{A}.age", b"text")
    scratch = tmp_path / f".{A}.age.x1.partial"
    scratch.write_bytes(b"half")
    assert sweep(tmp_path) == [scratch] and vault.open(tmp_path / f"{A}.age") == b"text"


MEASURE = """
import re, resource, sys
from pathlib import Path
from moelab.flywheel.vault import Vault
vault, path = Vault(Path(sys.argv[1]) / "vault"), Path(sys.argv[1]) / "a.age"
status = Path("/proc/self/status")
def peak():
    if status.exists():  # getrusage would begin with the peak of the process that started this one
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[2] == "write":
    data = b"x" * int(sys.argv[3])
    before = peak()
    vault.write(path, data)
else:
    before = peak()
    data = vault.open(path)
    assert len(data) == int(sys.argv[3])
print(peak() - before)
"""


def test_memory_is_bounded(tmp_path):
    """Opening holds the plaintext once, writing adds nothing of its size; 12 MiB for buffers and allocator."""
    size = 32 << 20
    for what, allowed in (("write", 0), ("open", size)):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), what, str(size)]
        used = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert used < allowed + (12 << 20), what


# ---------------------------------------------------------------- authorisation


def test_authorisation_and_retention():
    header = observation().header
    check_authorised(header, "train", today=date(2026, 11, 30))
    check_authorised(header, "evaluate", today=date(2027, 1, 1))
    with pytest.raises(OwnershipError) as refusal:
        check_authorised(header, "publish", today=date(2026, 11, 30))
    assert str(refusal.value) == (
        "not authorised for this purpose; field: authorisation.purposes; got: 'publish', "
        "expected: one of train, evaluate (own writing)"
    )
    with pytest.raises(OwnershipError) as refusal:
        check_authorised(header, "train", today=date(2027, 1, 2))
    assert str(refusal.value) == (
        "kept longer than allowed; field: authorisation.retention_until; got: '2027-01-02', "
        "expected: 2027-01-01 or earlier; fix: moelab forget 0123456789abcdef"
    )


def test_open_encrypted_takes_any_of_several_keys(tmp_path):
    one, other = Identity.generate(), Identity.generate()
    write_encrypted(tmp_path / "x.age", b"text", other.to_public(), identity=other)
    assert open_encrypted(tmp_path / "x.age", one, other) == b"text"
    with pytest.raises(VaultError):
        open_encrypted(tmp_path / "x.age", one)
