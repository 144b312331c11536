"""Ids that end an output, of a worker that names some which its vocabulary lacks."""

from scheduler_svc.config import parse
from scheduler_svc.core_config import core_config
from simulator.workers.fake_worker import FakeModel, describe


def test_a_request_never_stops_at_an_id_that_its_worker_would_refuse() -> None:
    model = FakeModel(vocab_size=100, eos_token_ids=(99, 100, 2**32 - 1))
    config = core_config(parse(["--worker", "127.0.0.1:1"]), describe(model, 1))
    assert config.eos_token_ids == (99,)
