"""What other processes do with an expert store: workers of a DataLoader, and ranks that torchrun starts.

`torchrun store_workers.py PACK`: each rank makes a prefill, joins the others and reads its share of the experts; rank 0
prints all checksums as JSON.
"""

import json
import os
import sys
import zlib

from torch.utils.data import Dataset

from moelab.streaming import ExpertStore, open_store


def checksum(store: ExpertStore, number: int) -> int:
    return zlib.crc32(b"".join(array.tobytes() for array in store.read(*divmod(number, store.experts)).values()))


def checksums(store: ExpertStore) -> list[int]:
    return [checksum(store, number) for number in range(store.layers * store.experts)]


class Checksums(Dataset):
    """Item n: the checksum of expert n, and the process that read it.

    With a path each process opens a store of its own; with a store all are meant to share it, which cannot be.
    """

    def __init__(self, pack, length):
        self.pack, self.length = pack, length
        self.store = pack if isinstance(pack, ExpertStore) else None

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        if self.store is None:
            self.store = open_store(self.pack, verify="records")
        return checksum(self.store, number), os.getpid()


def prefilled(pack):
    """An engine whose reader threads run, and that has seen a prompt."""
    from moelab.streaming import EngineOptions, StreamingEngine  # a worker that only reads needs no mlx

    engine = StreamingEngine.load(pack, EngineOptions(cache_bytes=4 << 20))
    engine.generate([5, 6, 7, 8, 9], max_tokens=2)
    return engine


def rank(pack: str) -> None:
    import torch
    from torch import distributed

    with prefilled(pack), open_store(pack) as store:
        distributed.init_process_group("gloo")
        first, world, total = distributed.get_rank(), distributed.get_world_size(), store.layers * store.experts
        found = torch.zeros(total, dtype=torch.int64)
        for number in range(first, total, world):
            found[number] = checksum(store, number)
        distributed.all_reduce(found)
        if first == 0:
            print(json.dumps({"world": world, "checksums": found.tolist()}), flush=True)
        distributed.destroy_process_group()


if __name__ == "__main__":
    rank(sys.argv[1])
