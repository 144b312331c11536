"""Compares greedy outputs with transformers, token by token, or by likelihood."""

from collections.abc import Sequence

import torch

BATCH = 16
CLOSE_CALL = 1e-3  # two best logits closer than this may be in either order


@torch.inference_mode()
def first_difference(oracle: torch.nn.Module, prompt: list[int], output: list[int]) -> int | None:
    """The first index at which transformers would choose another token; None if there is none.

    Close calls count as equal. Each token is compared with the argmax after the output so far, all
    in one pass.
    """
    return _difference(_logits(oracle, prompt, output), output)


@torch.inference_mode()
def first_differences(
    oracle: torch.nn.Module, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> list[int | None]:
    """`first_difference` of each pair, a batch of similar lengths in one pass: half the time."""
    found: dict[int, int | None] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index] + outputs[index]))
    for first in range(0, len(order), BATCH):
        indices = order[first : first + BATCH]
        texts = [torch.tensor(prompts[index] + outputs[index][:-1]) for index in indices]
        # Padding is after a text, where no token of it attends to it.
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        hidden = oracle.base_model(padded).last_hidden_state
        for index, row, text in zip(indices, hidden, texts, strict=True):
            logits = oracle.get_output_embeddings()(row[len(prompts[index]) - 1 : len(text)])
            found[index] = _difference(logits, outputs[index])
    return [found[index] for index in range(len(prompts))]


def _difference(logits: torch.Tensor, output: list[int]) -> int | None:
    best = logits.topk(2, dim=-1)
    for position, token in enumerate(output):
        first, second = best.values[position].tolist()
        if first - second < CLOSE_CALL:
            return None  # the outputs differ from here on
        if best.indices[position, 0].item() != token:
            return position
    return None


@torch.inference_mode()
def shortfall(oracle: torch.nn.Module, prompt: list[int], output: list[int]) -> float:
    """Largest distance of a chosen logit below the best one, in standard deviations of all logits.

    For sums with another rounding than transformers' float32.
    """
    logits = _logits(oracle, prompt, output)
    chosen = logits.gather(1, torch.tensor(output, device=logits.device)[:, None])
    return float((logits.amax(1, keepdim=True) - chosen).max() / logits.std())


def _logits(oracle: torch.nn.Module, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits after the prompt and after all output tokens but the last [N, vocab], in one pass."""
    device = next(oracle.parameters()).device
    token_ids = torch.tensor([prompt + output[:-1]], device=device)
    logits: torch.Tensor = oracle(token_ids).logits
    return logits[0, len(prompt) - 1 :]
