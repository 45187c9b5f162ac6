"""Over generated content: what is written comes back, and no altered byte is ever taken for the original."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moelab.artifacts import canonical_json, decode_tensors, digest_tensors, encode_tensors
from moelab.errors import ArtifactError

DTYPES = st.sampled_from(["?", "u1", "u2", "i4", "i8", "u8", "f2", "f4", "f8"])
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
TENSORS = st.dictionaries(st.text("abcXYZ.日_", min_size=1, max_size=6), ARRAYS, max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\"\\é", max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
HEADERS = st.dictionaries(st.text("abc", min_size=1, max_size=3), JSON, max_size=3)


@given(TENSORS, HEADERS)
@settings(max_examples=150, deadline=None)
def test_round_trip(tensors, header):
    data = encode_tensors(tensors, header)
    arrays, back = decode_tensors(data)
    assert canonical_json(back) == canonical_json(header)
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in arrays.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in tensors.items()
    }
    assert encode_tensors(arrays, back) == data


DATA = encode_tensors(
    {"ids": np.arange(6, dtype=np.uint16).reshape(2, 3), "w": np.ones(3, np.float16)}, {"layers": [0]}
)


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
@settings(max_examples=500, deadline=None)
def test_no_altered_byte_changes_what_is_read(place, flip):
    """Refused, or (a space of padding turned into another space) equal in every name, type, shape, value and field."""
    altered = bytearray(DATA)
    altered[place] ^= flip
    try:
        arrays, header = decode_tensors(bytes(altered))
    except ArtifactError:
        return
    assert header == {"layers": [0]}
    assert digest_tensors(arrays) == digest_tensors(decode_tensors(DATA)[0])


@given(st.integers(0, len(DATA) - 1))
@settings(max_examples=100, deadline=None)
def test_no_truncated_file_is_read(length):
    with pytest.raises(ArtifactError):
        decode_tensors(DATA[:length])
