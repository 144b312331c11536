"""Prompts whose answers repeat much of them, and prompts of random tokens, whose answers do not."""

import random

CODE = '''\
class Account:
    """A bank account with a balance in cents."""

    def __init__(self, owner: str, balance: int = 0) -> None:
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount: int) -> None:
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount: int) -> None:
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self.balance:
            raise ValueError("the balance is too small")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def transfer(self, other: "Account", amount: int) -> None:
        self.withdraw(amount)
        other.deposit(amount)
'''
TEXT = (
    "The lighthouse at Cape Farrow was built in 1871, after three ships had been lost in one "
    "winter. Its first keeper, Anna Brandt, kept the lamp for thirty-four years and wrote down the "
    "weather of every day. Her books were found in 1962 in the cellar of the harbour office. They "
    "show that storms came mostly from the north-west, that the winter of 1890 was the coldest, "
    "and that fog lay on the cape on sixty days of a year. The harbour office gave the books to "
    "the university, which used them to check its models of the weather. In 1998 the lamp was "
    "replaced by an electric one, and the last keeper, Peter Holm, left the lighthouse. Today it "
    "is a museum with twenty thousand visitors a year."
)
RECORDS = """\
{"id": 101, "name": "Mira Okafor", "city": "Lagos", "role": "engineer", "active": true}
{"id": 102, "name": "Jonas Weber", "city": "Hamburg", "role": "designer", "active": false}
{"id": 103, "name": "Lucia Ferrari", "city": "Turin", "role": "engineer", "active": true}
{"id": 104, "name": "Kenji Sato", "city": "Osaka", "role": "analyst", "active": true}
"""
REPEATING = {
    "edit this code": f"Rename the method deposit to pay_in in this code. Repeat the whole code "
    f"with that change and say nothing else.\n\n```python\n{CODE}```\n",
    "summarize this text": f"Summarize this text by repeating its most important sentences, word "
    f"for word.\n\n{TEXT}\n",
    "fill this JSON": f"Write these records as one JSON array, with the field active left out of "
    f"each.\n\n{RECORDS}\n",
}


def random_prompts(seed: int, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens."""
    draw = random.Random(seed).randrange
    return [[draw(vocab_size) for _ in range(length)] for _ in range(count)]
