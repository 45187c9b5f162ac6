"""Whole models: loaded without their experts, run within a memory budget, generating as mlx-lm does.

`engine` runs one as `options` say, `generate` is its loop, `footprint` what a request takes, `issuing` asks
predictions inside a pass; `streamed` is the model as the other rooms know one, `layerwise` replays a shard layer by
layer.
"""
