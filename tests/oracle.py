"""transformers as the judge of greedy outputs, token for token, or by how likely they are."""

import torch

CLOSE_CALL = 1e-3  # two best logits closer than this may go either way


@torch.inference_mode()
def first_difference(oracle: torch.nn.Module, prompt: list[int], output: list[int]) -> int | None:
    """Where transformers would have chosen otherwise; None: nowhere, or only in a close call.

    Each token is compared with the argmax behind the output so far, all in one pass.
    """
    best = _logits(oracle, prompt, output).topk(2, dim=-1)
    for position, token in enumerate(output):
        first, second = best.values[position].tolist()
        if first - second < CLOSE_CALL:
            return None  # from here on both go their own ways
        if best.indices[position, 0].item() != token:
            return position
    return None


@torch.inference_mode()
def shortfall(oracle: torch.nn.Module, prompt: list[int], output: list[int]) -> float:
    """How far below the best logit a chosen one is at most, in standard deviations of all.

    For sums that round otherwise than transformers' in float32.
    """
    logits = _logits(oracle, prompt, output)
    chosen = logits.gather(1, torch.tensor(output, device=logits.device)[:, None])
    return float((logits.amax(1, keepdim=True) - chosen).max() / logits.std())


def _logits(oracle: torch.nn.Module, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Those behind the prompt and all but the last of the output [N, vocab], in one pass."""
    device = next(oracle.parameters()).device
    token_ids = torch.tensor([prompt + output[:-1]], device=device)
    logits: torch.Tensor = oracle(token_ids).logits
    return logits[0, len(prompt) - 1 :]
