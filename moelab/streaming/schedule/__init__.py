"""Which read goes next, pure and on any clock: demand first, then what predictions ask for.

`prefetch` turns a predictor's candidates into `tickets`, `schedule` orders them; `passes` are recorded routes as a
decoder meets them, `oracle` the predictors that know them.
"""
