"""What fresh processes do while their resident set is watched: `python memory_jobs.py JOB ARGUMENTS` prints JSON."""

import json
import subprocess
import sys
from pathlib import Path


def run(job, *arguments):
    """The figures of a job in a process of its own."""
    command = [sys.executable, __file__, job, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def long_prompt(model, tokens, reserve, in_one_step):
    """A long prompt in the reserve of a memory budget. `in_one_step`: as if nothing were counted."""
    from moelab.models import without_torch

    without_torch()
    from moelab.studies.streaming_memory import Watch

    with Watch(0.01) as watch:
        import mlx.core as mx

        from moelab.streaming import EngineOptions, StreamingEngine

        options = EngineOptions(reserve_bytes=int(reserve))
        with StreamingEngine.load(model, options, memory_budget_bytes=1 << 30) as engine:
            slots = sum(slab.host.nbytes for slab in engine.memory.slabs)
            prompt = [(7 * n) % 250 for n in range(int(tokens))]
            step = engine.prefill_step(len(prompt), 4)
            if int(in_one_step):
                StreamingEngine.prefill_step = lambda self, *_, **__: len(prompt)
                StreamingEngine._require_room = lambda *_: None
            first = [token for token, _ in engine.stream_tokens(prompt, max_tokens=4)]
            allowed = engine.base_bytes + slots + int(reserve)
    return {"peak": watch.peak, "allowed": allowed, "step": step, "tokens": first, "allocator": mx.get_peak_memory()}


def pack(model, out):
    """A model packed, beside what the process took before."""
    from moelab.models import without_torch

    without_torch()
    from moelab.streaming import write_pack
    from moelab.studies.streaming_memory import Watch

    with Watch(0.01) as watch:
        before = watch.look()
        write_pack(model, out)
    return {"before": before, "peak": watch.peak}


def opening(model):
    """A checkpoint opened in place, beside what the process took when its skeleton was there."""
    from moelab.models import without_torch

    without_torch()
    from moelab.streaming import open_store
    from moelab.streaming.store.skeleton import skeleton
    from moelab.studies.streaming_memory import Watch

    with Watch(0.001) as watch:
        skeleton(model)
        before = watch.look()
        with open_store(model):
            pass
    return {"before": before, "peak": watch.peak}


def imports(lean):
    """What the engine's libraries take before anything is loaded."""
    from moelab.models import without_torch

    if int(lean):
        without_torch()
    import psutil

    import moelab.streaming.engine.engine

    assert moelab.streaming.engine.engine
    return {"bytes": psutil.Process().memory_info().rss, "torch": "torch" in sys.modules}


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
