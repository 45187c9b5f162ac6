"""The expert store: where the bytes of one expert lie, and how they reach a slot.

`layout` says what one expert is; it lies in a `checkpoint` in place (`shards`, `skeleton`) or in a `pack` (`packing`,
`origin`); `plan` and `readers` fetch it into a `slab`'s slot, `device` is a disk as arithmetic; `store` is all of it
behind `read_into`, in one process (`processes`).
"""
