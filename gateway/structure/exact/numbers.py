"""Numbers of schemas as they are written, and the ranges that they bound. Pure.

The grammar library keeps numbers as doubles, and factors of `multipleOf` in 32 bits. What it would
change is told here; everything is compared as a fraction, so nothing is rounded.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from gateway.structure import keywords
from gateway.structure.exact.failures import NotWritten

MAX_HELD_INTEGER = (1 << 53) - 2  # one more and one less are exact doubles, too
MAX_HELD_DIGITS = 15  # of a decimal fraction: any double prints so many as they were
MIN_HELD_EXPONENT = -9
_MAX_FACTOR = 400_000_000  # times ten it is within 32 bits
_MAX_FACTOR_BETWEEN = 1_000  # the library's lexer gives up on larger ones between two bounds
_MAX_COMBINED = (1 << 16) - 1  # the library multiplies two of them in 32 bits,
_MAX_PLACES = 2  # both with as many decimal places
_LEAST_NORMAL = 1e-300  # smaller ones have fewer digits
LOWER = frozenset({"minimum", "exclusiveMinimum"})
UPPER = frozenset({"maximum", "exclusiveMaximum"})
BOUNDS = LOWER | UPPER


class Rounded(float):
    """A number of which more digits were written than its double keeps."""


def read_number(text: str) -> float:
    """A number of a JSON text that is no integer; `Rounded` if digits are lost."""
    number = float(text)
    if len(text) <= MAX_HELD_DIGITS + 1 and abs(number) > _LEAST_NORMAL:
        return number
    return number if math.isinf(number) or _is_exact(text, number) else Rounded(number)


def _is_exact(text: str, number: float) -> bool:
    try:
        return Decimal(text) == Decimal(repr(number))
    except InvalidOperation:  # its exponent has more digits than are read
        return False


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The numbers between two bounds that are multiples of a step."""

    low: Fraction | None = None
    is_low_in: bool = True  # whether the bound itself is allowed
    high: Fraction | None = None
    is_high_in: bool = True
    step: Fraction | None = None

    def holds(self, number: Fraction) -> bool:
        """True if a number lies within."""
        if self.low is not None and (
            number < self.low or (number == self.low and not self.is_low_in)
        ):
            return False
        if self.high is not None and (
            number > self.high or (number == self.high and not self.is_high_in)
        ):
            return False
        return self.step is None or (number / self.step).denominator == 1

    def is_empty(self) -> bool:
        """True if there is no such number."""
        if self.low is None or self.high is None:
            return False
        if self.step is not None:
            return not self.factors()
        if self.low == self.high:
            return not (self.is_low_in and self.is_high_in)
        return self.low > self.high

    def factors(self) -> range:
        """The multiples of the step, each divided by it; the step and both bounds are known."""
        assert self.low is not None and self.high is not None and self.step is not None
        first, last = self.low / self.step, self.high / self.step
        start, stop = math.ceil(first), math.floor(last)
        start += start == first and not self.is_low_in
        stop -= stop == last and not self.is_high_in
        return range(start, stop + 1)

    def within(self, other: "NumberRange") -> "NumberRange":
        """The numbers that are in both."""
        low, is_low_in = _stronger(
            (self.low, self.is_low_in), (other.low, other.is_low_in), is_upper=False
        )
        high, is_high_in = _stronger(
            (self.high, self.is_high_in), (other.high, other.is_high_in), is_upper=True
        )
        return NumberRange(low, is_low_in, high, is_high_in, _common(self.step, other.step))


def range_of(schema: Mapping[str, Any], *, is_integer: bool) -> NumberRange:
    """The numbers that a schema's keywords allow."""
    found = NumberRange(step=Fraction(1) if is_integer else None)
    for bound in BOUNDS & schema.keys():
        if is_number(schema[bound]):
            value, is_in = fraction(schema[bound]), not bound.startswith("exclusive")
            lower = NumberRange(low=value, is_low_in=is_in)
            upper = NumberRange(high=value, is_high_in=is_in)
            found = found.within(lower if bound in LOWER else upper)
    if is_number(schema.get("multipleOf")):
        found = replace(found, step=_common(found.step, fraction(schema["multipleOf"])))
    return found


