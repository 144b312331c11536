"""`python -m worker_svc`, whose supervisor has the ranks' modules at its first start too.

Else it imports them where it starts ranks again alone: with this there is an import of torch for a
group, in place of three. `python -m tests.e2e.forks.ranks` takes the words of `worker_svc`.
"""

import sys

from worker_svc import __main__ as worker
from worker_svc import config
from worker_svc.ranks import supervisor

if __name__ == "__main__":
    config.prepare_environment()
    supervisor._import_ahead()
    worker.exit_at_once(worker.main(sys.argv[1:]))
