"""The live expert memory: cache, scheduler, slabs and reader threads put together.

`memory` is the threads, `forward` one pass after the other with its `timeline`; `fill` brings experts to slots that are
not the cache's; `allocator` bounds what mlx keeps for reuse.
"""
