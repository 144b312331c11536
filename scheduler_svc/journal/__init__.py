"""The journal: what the core was told, in order, in files; and what can be made of them.

The core's state is a fold over the calls it gets. Recording these calls therefore records
everything: `replay` plays them to a core and compares the plans, `worker_replay` sends the plans to
a worker and compares the tokens, `fold` cuts off an old beginning. The core knows nothing of it.
"""
