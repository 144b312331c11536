"""The reasons why a schema has no exact grammar."""

from fractions import Fraction


class NotWritten(Exception):
    """Raised for a schema that has no grammar here; the message says why.

    `number` is the one at fault, where one is.
    """

    def __init__(self, problem: str, number: Fraction | None = None) -> None:
        super().__init__(problem)
        self.number = number
