"""Answers about grammars that come after the end of their request."""

from tests.scheduler_svc.core.builders import make_request, make_scheduler


def test_a_grammar_that_proved_bad_after_its_request_ended_is_not_dropped_as_well() -> None:
    """The worker holds nothing of it any more. Seen in a soak: seed 201, episode 35."""
    scheduler = make_scheduler(prepares_grammars=True)
    scheduler.add(make_request("a", 3, has_grammar=True))
    preparations = scheduler.take_preparations()
    assert preparations is not None
    (wanted,) = preparations.wanted
    scheduler.abort("a")
    assert scheduler.grammar_prepared(wanted.preparation_id, "it cannot be followed") is None
    assert scheduler.take_preparations() is None