def is_number(value: Any) -> bool:
    """True if a value is a number; JSON's true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def fraction(number: float) -> Fraction:
    """A number as its shortest decimal notation says. Raises NotWritten if digits are lost."""
    if isinstance(number, Rounded):
        raise NotWritten("it has more digits than are kept", Fraction(number))
    return Fraction(number) if isinstance(number, int) else Fraction(Decimal(repr(number)))


def holds_value(value: Any) -> bool:
    """True if the library writes a value of `const` or `enum` as it is."""
    todo = [value]
    while todo:
        part = todo.pop()
        if is_number(part) and not _holds(part):
            return False
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return True


def rounded_keywords(schema: Mapping[str, Any], *, combines: bool) -> Iterable[str]:
    """The keywords of one schema, without those inside, whose numbers the library would change.

    `combines`: schemas are intersected somewhere, so factors may be multiplied.
    """
    for keyword in sorted(BOUNDS & schema.keys()):
        if is_number(schema.get(keyword)) and not _holds(schema[keyword]):
            yield keyword
    if is_number(schema.get("multipleOf")):
        is_between = bool(LOWER & schema.keys()) and bool(UPPER & schema.keys())
        most = _MAX_FACTOR_BETWEEN if is_between else _MAX_FACTOR
        if not _holds_factor(schema["multipleOf"], most, combines=combines):
            yield "multipleOf"
    if "const" in schema and not holds_value(schema["const"]):
        yield "const"
    if isinstance(schema.get("enum"), list) and not holds_value(schema["enum"]):
        yield "enum"


def _holds(number: float) -> bool:
    if isinstance(number, Rounded):
        return False
    exact = fraction(number)
    if exact.denominator == 1:
        return abs(exact.numerator) <= MAX_HELD_INTEGER
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return len(digits) <= MAX_HELD_DIGITS and int(exponent) >= MIN_HELD_EXPONENT


def _holds_factor(number: float, most: int, *, combines: bool) -> bool:
    """True if the library, which scales a factor by tens as a double, finds the same."""
    if isinstance(number, Rounded) or number > most:
        return False
    scaled, exponent = float(number), 0
    while not scaled.is_integer() and exponent <= -MIN_HELD_EXPONENT:
        scaled, exponent = scaled * 10.0, exponent + 1
    if not scaled.is_integer() or not 0 < scaled <= most:
        return False
    if Fraction(int(scaled), 10**exponent) != fraction(number):
        return False
    if not combines:
        return True
    return exponent <= _MAX_PLACES and scaled * 10 ** (_MAX_PLACES - exponent) <= _MAX_COMBINED


def _stronger(
    first: tuple[Fraction | None, bool], second: tuple[Fraction | None, bool], *, is_upper: bool
) -> tuple[Fraction | None, bool]:
    """The bound that leaves less; of equal ones that which excludes itself."""
    if first[0] is None or second[0] is None:
        return second if first[0] is None else first
    if first[0] == second[0]:
        return first[0], first[1] and second[1]
    is_first = (first[0] < second[0]) == is_upper
    return first if is_first else second


def _common(first: Fraction | None, second: Fraction | None) -> Fraction | None:
    """The least number that is a multiple of both."""
    if first is None or second is None:
        return second if first is None else first
    numerator = math.lcm(first.numerator, second.numerator)
    return Fraction(numerator, math.gcd(first.denominator, second.denominator))


def plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without its annotations."""
    return {
        name: value
        for name, value in schema.items()
        if name not in keywords.NOTES and not keywords.is_vendor(name)
    }
