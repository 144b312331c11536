"""`thinking` of the Messages API, as settings of the served model's chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gateway.chat.conversation import EFFORTS
from gateway.chat.template import EFFORT, ChatTemplate
from gateway.errors.request_errors import invalid, unsupported
from gateway.http.messages import Strict


class ThinkingOptions(Strict):
    """Settings of how the model thinks before it answers: at all, and how long."""

    where: ClassVar[str | None] = "thinking."

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_hidden(self) -> bool:
        """True if the answer is to hold no thoughts."""
        return self.display == "omitted"

    def max_tokens_of(self, max_tokens: int | None) -> int | None:
        """The most tokens of thoughts; None where the answer's own limit comes first.

        Raises RequestError for a budget of a model that is not asked to think.
        """
        budget = self.budget_tokens
        if budget is None:
            return None
        if self.type != "enabled":
            raise invalid("thinking.budget_tokens", 'belongs to type "enabled"')
        if budget < 0:
            raise invalid("thinking.budget_tokens", "is negative")
        return budget if max_tokens is None or budget < max_tokens else None


@dataclass(frozen=True, slots=True)
class Thinker:
    """The served model's knowledge of thinking."""

    thinks: bool  # its answers may begin with reasoning
    template: ChatTemplate | None

    def settings(
        self, asked: ThinkingOptions | None, effort: str | None
    ) -> tuple[Mapping[str, Any], str | None]:
        """Variables for the chat template, and the reasoning effort.

        Clients send an effort to every model: one that knows none is not asked for it. Raises
        RequestError where the model cannot do what is asked.
        """
        effort = self._known(effort)
        if asked is None or asked.type == "adaptive":
            return {}, effort
        if asked.type == "between_tools":
            raise unsupported("thinking.type", "'between_tools' is not supported here")
        is_on = asked.type == "enabled"
        if is_on and not self.thinks:
            raise unsupported("thinking.type", "the model's chat template knows no thinking")
        if self.switch is not None:
            return {self.switch: is_on}, effort
        if is_on or not self.thinks:
            return {}, effort
        if not self.reads(EFFORT):
            raise unsupported("thinking.type", "this model thinks always")
        return {}, "none"

    def _known(self, effort: str | None) -> str | None:
        """The effort, if the chat template knows degrees or a switch. Raises RequestError."""
        if effort is not None and effort not in EFFORTS:
            raise invalid("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
        return effort if self.reads(EFFORT) or self.switch is not None else None

    @property
    def switch(self) -> str | None:
        """The variable of the chat template that turns thinking on and off, if it has one."""
        return None if self.template is None else self.template.switch

    def reads(self, name: str) -> bool:
        """True if the chat template has a variable of this name."""
        return self.template is not None and self.template.reads(name)
