"""Functions that worker processes import: the jobs of the tests on `run_workers`."""

import os
import signal
import sys
import time


def square(x):
    from moelab.models import report_progress

    report_progress({"began": x})
    return x * x


def identity(precision="float32"):
    from moelab.models import runtime_identity

    return {
        "early": "mlx.core" in sys.modules,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        **runtime_identity(precision),
    }


def loaded_with(name):
    """Whether a worker that opens a model has torch, and what `in_worker` says there."""
    import moelab.flywheel.baselines  # the stages up to the controls
    import moelab.flywheel.ceiling
    import moelab.flywheel.qualification  # noqa: F401
    from moelab.flywheel.engine import opened
    from moelab.models import in_worker

    with opened(name) as loaded:
        text = loaded.tokenizer.decode(loaded.tokenizer.encode("a word"))
    return {"torch": "torch" in sys.modules, "worker": in_worker(), "text": text}


def matmul_rows(rows):
    """Largest difference between a product of many rows and the same rows one by one, in float32."""
    import mlx.core as mx
    import numpy as np

    rng = np.random.default_rng(0)
    a, b = (mx.array(rng.normal(size=shape).astype(np.float32)) for shape in ((rows, 300), (300, 130)))
    together, alone = a @ b, mx.concatenate([a[i : i + 1] @ b for i in range(rows)])
    return float(mx.abs(together - alone).max())


def routes(name, tokens):
    import mlx.core as mx

    from moelab.models import load, self_test

    lm = load(name)
    answers = self_test(lm)["answers"]
    with lm.tap() as tap:
        lm.model(mx.array(tokens)[None])
        return answers, tap.take().ids.tolist()


def refuse(field):
    from moelab.errors import GeometryError

    raise GeometryError("made to fail", file="f", field=field, got=1, expected=2, fix="none")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_then_mark(folder, name, seconds):
    time.sleep(seconds)
    (folder / name).touch()
    return name


def gate1_by_chunk(folder, tokens, prompt, chunks):
    """Chunk → figures of Gate 1 of a checkpoint under this process's BLAS, decode against replay in chunks."""
    import numpy as np

    from moelab.flywheel import parity
    from moelab.flywheel.batches import BatchShape
    from moelab.flywheel.engine import LiveEngine, follow
    from moelab.flywheel.plan import Plan
    from moelab.models import load

    lm = load(folder)
    phase = (np.arange(len(tokens)) >= prompt).astype(np.uint8)
    one = np.zeros(1, np.int32)
    plan = Plan(sequence="s", thread="t", owner="o", tokens=tokens, phase=phase, message_start=one, role=one)
    with LiveEngine(lm) as engine:
        tape, record = follow(engine, plan, prompt)
    decoded = parity.Decoded(tokens, np.array(tape.phase, np.uint8), record.ids, record.weights, record.margin)
    return {chunk: parity.compare(lm, [decoded], BatchShape(len(tokens), chunk)).figures() for chunk in chunks}
