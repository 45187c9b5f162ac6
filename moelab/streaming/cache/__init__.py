"""The expert cache, pure and without a clock: what is resident, and what goes when it is full.

`slots` is the state machine of what lies where (`pools`, `holds`), `cache` the turns that layers take at it,
`eviction` has the policies (`ranking`, `hotpin`), `counters` what is counted.
"""
