"""The journal: records all calls of a core to files, and replays them.

The core's state is a fold over its calls, so recording the calls records everything: `replay`
repeats them on a core and compares the plans, `worker_replay` sends the plans to a worker and
compares the tokens, `fold` replaces the oldest part by a snapshot. The core does not know about it.
"""
