"""Compares greedy outputs with transformers, token by token, or by likelihood."""

import torch

CLOSE_CALL = 1e-3  # two best logits closer than this may be in either order


@torch.inference_mode()
def first_difference(oracle: torch.nn.Module, prompt: list[int], output: list[int]) -> int | None:
    """The first index at which transformers would choose another token; None if there is none.

    Close calls count as equal. Each token is compared with the argmax after the output so far, all
    in one pass.
    """
    best = _logits(oracle, prompt, output).topk(2, dim=-1)
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
