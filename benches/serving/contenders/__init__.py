"""What is compared. Each module has a `Contender` with the same tasks.

`ttft(prompt, first, second)`: seconds of `prompt + first` from nothing ("cold"), then of
`prompt + second`, of which `prompt` is known by then ("warm").
`begin(prompts, max_steps)`: computes the prompts as one batch and keeps it.
`go_on(steps)`: seconds of `steps` more decode steps of that batch.
`end()`: drops the batch; the first prompt's greedy tokens, so that the same work can be seen to be
done.
`weight_bytes()`: bytes of memory that the weights take.
A task that a contender does not do gives None.
"""
