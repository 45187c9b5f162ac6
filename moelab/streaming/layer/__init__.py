"""A switch layer whose experts are read on demand, in place of mlx-lm's resident one.

`layer` is the exact path; `options` names the others and `install` puts them in place: `paths`,
`stack`, `staged`, `late`, `prefill`.
"""
