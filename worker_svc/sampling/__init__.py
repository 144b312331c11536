"""From logits to tokens: logits processors, grammars, sampling; also prompt outputs."""
