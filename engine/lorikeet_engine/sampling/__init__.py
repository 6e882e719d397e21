"""From logits to tokens: penalties, grammars, draws, log probabilities."""
