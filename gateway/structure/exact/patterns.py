"""Regular expressions of numbers in a range, of any length and without rounding. Pure.

A number is written without an exponent. Each condition is an expression of its own; the
grammar intersects them.
"""

from collections.abc import Iterator
from fractions import Fraction

from gateway.structure.exact.failures import NotWritten
from gateway.structure.exact.numbers import NumberRange

MAX_DIGITS = 100  # of a bound or a step: an expression is as long as the square of them
MAX_MEMBERS = 10_000  # of a range that is written out
MAX_SUFFIX_DIGITS = 3  # that tell whether an integer is a multiple
_INTEGER = "(0|[1-9][0-9]*)"
_FRACTION = r"(\.[0-9]+)?"
_ZEROS = r"(\.0+)?"


def patterns_of(numbers: NumberRange) -> list[str]:
    """Expressions that all match exactly the numbers of a range. Raises NotWritten."""
    for one in (numbers.low, numbers.high, numbers.step):
        if one is not None and _num_digits(one) > MAX_DIGITS:
            raise NotWritten(f"it has more than {MAX_DIGITS} digits", one)
    if numbers.low is not None and numbers.low == numbers.high:
        return [_escaped(text_of(numbers.low))]
    found = [f"-?{_INTEGER}{_FRACTION}"]
    if numbers.step is not None:
        multiples = _multiples(numbers.step)
        if multiples is None:
            return _written_out(numbers)
        found.append(f"-?{multiples}")
    if numbers.low is not None:
        found.append(_at_least(numbers.low, is_in=numbers.is_low_in))
    if numbers.high is not None:
        found.append(_at_most(numbers.high, is_in=numbers.is_high_in))
    return found


def text_of(number: Fraction) -> str:
    """A decimal fraction in digits, without an exponent."""
    whole, decimals = _split(abs(number))
    sign = "-" if number < 0 else ""
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"


def one_of(numbers: list[Fraction]) -> str:
    """An expression of some numbers."""
    return "|".join(_escaped(text_of(number)) for number in numbers)


def _escaped(text: str) -> str:
    return text.replace(".", r"\.")


def _split(number: Fraction) -> tuple[str, str]:
    """The digits before and after the point of a decimal fraction that is not negative."""
    places = 0
    while (number * 10**places).denominator != 1:
        places += 1
    digits = str((number * 10**places).numerator).rjust(places + 1, "0")
    return digits[: len(digits) - places], digits[len(digits) - places :]


def _num_digits(number: Fraction) -> int:
    # Of a decimal fraction each place needs one factor of two or five at most.
    return len(str(abs(number.numerator))) + number.denominator.bit_length()


def _written_out(numbers: NumberRange) -> list[str]:
    assert numbers.step is not None
    is_bounded = numbers.low is not None and numbers.high is not None
    factors = numbers.factors() if is_bounded else range(0)
    # Not `len`, which has an end.
    if not factors or factors[-1] - factors[0] >= MAX_MEMBERS:
        problem = f"it has more than {MAX_MEMBERS} multiples within its bounds"
        raise NotWritten(problem, numbers.step)
    return [one_of([factor * numbers.step for factor in factors])]


def _at_least(low: Fraction, *, is_in: bool) -> str:
    if low > 0 or (low == 0 and not is_in):
        return _magnitude_from(low, is_in=is_in)
    positive = f"{_INTEGER}{_FRACTION}"
    return positive if low == 0 else f"{positive}|-({_magnitude_to(-low, is_in=is_in)})"


def _at_most(high: Fraction, *, is_in: bool) -> str:
    if high < 0 or (high == 0 and not is_in):
        return f"-({_magnitude_from(-high, is_in=is_in)})"
    return f"-{_INTEGER}{_FRACTION}|{_magnitude_to(high, is_in=is_in)}"


def _magnitude_from(number: Fraction, *, is_in: bool) -> str:
    """Numbers without a sign from this one on."""
    whole, decimals = _split(number)
    equal = whole + _decimals_from(decimals, is_in=is_in)
    return "|".join([*(one + _FRACTION for one in _larger(whole)), equal])


