"""transformers as the judge of greedy outputs, token for token."""

import torch

CLOSE_CALL = 1e-3  # two best logits closer than this may go either way


@torch.inference_mode()
def first_difference(oracle: torch.nn.Module, prompt: list[int], output: list[int]) -> int | None:
    """Where transformers would have chosen otherwise; None: nowhere, or only in a close call.

    Each token is compared with the argmax behind the output so far, all in one pass.
    """
    device = next(oracle.parameters()).device
    token_ids = torch.tensor([prompt + output[:-1]], device=device)
    best = oracle(token_ids).logits[0, len(prompt) - 1 :].topk(2, dim=-1)
    for position, token in enumerate(output):
        first, second = best.values[position].tolist()
        if first - second < CLOSE_CALL:
            return None  # from here on both go their own ways
        if best.indices[position, 0].item() != token:
            return position
    return None
