"""What is compared. Each module has a `Contender` with the same three tasks.

`prefill(prompt)`: seconds from a new prompt to its next token.
`decode(prompts, steps)`: seconds of `steps` decode steps of all prompts together, after prefill,
and the first prompt's greedy tokens, so that the same work can be seen to be done.
`ttft(prompt, first, second)`: seconds of `prompt + first` from nothing ("cold"), then of
`prompt + second`, of which `prompt` is known by then ("warm").
"""