def _magnitude_to(number: Fraction, *, is_in: bool) -> str:
    """Numbers without a sign up to this one."""
    whole, decimals = _split(number)
    options = [one + _FRACTION for one in _smaller(whole)]
    if decimals or is_in:
        options.append(whole + _decimals_to(decimals, is_in=is_in))
    return "|".join(options) or r"[^\s\S]"


def _larger(whole: str) -> Iterator[str]:
    """Integers larger than this one."""
    yield f"[1-9][0-9]{{{len(whole)},}}"
    for at, digit in enumerate(whole):
        if digit != "9":
            yield f"{whole[:at]}[{int(digit) + 1}-9]{_any_digits(len(whole) - at - 1)}"


def _smaller(whole: str) -> Iterator[str]:
    """Integers smaller than this one."""
    if len(whole) > 1:
        yield "0"
        yield f"[1-9][0-9]{{0,{len(whole) - 2}}}"
    for at, digit in enumerate(whole):
        least = 1 if at == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            yield f"{whole[:at]}[{least}-{int(digit) - 1}]{_any_digits(len(whole) - at - 1)}"


def _any_digits(number: int) -> str:
    return f"[0-9]{{{number}}}" if number else ""


def _decimals_from(decimals: str, *, is_in: bool) -> str:
    """Decimals, with their point, that are at least these, which end with no zero."""
    if not decimals:
        return _FRACTION if is_in else r"\.[0-9]*[1-9][0-9]*"
    options = [
        f"{decimals[:at]}[{int(digit) + 1}-9][0-9]*"
        for at, digit in enumerate(decimals)
        if digit != "9"
    ]
    options.append(f"{decimals}[0-9]*" if is_in else f"{decimals}[0-9]*[1-9][0-9]*")
    return rf"\.({'|'.join(options)})"


def _decimals_to(decimals: str, *, is_in: bool) -> str:
    """Decimals, with their point, that are at most these; none are the least."""
    if not decimals:
        return _ZEROS
    options = [
        f"{decimals[:at]}[0-{int(digit) - 1}][0-9]*"
        for at, digit in enumerate(decimals)
        if digit != "0"
    ]
    options += [decimals[:end] for end in range(1, len(decimals))]
    if is_in:
        options.append(f"{decimals}0*")
    return rf"(\.({'|'.join(options)}))?"


def _multiples(step: Fraction) -> str | None:
    """Multiples of a step, without a sign; None: no digits at the end tell."""
    places = len(_split(step)[1])
    factor = (step * 10**places).numerator
    suffix, zeros = _suffix_digits(factor)
    if suffix is None:
        return None
    if places == 0:
        return _integer_multiples(factor, suffix, zeros)
    if zeros or suffix > places:
        return None
    return _decimal_multiples(factor, suffix, places)


def _suffix_digits(factor: int) -> tuple[int | None, int]:
    """Numbers of digits and of zeros after them that tell whether an integer is a multiple."""
    zeros = 0
    while factor % 10 == 0:
        factor, zeros = factor // 10, zeros + 1
    for number in range(MAX_SUFFIX_DIGITS + 1):
        if 10**number % factor == 0:
            return number, zeros
    return None, zeros


def _integer_multiples(factor: int, suffix: int, zeros: int) -> str:
    power = 10**zeros
    small = factor // power
    ends = [str(number).rjust(suffix, "0") for number in range(0, 10**suffix, small)]
    few = [str(number) for number in range(small, 10**suffix, small)]
    tails = f"[1-9][0-9]*({'|'.join(ends)})" if suffix else "[1-9][0-9]*"
    digits = "|".join([*few, tails])
    return f"(0|({digits})0{{{zeros}}})" if zeros else f"(0|{digits})"


def _decimal_multiples(factor: int, suffix: int, places: int) -> str:
    free = places - suffix
    options = []
    for number in range(0, 10**suffix, factor):
        end = str(number).rjust(suffix, "0").rstrip("0") if suffix else ""
        options.append(f"{_any_digits(free)}{end}0*" if end else f"[0-9]{{0,{free}}}0*")
    return rf"{_INTEGER}(\.({'|'.join(options)}))?"
