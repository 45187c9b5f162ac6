"""No flipped byte of a record goes unnoticed, wherever it is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import observation

from moelab.errors import ContractError, RecordError
from moelab.flywheel.observe import from_bytes, to_bytes

DATA = to_bytes(observation(group=True))


def refused(data):
    try:
        from_bytes(data, file="f")
    except ContractError as error:
        return isinstance(error, RecordError) and error.file == "f" and error.field is not None
    return False


def test_every_byte_of_the_header():
    """The header is where a flip could still parse: length, names, types, shapes, offsets, values, padding."""
    size = 8 + int.from_bytes(DATA[:8], "little")
    missed = [
        (place, mask)
        for place in range(size)
        for mask in (0x21 if place % 2 else 1,)
        if not refused(DATA[:place] + bytes([DATA[place] ^ mask]) + DATA[place + 1 :])
    ]
    assert missed == []


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_any_byte(place, mask):
    assert refused(DATA[:place] + bytes([DATA[place] ^ mask]) + DATA[place + 1 :])


@settings(deadline=None, max_examples=100)
@given(st.integers(0, len(DATA) - 1))
def test_any_truncation(length):
    assert refused(DATA[:length])


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=64))
def test_anything_else(data):
    assert refused(data)
    if data:
        assert refused(DATA + data)


def test_the_record_itself_is_accepted():
    assert from_bytes(DATA).header.tokens_fed == 10
    with pytest.raises(RecordError):
        from_bytes(b"")
