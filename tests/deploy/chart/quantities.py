"""Kubernetes' amounts as numbers: 500m, 2Gi."""

import re
from decimal import Decimal

FACTORS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
AMOUNT = re.compile(r"([0-9.]+)([a-zA-Z]*)")


def amount(text: object) -> Decimal:
    """The number that an amount stands for. Raises ValueError."""
    match = AMOUNT.fullmatch(str(text))
    if match is None or match[2] not in FACTORS:
        raise ValueError(f"{text!r} is no amount")
    return Decimal(match[1]) * FACTORS[match[2]]
