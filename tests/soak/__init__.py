"""Hours of hostile traffic on one server: `PYTHONPATH=tests python -m soak --minutes 60`.

A server of a tiny random model is asked by many clients at once. Some leave at random moments,
some read slowly, some connect and say nothing; meanwhile its weights change, its cache is reset and
resized, faults are injected, and the process is stopped and killed. Every answer must be bit for
bit that of a quiet server, every refusal must say when to come again, and whenever the traffic
pauses, all blocks must be free and the memory where it was.
"""
