"""The expert cache, pure and without a clock: what is resident, and what goes when it is full.

`eviction` has the policies (`ranking`, `hotpin`), `cache` the state machine (`pools`, `holds`),
`counters` what it counts.
"""
