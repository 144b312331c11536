"""Workloads of the benchmarks: requests of random tokens with given lengths."""

import random
from dataclasses import dataclass

VOCABULARY = 10_000  # prompt tokens are below
PROMPT_OF_STEPS = 492  # with half the output, a context of 576
OUTPUT_OF_STEPS = 160
PREFILL_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload."""

    prompt: list[int]
    max_tokens: int


def workload(seed: int, num_requests: int) -> list[WorkloadRequest]:
    """Prompts, then outputs, uniform in 100..1024, as other small engines publish."""
    draw = random.Random(seed).randint
    prompts = [[draw(0, VOCABULARY) for _ in range(draw(100, 1024))] for _ in range(num_requests)]
    return [WorkloadRequest(prompt, draw(100, 1024)) for prompt in prompts]


def uneven(seed: int, num_requests: int) -> list[WorkloadRequest]:
    """Prompts of 100 tokens, outputs uniform in 10..200."""
    draw = random.Random(seed).randint
    prompts = [[draw(0, VOCABULARY) for _ in range(100)] for _ in range(num_requests)]
    return [WorkloadRequest(prompt, draw(10, 200)) for prompt in prompts]


def alike(seed: int, batch: int) -> list[WorkloadRequest]:
    """Requests that decode together."""
    return _of_one_length(seed, batch, PROMPT_OF_STEPS, OUTPUT_OF_STEPS)


def prefills(seed: int, num_prompts: int) -> list[WorkloadRequest]:
    """Long prompts with one output token each."""
    return _of_one_length(seed, num_prompts, PREFILL_LENGTH, 1)


def _of_one_length(seed: int, count: int, length: int, max_tokens: int) -> list[WorkloadRequest]:
    draw = random.Random(seed).randint
    prompts = [[draw(0, VOCABULARY) for _ in range(length)] for _ in range(count)]
    return [WorkloadRequest(prompt, max_tokens) for prompt in prompts]
