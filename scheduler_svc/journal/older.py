"""Names that earlier versions of the core recorded, and what they are in this one."""

from collections.abc import Callable
from typing import Any

from scheduler_svc.core import GRAMMAR
from scheduler_svc.core.request.kv_groups import KvGroup
from scheduler_svc.core.request.sequence import NOTHING_PREPARED

State = dict[str, Any]  # attributes of an object, as they were written

CALLS = {"grammar_prepared": "prepared"}
ENUM_VALUES = {
    ("Status", "waiting for grammar"): "preparing",
    ("Phase", "grammar"): "preparing",
}


def _request(state: State) -> State:
    if "has_grammar" not in state:
        return {}
    return {"requirements": (GRAMMAR,) if state.pop("has_grammar") else ()}


def _config(state: State) -> State:
    now: State = {}
    if "prepares_grammars" in state:
        now["prepared_kinds"] = (GRAMMAR.kind,) * bool(state.pop("prepares_grammars"))
    if "sliding_window" in state:
        window = state.pop("sliding_window")  # 0: none
        now["kv_groups"] = (KvGroup(state["block_size"], window),) if window else ()
    return now


def _sequence(state: State) -> State:
    now: State = {} if "num_found_waiting" in state else {"num_found_waiting": 0}
    if "preparation_id" in state:  # a sequence moves to another core without what was prepared
        state.pop("preparation_id")
        now["preparations"] = NOTHING_PREPARED
    return now


_BY_CLASS: dict[str, Callable[[State], State]] = {
    "Request": _request,
    "SchedulerConfig": _config,
    "Sequence": _sequence,
}


def take_older(class_name: str, state: State) -> State:
    """Removes what this version does not have; returns the attributes that stand for it now."""
    take = _BY_CLASS.get(class_name)
    return {} if take is None else take(state)
