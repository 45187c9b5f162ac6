"""Candidate paths carry their lineage and are no observations."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from observations import RUNTIME, E, K, L, observation

from moelab.artifacts import encode_tensors
from moelab.errors import GeometryError, OwnershipError, RecordError
from moelab.flywheel.observe import Authorisation, from_bytes, to_bytes
from moelab.flywheel.proposals import ProposalHeader, Proposals, prefix_digest, proposals_from_bytes, proposals_to_bytes

CLEAN = observation().sealed()
PLACES, LENGTHS, ACCEPTED = [4, 9], [3, 2], [2, 1]


def proposals(*, routes=True, **changes):
    """Two proposals: 3 candidates at row 4 of which 2 were accepted, 2 at row 9 of which 1 was."""
    rows = CLEAN.token_ids
    candidates = [rows[4], rows[5], rows[6] + 1, rows[9], 7]
    rng = np.random.default_rng(0)
    C = len(candidates)
    everyone = np.tile(np.arange(E), (C, L, 1))
    head = ProposalHeader(
        **{name: getattr(CLEAN.header, name) for name in ("model", "tokenizer", "template", "owner", "thread")},
        generation=0,
        sequence="0",
        observation=CLEAN.header.payload,
        drafter="n-gram",
        candidates=C,
        layer_ids=(0, 1),
        experts=E,
        top_k=K,
        runtime=RUNTIME,
        authorisation=Authorisation("own writing", ("train",), "2027-01-01"),
    )
    made = Proposals(
        header=head,
        proposal=np.array([0, 1]),
        proposal_generation=np.zeros(2, np.int64),
        verifier_generation=np.zeros(2, np.int64),
        position=np.array(PLACES, np.int32),
        length=np.array(LENGTHS, np.int32),
        accepted=np.array(ACCEPTED, np.int32),
        prefix=np.stack([np.frombuffer(prefix_digest(rows[:place]), np.uint8) for place in PLACES]),
        token=np.array(candidates, np.int32),
    )
    if routes:
        made = replace(
            made,
            ids=rng.permuted(everyone, axis=-1)[..., :K].astype(np.uint16),
            weights=rng.uniform(0.1, 1, (C, L, K)).astype(np.float32),
            margin=rng.uniform(0, 1, (C, L)).astype(np.float32),
        )
    return replace(made, **changes)


@pytest.mark.parametrize("routes", [True, False])
def test_written_is_read(routes):
    made = proposals(routes=routes)
    data = proposals_to_bytes(made)
    back = proposals_from_bytes(data)
    assert back.header == made.sealed().header and set(back.arrays) == set(made.arrays)
    assert all(np.array_equal(back.arrays[name], made.arrays[name]) for name in made.arrays)
    assert proposals_to_bytes(back) == data
    back.check_lineage(CLEAN)


def test_what_each_candidate_is():
    made = proposals()
    assert made.of.tolist() == [0, 0, 0, 1, 1]
    assert made.depth.tolist() == [0, 1, 2, 0, 1]
    assert made.kept.tolist() == [True, True, False, True, False]


def test_a_reader_of_one_kind_refuses_the_other():
    with pytest.raises(
        RecordError, match="another kind of record; file: f; field: record; got: 'proposals', expected: ob"
    ):
        from_bytes(proposals_to_bytes(proposals()), file="f")
    with pytest.raises(
        RecordError, match="another kind of record; file: f; field: record; got: 'observation', expected"
    ):
        proposals_from_bytes(to_bytes(CLEAN), file="f")


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("proposal", [1, 1], RecordError, "proposals out of order; file: f; field: proposal[1]; got: 1"),
        ("proposal_generation", [0, -1], RecordError, "impossible lineage; file: f; field: proposal_generation[1]"),
        ("position", [-1, 2], RecordError, "impossible lineage; file: f; field: position[0]; got: -1"),
        ("length", [5, 0], RecordError, "proposal without a candidate; file: f; field: length[1]; got: 0"),
        ("length", [3, 3], RecordError, "rows are not what was counted; file: f; field: length; got: 6, expected: 5"),
        ("accepted", [4, 1], RecordError, "accepted more than was proposed; file: f; field: accepted[0]; got: 4"),
        ("accepted", [-1, 1], RecordError, "accepted more than was proposed; file: f; field: accepted[0]; got: -1"),
        ("token", [1, 2, 3, -4, 5], RecordError, "token does not exist; file: f; field: token[3]; got: -4"),
        ("token", [1, 2, 3, 4], RecordError, "rows are not what was counted; file: f; field: token (C); got: 4"),
        (
            "prefix",
            np.zeros((2, 31)),
            GeometryError,
            "wrong geometry; file: f; field: prefix (B); got: 31, expected: 32",
        ),
        (
            "margin",
            None,
            RecordError,
            "partial record; file: f; field: margin; got: ['ids', 'weights'], expected: all or",
        ),
        ("weights", np.zeros((5, L, K)), RecordError, "all-zero capture; file: f; field: weights"),
        ("ids", np.zeros((5, L, K)), RecordError, "expert chosen twice; file: f; field: ids[0,0]; got: [0, 0, 0]"),
    ],
)
def test_impossible_proposals_are_refused(name, value, error, said):
    if value is not None:
        value = np.asarray(value, dtype=getattr(proposals(), name).dtype)
    broken = proposals(**{name: value})
    with pytest.raises(error) as refusal:
        broken.validate(file="f")
    assert str(refusal.value).startswith(said)
    with pytest.raises(error):
        proposals_to_bytes(broken)


def test_no_proposal_at_all_is_refused():
    made = proposals(routes=False)
    none = replace(
        made,
        header=msgspec.structs.replace(made.header, candidates=0),
        **{name: array[:0] for name, array in made.arrays.items()},
    )
    with pytest.raises(RecordError, match="record is empty; field: proposal; got: 0, expected: >= 1"):
        none.validate()


def test_lineage_is_held_against_the_clean_path():
    made = proposals()
    with pytest.raises(OwnershipError, match="lineage of another observation; file: f; field: observation"):
        made.check_lineage(observation(seed=1).sealed(), file="f")
    with pytest.raises(RecordError, match=r"another accepted prefix; file: f; field: prefix\[1\]; got: '00"):
        replace(made, prefix=made.prefix * np.array([[1], [0]], np.uint8)).check_lineage(CLEAN, file="f")
    with pytest.raises(RecordError, match=r"another accepted prefix; .*field: prefix\[0\]"):
        replace(made, position=np.array([5, 9], np.int32)).check_lineage(CLEAN)
    with pytest.raises(RecordError, match=r"accepted another token; file: f; field: token\[2\]; got: \d+"):
        replace(made, accepted=np.array([3, 1], np.int32)).check_lineage(CLEAN, file="f")
    with pytest.raises(RecordError, match=r"accepted beyond the thread's end; .*token\[4\]; got: 7, expected: 10 rows"):
        replace(made, accepted=np.array([2, 2], np.int32)).check_lineage(CLEAN)


def test_altered_proposals_are_refused():
    data = proposals_to_bytes(proposals())
    for place in range(0, len(data), 7):
        with pytest.raises(RecordError):
            proposals_from_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], file="f")


def test_altered_content_under_a_correct_file_seal_is_refused():
    made = proposals().sealed()
    raw = msgspec.to_builtins(made.header) | {"drafter": "another"}
    with pytest.raises(RecordError, match="payload altered; file: f; field: payload; got: "):
        proposals_from_bytes(encode_tensors(made.arrays, raw), file="f")
